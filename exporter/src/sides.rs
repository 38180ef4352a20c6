//! Files that go along with a model: its configuration and its tokenizer.

use crate::error::Error;
use crate::staging::{folder_of, write_file};
use moh_models::Checkpoint;
use moh_models::checkpoint::find_weights;
use moh_models::presets::Preset;
use std::fs;
use std::path::{Path, PathBuf};

/// Files of a checkpoint that its users need beside the exported model.
const SIDE_FILES: &[&str] = &[
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "preprocessor_config.json",
];

/// Where the contents of a side file come from.
#[derive(Debug)]
pub enum Side {
    /// A file of the checkpoint.
    File(PathBuf),
    /// The configuration of a preset.
    Preset(&'static Preset),
}

impl Side {
    fn contents(&self) -> Result<Vec<u8>, Error> {
        match self {
            Side::File(path) => fs::read(path).map_err(Error::io(path)),
            Side::Preset(preset) => Ok(preset.config.as_bytes().to_vec()),
        }
    }

    /// Writes the contents to `path`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        write_file(path, &self.contents()?)
    }
}

/// The side files of a checkpoint that are not beside `output` already, the configuration in use as config.json among them.
///
/// A file that is there with other contents belongs to another model where the folder holds one: an .onnx file other than
/// `output`, or weights that could be exported. Else it is `output`'s own, or the user's.
///
/// # Errors
/// [`Error::ForeignSideFile`] where another model's file of that name is there; [`Error::SideFile`] where another file is,
/// and `force` is not set.
pub fn side_files(checkpoint: &Checkpoint, output: &Path, force: bool) -> Result<Vec<(&'static str, Side)>, Error> {
    let mut files = Vec::new();
    for &name in SIDE_FILES {
        let side = match (name, checkpoint.preset()) {
            ("config.json", Some(preset)) => Side::Preset(preset),
            ("config.json", None) => Side::File(checkpoint.config().path().to_owned()),
            _ => Side::File(checkpoint.folder().join(name)),
        };
        if matches!(&side, Side::File(source) if !source.is_file()) {
            continue;
        }
        let path = output.with_file_name(name);
        match fs::read(&path) {
            Ok(there) if side.contents()? == there => continue,
            Ok(_) => {
                let source_file = match &side {
                    Side::File(source) => source.clone(),
                    Side::Preset(_) => checkpoint.config().path().to_owned(),
                };
                if let Some(owner) = other_model(output) {
                    return Err(Error::ForeignSideFile { path, source_file, owner });
                }
                if !force {
                    return Err(Error::SideFile { path, source_file });
                }
            }
            Err(_) => {}
        }
        files.push((name, side));
    }
    Ok(files)
}

/// Another model than `output` in its folder, exported or to be exported, whose side files are there.
fn other_model(output: &Path) -> Option<PathBuf> {
    let folder = folder_of(output);
    let entries = fs::read_dir(folder).ok()?.flatten().map(|entry| output.with_file_name(entry.file_name()));
    let exported = |path: &PathBuf| path != output && path.extension().is_some_and(|extension| extension == "onnx");
    let exported = entries.filter(exported).min();
    exported.or_else(|| match find_weights(folder) {
        Ok(weights) => Some(output.with_file_name(weights.file_name()?)),
        Err(moh_models::Error::SeveralWeights { files, .. }) => files.first().map(|name| output.with_file_name(name)),
        Err(_) => None,
    })
}
