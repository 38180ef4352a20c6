//! Checkpoints: a `config.json` and named tensors, memory-mapped.
//!
//! What a checkpoint holds is not trusted: every length, offset and name is checked when it is opened.
//! The files must not change while a [`Checkpoint`] or one of its [`Weight`]s lives.

mod config;
mod index;
mod loader;
mod map;
mod preset;
mod safetensors;
#[cfg(test)]
mod tests;
mod torch;
mod weight;

use std::collections::{BTreeMap, btree_map::Entry};
use std::path::{Path, PathBuf};

use crate::error::Error;

pub use crate::error::{ArchiveFault, Mismatch, PickleFault, Problem, TensorFault};
pub use crate::weight_type::WeightType;
pub use config::Config;
pub use loader::Loader;
pub use preset::{NAMES as PRESET_NAMES, PRESETS, Preset};
pub use weight::Weight;

/// The configuration's name beside the weights.
pub(crate) const CONFIG: &str = "config.json";
/// The names of weights in a folder, the first one that is there.
const NAMES: [&str; 4] =
    ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"];
/// Files of torch.save, of which a folder without one of these names may hold one.
const TORCH: [&str; 3] = [".pth", ".pt", ".bin"];
const ENDINGS: &str = "a folder, *.safetensors, *.pth, *.pt, *.bin or *.index.json";
/// What DataParallel and torch.compile put before every name.
const WRAPPERS: [&str; 2] = ["module.", "_orig_mod."];

/// A configuration and the tensors that belong to it.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    config: Config,
    preset: Option<&'static Preset>,
    weights_key: Option<String>,
    files: Vec<PathBuf>,
    tensors: BTreeMap<String, Weight>,
    /// What is there but is no tensor that can be read, and why.
    unreadable: BTreeMap<String, String>,
    metadata: BTreeMap<String, String>,
}

/// What a container file holds.
#[derive(Default)]
struct Container {
    tensors: Vec<Weight>,
    unreadable: BTreeMap<String, String>,
    /// The key of the dictionary that was chosen among several.
    weights_key: Option<String>,
    metadata: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens weights with a configuration file, `config`, else `config.json` beside the weights. [`crate::presets::open`] does
    /// without the file for published models.
    ///
    /// Weights are a `.safetensors` file, a `.pth`, `.pt` or `.bin` file of torch.save, an `.index.json` file with its shards, or
    /// a folder that holds `model.safetensors`, `pytorch_model.bin`, an index of one of them, or a single file of torch.save.
    ///
    /// # Errors
    /// [`Error`] for the first file that is missing or malformed, see its variants.
    pub fn open(path: &Path, config: Option<&Path>) -> Result<Checkpoint, Error> {
        let weights = find_weights(path)?;
        let config = match config {
            Some(config) => Config::read(config)?,
            None => Config::read(&weights.with_file_name(CONFIG))?,
        };
        Checkpoint::read(weights, config, None)
    }

    /// Reads a weight file or index. `weights_key` is the key of the state dict in a file of torch.save.
    pub(crate) fn read(path: PathBuf, config: Config, weights_key: Option<&str>) -> Result<Checkpoint, Error> {
        let mut checkpoint = Checkpoint { path, ..Checkpoint::planned(config, &[]) };
        if has_ending(&checkpoint.path, ".index.json") {
            checkpoint.add_shards(weights_key)?;
        } else {
            checkpoint.add(checkpoint.path.clone(), weights_key)?;
        }
        checkpoint.unwrap_names();
        Ok(checkpoint)
    }

    /// A checkpoint of tensors that do not exist: they have names and shapes, and read as zeros.
    pub fn planned(config: Config, tensors: &[(String, Vec<usize>)]) -> Checkpoint {
        let absent = |(name, shape): &(String, Vec<usize>)| (name.clone(), Weight::absent(name, shape));
        Checkpoint {
            path: config.path().to_owned(),
            config,
            preset: None,
            weights_key: None,
            files: Vec::new(),
            tensors: tensors.iter().map(absent).collect(),
            unreadable: BTreeMap::new(),
            metadata: BTreeMap::new(),
        }
    }

    fn add_shards(&mut self, weights_key: Option<&str>) -> Result<(), Error> {
        let index = index::read(&self.path)?;
        for shard in index.shards() {
            if !shard.exists() {
                return Err(Error::ShardMissing { file: self.path.clone(), shard: shard.to_owned() });
            }
            self.add(shard.to_owned(), weights_key)?;
        }
        for (tensor, shard) in index.tensors() {
            if self.get(tensor).is_none_or(|weight| weight.file() != shard) {
                let (file, tensor, shard) = (self.path.clone(), tensor.to_owned(), shard.to_owned());
                return Err(Error::NotInShard { file, tensor, shard });
            }
        }
        Ok(())
    }

    fn add(&mut self, file: PathBuf, weights_key: Option<&str>) -> Result<(), Error> {
        let container = read_container(&file, weights_key)?;
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
        self.unreadable.extend(container.unreadable);
        self.weights_key = self.weights_key.take().or(container.weights_key);
        self.files.push(file);
        Ok(())
    }

    /// Takes off what wraps the model, if it is before the name of every tensor.
    fn unwrap_names(&mut self) {
        while let Some(wrapper) = WRAPPERS.iter().find(|w| self.tensors.keys().all(|name| name.starts_with(**w))) {
            let tensors = std::mem::take(&mut self.tensors);
            let names = tensors.values().map(|weight| weight.renamed(&weight.name()[wrapper.len()..]));
            self.tensors = names.map(|weight| (weight.name().to_owned(), weight)).collect();
            let unreadable = std::mem::take(&mut self.unreadable).into_iter();
            let unwrapped =
                |(name, why): (String, String)| (name.strip_prefix(wrapper).unwrap_or(&name).to_owned(), why);
            self.unreadable = unreadable.map(unwrapped).collect();
        }
    }

    /// Puts another configuration in the place of the present one.
    pub(crate) fn set_config(&mut self, config: Config) {
        self.config = config;
    }

    /// Puts a preset's configuration in the place of the present one.
    pub(crate) fn set_preset(&mut self, preset: &'static Preset) -> Result<(), Error> {
        self.config = preset.config()?;
        self.preset = Some(preset);
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

    /// The preset that the configuration is of, if it is no file's.
    pub fn preset(&self) -> Option<&'static Preset> {
        self.preset
    }

    /// The key, in the files, of the state dict that was chosen; `None` where they hold nothing else.
    pub fn weights_key(&self) -> Option<&str> {
        self.weights_key.as_deref()
    }

    /// Sets a key of the configuration, whatever the file says.
    pub fn configure(&mut self, key: &str, value: impl Into<serde_json::Value>) {
        self.config.set(key, value.into());
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

/// The file or index that `path`, a file or a folder, means.
///
/// # Errors
/// [`Error::Io`]; [`Error::NoWeights`] or [`Error::SeveralWeights`] for a folder.
pub fn find_weights(path: &Path) -> Result<PathBuf, Error> {
    let io = |reason| Error::Io { file: path.to_owned(), reason };
    if !std::fs::metadata(path).map_err(io)?.is_dir() {
        return Ok(path.to_owned());
    }
    if let Some(found) = NAMES.map(|name| path.join(name)).into_iter().find(|candidate| candidate.exists()) {
        return Ok(found);
    }
    let mut saved = Vec::new();
    for entry in std::fs::read_dir(path).map_err(io)? {
        let file = entry.map_err(io)?.path();
        if TORCH.iter().any(|ending| has_ending(&file, ending)) {
            saved.push(file);
        }
    }
    saved.sort();
    let folder = path.to_owned();
    match saved.len() {
        0 => Err(Error::NoWeights { folder, expected: format!("{} or *.pth", NAMES.join(", ")) }),
        1 => Ok(saved.swap_remove(0)),
        _ => {
            let name = |file: &PathBuf| file.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Err(Error::SeveralWeights { folder, files: saved.iter().map(name).collect() })
        }
    }
}

/// Reads a file in the container format that its name says.
fn read_container(file: &Path, weights_key: Option<&str>) -> Result<Container, Error> {
    if has_ending(file, ".safetensors") {
        return match weights_key {
            None => safetensors::read(file),
            Some(key) => Err(Error::WeightsKey { file: file.to_owned(), key: key.to_owned(), keys: Vec::new() }),
        };
    }
    if TORCH.iter().any(|ending| has_ending(file, ending)) {
        return torch::read(file, weights_key);
    }
    Err(Error::UnknownFormat { file: file.to_owned(), expected: ENDINGS })
}

fn has_ending(file: &Path, ending: &str) -> bool {
    file.file_name().is_some_and(|name| name.as_encoded_bytes().ends_with(ending.as_bytes()))
}
