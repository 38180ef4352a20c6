//! Files of an earlier model in the folder: programs read them along with the new one.

use super::{CONFIGURATIONS, COPIED, SideFile, genai, other_model};
use crate::place::Place;
use std::fs;

/// What to know of files that are there, that programs read, and that this export, which writes `files`, does not replace.
///
/// - genai_config.json, where it names the model that this export writes;
/// - the others, unless the folder holds another model than `models` or a checkpoint, whose files they may be.
///
/// They are not removed, because they may be the user's.
pub(super) fn notes(files: &[SideFile], place: &Place, models: &[&str]) -> Vec<String> {
    // With no side files at all, those that are there were to stay.
    if files.is_empty() {
        return Vec::new();
    }
    of_earlier_genai(files, place).into_iter().chain(of_others(files, place, models)).collect()
}

fn is_written(files: &[SideFile], name: &str) -> bool {
    files.iter().any(|file| file.name == name)
}

fn of_earlier_genai(files: &[SideFile], place: &Place) -> Option<String> {
    let path = place.side(genai::NAME);
    let named = || genai::model_of(&fs::read(&path).ok()?);
    let is_stale = !is_written(files, genai::NAME) && named().is_some_and(|model| model == place.model_from_folder());
    let why = "it is of an earlier export under this name, and does not fit this model: remove it";
    is_stale.then(|| format!("{}: {why}", path.display()))
}

fn of_others(files: &[SideFile], place: &Place, models: &[&str]) -> Option<String> {
    let names = CONFIGURATIONS.iter().chain(COPIED).filter(|name| !is_written(files, name));
    let there: Vec<String> = names
        .map(|name| place.side(name))
        .filter(|path| path.is_file())
        .map(|path| path.display().to_string())
        .collect();
    if there.is_empty() || other_model(place, models).is_some() {
        return None;
    }
    let (was, is, them, files) = match there.len() {
        1 => ("was", "is", "it", "file"),
        _ => ("were", "are", "them", "files"),
    };
    Some(format!(
        "{} {was} there before this export, and {is} not from this checkpoint, but programs such as moh-run use {them} \
         with this model: remove {them}, or replace {them} with this model's {files}",
        there.join(", ")
    ))
}
