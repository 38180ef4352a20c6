//! Checkpoints: a `config.json` and named tensors, memory-mapped.
//!
//! What a checkpoint holds is not trusted: every length, offset and name is checked when it is opened.
//! The files must not change while a [`Checkpoint`] or one of its [`Weight`]s lives.

mod config;
mod index;
mod loader;
mod map;
mod safetensors;
#[cfg(test)]
mod tests;
mod weight;

use std::collections::{BTreeMap, btree_map::Entry};
use std::path::{Path, PathBuf};

use crate::error::Error;

pub use config::Config;
pub use loader::{Loader, Mismatch, Problem};
pub use weight::{Weight, WeightType};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const ENDINGS: &str = "a folder, *.safetensors or *.safetensors.index.json";

/// A configuration and the tensors that belong to it.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    config: Config,
    files: Vec<PathBuf>,
    tensors: BTreeMap<String, Weight>,
    metadata: BTreeMap<String, String>,
}

/// What a container file holds.
struct Container {
    tensors: Vec<Weight>,
    metadata: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens a `.safetensors` file, a `.safetensors.index.json` file with its shards, or a folder that holds
    /// `model.safetensors` or `model.safetensors.index.json`. The configuration is `config`, else `config.json` beside the weights.
    ///
    /// # Errors
    /// [`Error`] for the first file that is missing or malformed, see its variants.
    pub fn open(path: &Path, config: Option<&Path>) -> Result<Checkpoint, Error> {
        let weights = find_weights(path)?;
        let config = match config {
            Some(config) => Config::read(config)?,
            None => Config::read(&weights.with_file_name("config.json"))?,
        };
        let mut checkpoint = Checkpoint {
            path: weights,
            config,
            files: Vec::new(),
            tensors: BTreeMap::new(),
            metadata: BTreeMap::new(),
        };
        if has_ending(&checkpoint.path, ".index.json") {
            checkpoint.add_shards()?;
        } else {
            checkpoint.add(checkpoint.path.clone())?;
        }
        Ok(checkpoint)
    }

    /// A checkpoint of tensors that do not exist: they have names and shapes, and read as zeros.
    pub fn planned(config: Config, tensors: &[(String, Vec<usize>)]) -> Checkpoint {
        let absent = |(name, shape): &(String, Vec<usize>)| (name.clone(), Weight::absent(name, shape));
        Checkpoint {
            path: config.path().to_owned(),
            config,
            files: Vec::new(),
            tensors: tensors.iter().map(absent).collect(),
            metadata: BTreeMap::new(),
        }
    }

    fn add_shards(&mut self) -> Result<(), Error> {
        let index = index::read(&self.path)?;
        for shard in index.shards() {
            if !shard.exists() {
                return Err(Error::ShardMissing { file: self.path.clone(), shard: shard.to_owned() });
            }
            self.add(shard.to_owned())?;
        }
        for (tensor, shard) in index.tensors() {
            if self.get(tensor).is_none_or(|weight| weight.file() != shard) {
                let (file, tensor, shard) = (self.path.clone(), tensor.to_owned(), shard.to_owned());
                return Err(Error::NotInShard { file, tensor, shard });
            }
        }
        Ok(())
    }

    fn add(&mut self, file: PathBuf) -> Result<(), Error> {
        let container = read_container(&file)?;
        for weight in container.tensors {
            match self.tensors.entry(weight.name().to_owned()) {
                Entry::Vacant(entry) => entry.insert(weight),
                Entry::Occupied(entry) => {
                    let (tensor, first) = (entry.key().clone(), entry.get().file().to_owned());
                    return Err(Error::DuplicateTensor { tensor, first, second: file });
                }
            };
        }
        for (key, value) in container.metadata {
            self.metadata.entry(key).or_insert(value);
        }
        self.files.push(file);
        Ok(())
    }

    /// The weight file or index that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The folder of the weights.
    pub fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new(""))
    }

    /// The weight files, in the order of their names.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(PathBuf::as_path)
    }

    /// The tensors' names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Option<&Weight> {
        self.tensors.get(name)
    }

    /// The files' `__metadata__`; where shards disagree, the first one's.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }
}

/// The file or index that `path` means.
fn find_weights(path: &Path) -> Result<PathBuf, Error> {
    let metadata = std::fs::metadata(path).map_err(|reason| Error::Io { file: path.to_owned(), reason })?;
    if !metadata.is_dir() {
        return Ok(path.to_owned());
    }
    let candidates = [SINGLE, INDEX].map(|name| path.join(name));
    candidates
        .into_iter()
        .find(|candidate| candidate.exists())
        .ok_or_else(|| Error::NoWeights { folder: path.to_owned(), expected: format!("{SINGLE} or {INDEX}") })
}

/// Reads a file in the container format that its name says.
fn read_container(file: &Path) -> Result<Container, Error> {
    if has_ending(file, ".safetensors") {
        return safetensors::read(file);
    }
    Err(Error::UnknownFormat { file: file.to_owned(), expected: ENDINGS })
}

fn has_ending(file: &Path, ending: &str) -> bool {
    file.file_name().is_some_and(|name| name.as_encoded_bytes().ends_with(ending.as_bytes()))
}
