//! The files of a converted checkpoint.

use super::heads::Heads;
use super::{Options, RouterKind};
use crate::error::Error;
use crate::graph::ElementType;
use crate::side_files::{COPIED, is_copied, json};
use crate::staging::{OutputFile, Staging, write_file};
use crate::weights::put;
use crate::{background, random, room};
use moh_models::checkpoint::{FileState, Prefix};
use moh_models::{Checkpoint, Model, WeightType, initial};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// A single file of weights beside that of the routers: under the usual name it would be taken for the whole model.
const BESIDE_ROUTERS: &str = "dense.safetensors";
const ROUTERS: &str = "router.safetensors";
/// What goes along besides [`COPIED`].
const SETTINGS: [&str; 4] = ["tokenizer_config.json", "generation_config.json", "chat_template.json", "vocab.txt"];
/// What the names of licences begin with, in capitals.
const LICENCES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "USE_POLICY"];
/// Bytes that are copied at a time.
const PART: u64 = 4 << 20;

/// A file that is copied, or linked.
struct Copied {
    from: PathBuf,
    name: String,
    state: FileState,
}

/// Initial weights: names in the file, names in the model, shapes.
struct Routers {
    tensors: Vec<(String, String, Vec<usize>)>,
    dtype: ElementType,
    seed: u64,
}

/// All that is written.
pub(super) struct Sources {
    folder: PathBuf,
    weights: Vec<Copied>,
    sides: Vec<Copied>,
    /// Names and contents: the configuration, and an index if there is one.
    texts: Vec<(String, String)>,
    routers: Option<Routers>,
}

impl Sources {
    /// What follows from a dense checkpoint and the heads.
    ///
    /// # Errors
    /// [`Error::Routers`]; a configuration with keys that the new family refuses; files that cannot be read.
    pub(super) fn new(
        checkpoint: &Checkpoint,
        dense: &Model,
        heads: &Heads,
        options: &Options,
    ) -> Result<Sources, Error> {
        let mut keys = vec![("family", options.router.family().into())];
        keys.extend(heads.keys(options.router));
        let mut config = checkpoint.config().clone();
        keys.iter().for_each(|(key, value)| config.set(key, value.clone()));
        let (_, tensors) = Model::plan(&config, None)?;
        let source = checkpoint.config().path();
        let (object, text) = json::read(source)?.ok_or_else(|| Error::io(source)(ErrorKind::NotFound.into()))?;
        let texts = vec![(CONFIG.to_owned(), json::with_keys(&object, &text, keys))];

        let folder = checkpoint.folder().to_owned();
        let mut sources = Sources { weights: Vec::new(), sides: sides(&folder)?, texts, routers: None, folder };
        sources.add_weights(checkpoint)?;
        if options.router == RouterKind::TwoStage {
            // By their names in the family: a tied matrix may be stored under another one.
            let (_, planned) = Model::plan(checkpoint.config(), Some(dense.family()))?;
            let there: BTreeSet<String> = planned.into_iter().map(|(name, _)| name).collect();
            let stored = |name: &str| match dense.prefix() {
                Some(Prefix::Removed(prefix)) => format!("{prefix}{name}"),
                Some(Prefix::Added(prefix)) => name.strip_prefix(prefix.as_str()).unwrap_or(name).to_owned(),
                None => name.to_owned(),
            };
            let new = tensors.into_iter().filter(|(name, _)| !there.contains(name));
            let tensors: Vec<_> = new.map(|(name, shape)| (stored(&name), name, shape)).collect();
            // As the others, so that the checkpoint stays one of one type.
            let dtype = match dense.weight_type() {
                WeightType::F16 => ElementType::F16,
                WeightType::BF16 => ElementType::BF16,
                _ => ElementType::F32,
            };
            // Of a single shared head there is nothing to weigh.
            if !tensors.is_empty() {
                sources.add_routers(checkpoint, Routers { tensors, dtype, seed: options.seed })?;
            }
        }
        Ok(sources)
    }

    /// The files of the weights under their own names, and their index. A single safetensors file gets the name that a folder's has.
    fn add_weights(&mut self, checkpoint: &Checkpoint) -> Result<(), Error> {
        for file in checkpoint.files() {
            let name = match file {
                _ if file != checkpoint.path() => file.strip_prefix(&self.folder).unwrap_or(file).to_owned(),
                _ if is_safetensors(file) => SINGLE.into(),
                _ => file.file_name().unwrap_or_default().into(),
            };
            self.weights.push(copied(file, name.to_string_lossy().into_owned())?);
        }
        if checkpoint.files().all(|file| file != checkpoint.path()) {
            let index = checkpoint.path();
            let name = if checkpoint.files().any(is_safetensors) { INDEX } else { "pytorch_model.bin.index.json" };
            self.texts.push((name.to_owned(), fs::read_to_string(index).map_err(Error::io(index))?));
        }
        Ok(())
    }

    /// One more file of weights, and an index of all.
    fn add_routers(&mut self, checkpoint: &Checkpoint, routers: Routers) -> Result<(), Error> {
        if let Some(file) = checkpoint.files().find(|file| !is_safetensors(file)) {
            return Err(Error::Routers { file: file.to_owned(), problem: "it is not a safetensors file" });
        }
        if let Some(taken) = self.weights.iter().find(|file| file.name == ROUTERS) {
            return Err(Error::Routers {
                file: taken.from.clone(),
                problem: "it has the name that their file would get",
            });
        }
        let (mut index, mut map) = (Map::new(), Map::new());
        match self.texts.iter().position(|(name, _)| name == INDEX) {
            Some(at) => {
                let (_, text) = self.texts.swap_remove(at);
                let bad =
                    |reason| moh_models::Error::Json { file: checkpoint.path().to_owned(), part: "index", reason };
                index = serde_json::from_str(&text).map_err(bad)?;
                map = match index.remove("weight_map") {
                    Some(Value::Object(map)) => map,
                    _ => map,
                };
            }
            None => {
                for file in &mut self.weights {
                    BESIDE_ROUTERS.clone_into(&mut file.name);
                }
                map.extend(checkpoint.names().map(|name| (name.to_owned(), BESIDE_ROUTERS.into())));
            }
        }
        map.extend(routers.tensors.iter().map(|(name, ..)| (name.clone(), ROUTERS.into())));
        let stored = |name: &str| checkpoint.get(name).map_or(0, |tensor| tensor.elements() * tensor.dtype().bytes());
        let total = checkpoint.names().map(stored).sum::<usize>() as u64 + routers.bytes();
        match index.get_mut("metadata").and_then(Value::as_object_mut) {
            Some(metadata) => drop(metadata.insert("total_size".to_owned(), total.into())),
            None => drop(index.insert("metadata".to_owned(), json!({ "total_size": total }))),
        }
        index.insert("weight_map".to_owned(), Value::Object(map));
        self.texts.push((INDEX.to_owned(), json::pretty(&Value::Object(index))));
        self.routers = Some(routers);
        Ok(())
    }

    /// Numbers of the initial weights.
    pub(super) fn router_parameters(&self) -> usize {
        self.routers.as_ref().map_or(0, Routers::elements)
    }

    /// The files in the folder `output`, sorted.
    ///
    /// # Errors
    /// [`Error::Io`] for one that is not there.
    pub(super) fn files(&self, folder: &Path, output: &Path) -> Result<Vec<OutputFile>, Error> {
        let copied = self.weights.iter().chain(&self.sides).map(|file| file.name.as_str());
        let written = self.texts.iter().map(|(name, _)| name.as_str());
        let names: BTreeSet<&str> = copied.chain(written).chain(self.routers.as_ref().map(|_| ROUTERS)).collect();
        let file = |name| {
            let (written, path) = (folder.join(name), output.join(name));
            let bytes = fs::metadata(&written).map_err(Error::io(&path))?.len();
            Ok(OutputFile { path, bytes, sha256: None })
        };
        names.into_iter().map(file).collect()
    }

    /// Puts everything into the folder that `staging` is to become.
    ///
    /// # Errors
    /// [`Error::Room`], [`Error::Link`], [`Error::Io`], and a weight file that became shorter meanwhile.
    pub(super) fn write(&self, staging: &Staging, options: &Options) -> Result<(), Error> {
        let (folder, output) = (staging.model(), staging.output());
        fs::create_dir(&folder).map_err(Error::io(&folder))?;
        let length = |files: &[Copied]| files.iter().map(|file| file.state.bytes()).sum::<u64>();
        let weights = length(&self.weights);
        let routers = self.routers.as_ref().map_or(0, Routers::bytes);
        let texts: usize = self.texts.iter().map(|(_, text)| text.len()).sum();
        let copied = if options.link { 0 } else { weights };
        room::check(&folder, &output, copied + length(&self.sides) + routers + texts as u64)?;

        let told = options.progress.unwrap_or(|_, _| ());
        let mut done = 0;
        for file in &self.weights {
            let to = folder.join(&file.name);
            // An index may name shards in folders.
            if let Some(parent) = to.parent() {
                fs::create_dir_all(parent).map_err(Error::io(parent))?;
            }
            match options.link {
                true => file.link(&to, output.join(&file.name))?,
                false => file.copy(&to, &|copied| told(done + copied, weights))?,
            }
            done += file.state.bytes();
            told(done, weights);
        }
        if let Some(routers) = &self.routers {
            routers.write(&folder.join(ROUTERS))?;
        }
        self.sides.iter().try_for_each(|file| file.copy(&folder.join(&file.name), &|_| ()))?;
        self.texts.iter().try_for_each(|(name, text)| write_file(&folder.join(name), text.as_bytes()))
    }
}

impl Copied {
    /// Copies the file, which must be as it was when it was looked for.
    fn copy(&self, to: &Path, progress: &dyn Fn(u64)) -> Result<(), Error> {
        let mut source = File::open(&self.from).map_err(Error::io(&self.from))?;
        background::write(to, None, |out| {
            let mut read = 0;
            while read < self.state.bytes() {
                let part = (self.state.bytes() - read).min(PART);
                read += part;
                let got = source.read_exact(out.part.grow(part as usize));
                self.state.check(&source, &self.from)?;
                got.map_err(Error::io(&self.from))?;
                out.hand_over()?;
                progress(read);
            }
            Ok(())
        })?;
        Ok(())
    }

    /// Makes the hard link `to`, which is to be `path` in the end.
    fn link(&self, to: &Path, path: PathBuf) -> Result<(), Error> {
        // A snapshot of Hugging Face's hub holds links into a folder of blobs: a hard link to one of them would dangle.
        let source = self.from.canonicalize().map_err(Error::io(&self.from))?;
        fs::hard_link(&source, to).map_err(|reason| Error::Link { file: self.from.clone(), path, reason })
    }
}

impl Routers {
    fn elements(&self) -> usize {
        self.tensors.iter().map(|(.., shape)| shape.iter().product::<usize>()).sum()
    }

    fn bytes(&self) -> u64 {
        (self.elements() * self.dtype.size()) as u64
    }

    /// Numbers depend on the seed and the names in the model, as those that a training begins with.
    fn write(&self, to: &Path) -> Result<(), Error> {
        let named: Vec<_> = self.tensors.iter().map(|(stored, _, shape)| (stored.clone(), shape.clone())).collect();
        background::write(to, None, |out| {
            random::header(&named, self.dtype, &mut out.part)?;
            for (_, name, shape) in &self.tensors {
                let values = initial::fill(RouterKind::TwoStage.family(), name, shape, self.seed);
                put(self.dtype, &values, out.part.grow(values.len() * self.dtype.size()));
                out.hand_over()?;
            }
            Ok(())
        })?;
        Ok(())
    }
}

fn is_safetensors(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension == "safetensors")
}

fn copied(from: &Path, name: String) -> Result<Copied, Error> {
    let state = FileState::of(&fs::metadata(from).map_err(Error::io(from))?);
    Ok(Copied { from: from.to_owned(), name, state })
}

/// Tokenizer, settings of generation, chat template and licences of a folder.
fn sides(folder: &Path) -> Result<Vec<Copied>, Error> {
    let listed = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let entries = fs::read_dir(listed).and_then(|entries| entries.map(|entry| Ok(entry?.file_name())).collect());
    let names: Vec<std::ffi::OsString> = entries.map_err(Error::io(listed))?;
    let names: BTreeSet<String> = names.into_iter().filter_map(|name| name.into_string().ok()).collect();
    let goes_along = |name: &str| {
        let capitals = name.to_uppercase();
        let is_licence = LICENCES.iter().any(|licence| capitals.starts_with(licence));
        is_licence || COPIED.contains(&name) || SETTINGS.contains(&name)
    };
    let mut files = Vec::new();
    for name in names.into_iter().filter(|name| goes_along(name)) {
        let from = folder.join(&name);
        let is_there = if COPIED.contains(&name.as_str()) { is_copied(&from)? } else { from.is_file() };
        if is_there {
            files.push(copied(&from, name)?);
        }
    }
    Ok(files)
}
