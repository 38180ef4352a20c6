//! Files that go along with a model: its configuration and its tokenizer, and what serving stacks read besides.
//!
//! A file of the checkpoint is copied; where a stack needs keys that it lacks, they are added before its own. A stack's file that
//! the checkpoint lacks is written from the configuration, the tokenizer and the model.

mod card;
mod config;
mod facts;
mod genai;
mod generation;
pub(crate) mod json;
mod preprocessor;
mod stale;
mod tokenizer;
mod tokens;
mod triton;

pub(crate) use facts::{Facts, Kind};
pub(crate) use genai::fits as fits_genai;

use crate::error::Error;
use crate::place::{Layout, Place};
use moh_models::checkpoint::find_weights;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

/// Files besides config.json that are made of the checkpoint's, where it has them or says enough.
const CONFIGURATIONS: [&str; 3] = [GENERATION, TOKENIZER, PREPROCESSOR];
const GENERATION: &str = "generation_config.json";
const TOKENIZER: &str = "tokenizer_config.json";
const PREPROCESSOR: &str = "preprocessor_config.json";

/// Files that are copied as the checkpoint has them.
pub(crate) const COPIED: &[&str] = &[
    "tokenizer.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
];

/// The model card's name.
const CARD: &str = "README.md";

/// Whom a file belongs to, which decides what may replace it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// All models of one configuration in the folder: the file is the same for all of them.
    Configuration,
    /// The model file that it names.
    Model,
}

/// What a side file holds.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Contents {
    /// The same as this file.
    Copy(PathBuf),
    /// This text.
    Text(String),
}

/// A file that goes along with a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SideFile {
    pub(crate) name: String,
    contents: Contents,
    owner: Owner,
    /// The checkpoint's file that it is made of.
    source: PathBuf,
}

impl SideFile {
    pub(crate) fn contents(&self) -> Result<Vec<u8>, Error> {
        match &self.contents {
            Contents::Copy(path) => fs::read(path).map_err(Error::io(path)),
            Contents::Text(text) => Ok(text.as_bytes().to_vec()),
        }
    }

    /// Number of bytes.
    pub(crate) fn length(&self) -> Result<u64, Error> {
        match &self.contents {
            Contents::Copy(path) => Ok(fs::metadata(path).map_err(Error::io(path))?.len()),
            Contents::Text(text) => Ok(text.len() as u64),
        }
    }
}

/// Which side files to write.
#[derive(Debug, Clone, Default)]
pub struct SideOptions {
    /// None at all.
    pub bare: bool,
    /// The library of our operators: copied beside config.json and named in genai_config.json; in a Triton repository, the
    /// path that config.pbtxt names.
    pub library: Option<PathBuf>,
}

/// A side file, unless it has no contents.
fn text(name: &str, owner: Owner, source: PathBuf, text: Option<String>) -> Option<SideFile> {
    Some(SideFile { name: name.to_owned(), contents: Contents::Text(text?), owner, source })
}

/// The side files of a model, whether or not they are there, and what to know of those that are not.
///
/// # Errors
/// A file of the checkpoint that cannot be read or is no JSON; [`Error::Library`].
pub(crate) fn side_files(facts: &Facts<'_>, options: &SideOptions) -> Result<(Vec<SideFile>, Vec<String>), Error> {
    let mut notes = Vec::new();
    if options.bare {
        return Ok((Vec::new(), notes));
    }
    let (checkpoint, config) = (facts.checkpoint, facts.checkpoint.config().path().to_owned());
    let from = |name: &str| checkpoint.folder().join(name);
    let made = |name: &str, contents| {
        let own = from(name);
        text(name, Owner::Configuration, if own.is_file() { own } else { config.clone() }, contents)
    };
    let mut files = Vec::new();
    files.extend(text("config.json", Owner::Configuration, config.clone(), Some(config::write(facts)?)));
    files.extend(made(GENERATION, generation::write(facts)?));
    files.extend(made(TOKENIZER, tokenizer::write(facts)?));
    let preprocessor = preprocessor::write(facts)?;
    if let (None, Kind::Classifier { .. }) = (&preprocessor, &facts.kind) {
        notes.push(preprocessor::MISSING.to_owned());
    }
    files.extend(made(PREPROCESSOR, preprocessor));
    for &name in COPIED {
        let source = from(name);
        if is_copied(&source)? {
            let contents = Contents::Copy(source.clone());
            files.push(SideFile { name: name.to_owned(), contents, owner: Owner::Configuration, source });
        }
    }
    if matches!(facts.kind, Kind::LanguageModel { .. }) && files.iter().all(|file| file.name != "tokenizer.json") {
        notes.push(tokenizer::MISSING.to_owned());
    }
    let library = match facts.layout {
        Layout::Triton => {
            let library = options.library.as_deref().map(triton::library).transpose()?;
            let written = triton::write(facts, library.as_deref());
            files.extend(text(triton::NAME, Owner::Configuration, config.clone(), Some(written)));
            None
        }
        Layout::Flat | Layout::Onnx => options.library.as_deref().map(library_file).transpose()?,
    };
    let name = library.as_ref().map(|library| library.name.as_str());
    let genai = if facts.layout == Layout::Triton { None } else { genai::write(facts, name)? };
    files.extend(text(genai::NAME, Owner::Model, config.clone(), genai));
    files.extend(text(CARD, Owner::Model, config, Some(card::write(facts, name, &files)?)));
    if let Some(library) = library {
        let place = facts.place;
        let own = files.iter().map(|file| file.name.as_str());
        if own.chain([&*place.model, &*place.data, place.model_folder]).any(|own| own == library.name) {
            let problem = "the export writes a file or folder of this name itself".to_owned();
            return Err(Error::Library { file: library.source, problem });
        }
        files.push(library);
    }
    Ok((files, notes))
}

/// Whether there is this file of [`COPIED`].
///
/// # Errors
/// A folder in its place; a tokenizer.json that holds no JSON object.
pub(crate) fn is_copied(source: &Path) -> Result<bool, Error> {
    if source.is_dir() {
        return Err(Error::io(source)(ErrorKind::IsADirectory.into()));
    }
    if source.is_file() && source.ends_with("tokenizer.json") {
        json::check(source, "tokenizer")?;
    }
    Ok(source.is_file())
}

/// The library under its own name. Hosts refuse links and paths elsewhere, so that it is a copy.
fn library_file(library: &Path) -> Result<SideFile, Error> {
    check_library(library)?;
    let Some(name) = library.file_name().and_then(|name| name.to_str()).map(str::to_owned) else {
        let problem = "its name must be UTF-8, because genai_config.json holds it".to_owned();
        return Err(Error::Library { file: library.to_owned(), problem });
    };
    let (contents, source) = (Contents::Copy(library.to_owned()), library.to_owned());
    Ok(SideFile { name, contents, owner: Owner::Configuration, source })
}

/// What shared libraries begin with: ELF; Mach-O of 32 and 64 bits in both orders of bytes, and of several processors; PE.
const LIBRARIES: [&[u8]; 8] = [
    b"\x7fELF",
    &[0xfe, 0xed, 0xfa, 0xce],
    &[0xfe, 0xed, 0xfa, 0xcf],
    &[0xce, 0xfa, 0xed, 0xfe],
    &[0xcf, 0xfa, 0xed, 0xfe],
    &[0xca, 0xfe, 0xba, 0xbe],
    &[0xca, 0xfe, 0xba, 0xbf],
    b"MZ",
];

/// Refuses what is no shared library.
fn check_library(library: &Path) -> Result<(), Error> {
    let bad = |problem: String| Error::Library { file: library.to_owned(), problem };
    let metadata = fs::metadata(library).map_err(|error| bad(error.to_string()))?;
    let mut start = Vec::new();
    if metadata.is_file() {
        let read = File::open(library).and_then(|file| file.take(4).read_to_end(&mut start));
        read.map_err(|error| bad(error.to_string()))?;
    }
    if LIBRARIES.iter().any(|library| start.starts_with(library)) {
        return Ok(());
    }
    let found = if metadata.is_dir() { "a folder" } else { "a file of another kind" };
    Err(bad(format!("expected a shared library (ELF, Mach-O or PE), found {found}")))
}

/// Those of `files` that are not there already, and what to know of those that are kept as they are, and of an earlier model's files.
///
/// A file that is there with other contents is
///
/// - the checkpoint's own, where the export goes into its folder: it is kept;
/// - another model's, where it names that model, or where the folder holds one: an .onnx file besides `place`'s, or weights
///   that could be exported. A model card or genai_config.json of another model is kept, and any card that is not ours;
/// - else this model's, or the user's.
///
/// # Errors
/// [`Error::ForeignSideFile`] where another model's file of that name is there; [`Error::SideFile`] where another file is,
/// and `force` is not set.
pub(crate) fn missing(
    files: &[SideFile],
    place: &Place,
    models: &[&str],
    force: bool,
) -> Result<(Vec<SideFile>, Vec<String>), Error> {
    let (mut missing, mut notes) = (Vec::new(), Vec::new());
    for file in files {
        let path = place.side(&file.name);
        if let Ok(there) = fs::read(&path) {
            if file.contents()? == there {
                continue;
            }
            let ours = match (file.owner, file.name.as_str()) {
                (Owner::Configuration, _) => None,
                (Owner::Model, CARD) => Some(card::model_of(&there)),
                (Owner::Model, _) => genai::model_of(&there).map(Some),
            };
            let named = |model: &str| place.model_from_folder() == model;
            let kept = match &ours {
                None => same(&file.source, &path).then(|| "it is the checkpoint's own".to_owned()),
                // Nobody can tell whose it is.
                Some(None) => Some("moh-export did not write it".to_owned()),
                Some(Some(model)) if named(model) || !place.side(model).exists() => None,
                Some(Some(model)) => Some(format!("it is that of {model}")),
            };
            if let Some(why) = kept {
                notes.push(format!("{}: kept as it was, because {why}", path.display()));
                continue;
            }
            let source_file = file.source.clone();
            if let (Owner::Configuration, Some(owner)) = (file.owner, other_model(place, models)) {
                return Err(Error::ForeignSideFile { path, source_file, owner });
            }
            if !force && file.name != CARD {
                return Err(Error::SideFile { path, source_file });
            }
        }
        missing.push(file.clone());
    }
    notes.extend(stale::notes(files, place, models));
    Ok((missing, notes))
}

/// Whether both paths are of one file.
fn same(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// Another model than those named `models` in the folder, exported or to be exported, whose side files are there.
fn other_model(place: &Place, models: &[&str]) -> Option<PathBuf> {
    let in_folder = |below: &str| {
        let folder = place.folder.join(below);
        let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
        let of = |name: std::ffi::OsString| Path::new(below).join(name).to_string_lossy().into_owned();
        let names: Vec<String> = entries.map(|entry| of(entry.file_name())).collect();
        names
    };
    let own: Vec<String> =
        models.iter().map(|model| Path::new(place.model_folder).join(model).to_string_lossy().into_owned()).collect();
    let all = Layout::ALL.into_iter().map(Layout::model_folder).flat_map(in_folder);
    let exported = all.filter(|name| name.ends_with(".onnx") && !own.contains(name)).min();
    exported.map(|name| place.side(&name)).or_else(|| match find_weights(&place.folder) {
        Ok(weights) => Some(place.side(&weights.file_name()?.to_string_lossy())),
        Err(moh_models::Error::SeveralWeights { files, .. }) => files.first().map(|name| place.side(name)),
        Err(_) => None,
    })
}
