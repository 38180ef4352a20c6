//! Files that go along with a model: its configuration and its tokenizer.

use crate::error::Error;
use crate::staging::write_file;
use moh_models::Checkpoint;
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
        match self {
            Side::File(source) => fs::copy(source, path).map(drop).map_err(Error::io(source)),
            Side::Preset(preset) => write_file(path, preset.config.as_bytes()),
        }
    }
}

/// The side files of a checkpoint that are not in `target` already, the configuration in use as config.json among them.
///
/// # Errors
/// [`Error::SideFile`] where another file of that name is there and `force` is not set.
pub fn side_files(checkpoint: &Checkpoint, target: &Path, force: bool) -> Result<Vec<(&'static str, Side)>, Error> {
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
        let path = target.join(name);
        match fs::read(&path) {
            Ok(there) if side.contents()? == there => {}
            Ok(_) if !force => {
                let source_file = match side {
                    Side::File(source) => source,
                    Side::Preset(_) => checkpoint.config().path().to_owned(),
                };
                return Err(Error::SideFile { path, source_file });
            }
            _ => files.push((name, side)),
        }
    }
    Ok(files)
}
