//! Checkpoints: a `config.json` and named tensors, which stay in their files until they are read.
//!
//! What a checkpoint holds is not trusted: every length, offset and name is checked when it is opened.
//! A file that is written to while a [`Checkpoint`] or one of its [`Weight`]s lives is an error when it is read.
//! While one of PyTorch's files is opened, which is then mapped, nobody may write to it or truncate it.

mod config;
mod index;
mod loader;
mod map;
mod names;
pub mod pattern;
mod preset;
mod record;
mod safetensors;
mod state;
#[cfg(test)]
mod tests;
mod torch;
mod weight;

use std::collections::{BTreeMap, BTreeSet, btree_map::Entry};
use std::path::{Path, PathBuf};

use crate::error::Error;
use record::Record;

pub use crate::error::{ArchiveFault, Mismatch, PickleFault, Problem, TensorFault};
pub use crate::prefix::Prefix;
pub use crate::unused_key::UnusedKey;
pub use crate::weight_type::WeightType;
pub use config::{Config, DefaultValue};
pub use loader::Loader;
pub use preset::{NAMES as PRESET_NAMES, PRESETS, Preset};
pub use state::FileState;
pub(crate) use weight::Part;
pub use weight::{Formula, Place, Weight};

/// The configuration's name beside the weights.
pub(crate) const CONFIG: &str = "config.json";
/// The names of weights in a folder, the first one that is there.
const NAMES: [&str; 4] =
    ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"];
/// Files of torch.save and pickle, of which a folder without one of these names may hold one. The usual endings come first:
/// training leaves files with the others beside them.
const TORCH: [&[&str]; 3] = [&[".pth", ".pt", ".bin"], &[".ckpt"], &[".pkl"]];
const ENDINGS: &str =
    "a folder with weights, or a file *.safetensors, *.pth, *.pt, *.bin, *.ckpt, *.pkl or *.index.json";
/// What PEFT calls the files of an adapter.
const ADAPTER: [&str; 3] = ["adapter_model.safetensors", "adapter_model.bin", "adapter_config.json"];

/// A configuration and the tensors that belong to it. A copy shares the tensors.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    path: PathBuf,
    config: Config,
    preset: Option<&'static Preset>,
    weights_key: Option<String>,
    other_keys: Vec<String>,
    files: Vec<PathBuf>,
    tensors: BTreeMap<String, Weight>,
    /// What is there but is no tensor that can be read, and why.
    unreadable: BTreeMap<String, String>,
    metadata: BTreeMap<String, String>,
    /// Patterns of the names of tensors that may be there although the model has no use for them.
    ignore: Vec<String>,
    /// Those that were.
    ignored: Record<BTreeSet<String>>,
    /// The model's names of tensors that its family has no use for.
    passed_over: Record<BTreeSet<String>>,
}

/// What a container file holds.
#[derive(Default)]
struct Container {
    tensors: Vec<Weight>,
    unreadable: BTreeMap<String, String>,
    /// The key of the dictionary that was chosen among several.
    weights_key: Option<String>,
    /// The keys of other state dicts of the same tensors.
    other_keys: Vec<String>,
    metadata: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens weights with a configuration file, `config`, else `config.json` beside the weights. [`crate::presets::open`] does
    /// without the file for published models.
    ///
    /// Weights are a `.safetensors` file, a `.pth`, `.pt`, `.bin`, `.ckpt` or `.pkl` file of torch.save or pickle, an `.index.json`
    /// file with its shards, or a folder that holds `model.safetensors`, `pytorch_model.bin`, an index of one of them, or a single
    /// file of torch.save.
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
        checkpoint.check_adapter()?;
        Ok(checkpoint)
    }

    /// Refuses what was trained beside a model that is not here.
    fn check_adapter(&self) -> Result<(), Error> {
        let is_adapter = |name: &&String| name.contains(".lora_") || name.contains("lora_A") || name.contains("lora_B");
        let tensor = self.tensors.keys().find(is_adapter);
        if tensor.is_none() && !ADAPTER.iter().any(|name| self.path.ends_with(name)) {
            return Ok(());
        }
        Err(Error::Adapter { path: self.path.clone(), tensor: tensor.cloned() })
    }

    /// A checkpoint of tensors that do not exist: they have names and shapes, and read as zeros.
    pub fn planned(config: Config, tensors: &[(String, Vec<usize>)]) -> Checkpoint {
        let absent = |(name, shape): &(String, Vec<usize>)| (name.clone(), Weight::absent(name, shape));
        Checkpoint {
            path: config.path().to_owned(),
            config,
            preset: None,
            weights_key: None,
            other_keys: Vec::new(),
            files: Vec::new(),
            tensors: tensors.iter().map(absent).collect(),
            unreadable: BTreeMap::new(),
            metadata: BTreeMap::new(),
            ignore: Vec::new(),
            ignored: Record::default(),
            passed_over: Record::default(),
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
        if self.other_keys.is_empty() {
            self.other_keys = container.other_keys;
        }
        self.files.push(file);
        Ok(())
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

    /// The keys of other state dicts in the files, with tensors of the same names as the chosen one's.
    pub fn other_keys(&self) -> &[String] {
        &self.other_keys
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
/// [`Error::Io`] and [`Error::NoCheckpoint`]; [`Error::NoWeights`] or [`Error::SeveralWeights`] for a folder.
pub fn find_weights(path: &Path) -> Result<PathBuf, Error> {
    let io = |reason: std::io::Error| match reason.kind() {
        std::io::ErrorKind::NotFound => Error::NoCheckpoint { path: path.to_owned(), expected: ENDINGS },
        _ => Error::Io { file: path.to_owned(), reason },
    };
    if !std::fs::metadata(path).map_err(io)?.is_dir() {
        return Ok(path.to_owned());
    }
    if let Some(found) = NAMES.map(|name| path.join(name)).into_iter().find(|candidate| candidate.exists()) {
        return Ok(found);
    }
    if let Some(adapter) = ADAPTER.map(|name| path.join(name)).into_iter().find(|candidate| candidate.exists()) {
        return Err(Error::Adapter { path: adapter, tensor: None });
    }
    let files: std::io::Result<Vec<PathBuf>> =
        std::fs::read_dir(path).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
    let files = files.map_err(io)?;
    let with = |endings: &[&str]| -> Vec<PathBuf> {
        let has = |file: &&PathBuf| endings.iter().any(|ending| has_ending(file, ending));
        files.iter().filter(has).cloned().collect()
    };
    let mut saved = TORCH.into_iter().map(with).find(|files| !files.is_empty()).unwrap_or_default();
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
    if TORCH.iter().copied().flatten().any(|ending| has_ending(file, ending)) {
        return torch::read(file, weights_key);
    }
    Err(Error::UnknownFormat { file: file.to_owned(), expected: ENDINGS })
}

fn has_ending(file: &Path, ending: &str) -> bool {
    file.file_name().is_some_and(|name| name.as_encoded_bytes().ends_with(ending.as_bytes()))
}
