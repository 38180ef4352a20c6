//! Loading a model, as often as it has instances.

use super::{ChatTemplate, Served, TextModel, Work};
use crate::config::{Config, Limits, ModelSpec};
use crate::error::{Error, Result};
use crate::measure;
use crate::memory;
use crate::queue::Queue;
use crate::tensors::{Batching, Bounds};
use crate::text::Engine;
use crate::worker::{self, Health};
use crate::{tensors, text};
use moh_runtime::{Model, Options, TensorInfo};
use moh_tasks::generate::{Batch, CacheSize, GenerationConfig, LanguageModel};
use moh_tasks::text::Tokenizer;
use moh_tasks::text::load_tokenizer;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Loads models.
pub(crate) struct Loader<'c> {
    config: &'c Config,
    options: Options,
    /// Bytes that the cache of an instance of a language model may take.
    cache: usize,
}

/// A model in its thread.
enum Loaded {
    Tensors(Box<Model>, Option<Batching>),
    Text(Box<Batch>, Arc<Tokenizer>, GenerationConfig),
}

/// Bounds of an instance.
#[derive(Clone)]
struct Bound {
    limits: Limits,
    /// Bytes of its cache.
    cache: usize,
}

/// What a thread found out about its model.
struct Facts {
    inputs: Vec<TensorInfo>,
    outputs: Vec<TensorInfo>,
    runtime: &'static str,
    folder: PathBuf,
    config: GenerationConfig,
    /// What the user may want to know.
    notes: Vec<String>,
    text: Option<TextFacts>,
}

struct TextFacts {
    tokenizer: Arc<Tokenizer>,
    vocabulary: Option<usize>,
    size: CacheSize,
    slots: usize,
    /// The model's own longest sequence, whatever fits into the memory.
    longest: Option<usize>,
}

impl<'c> Loader<'c> {
    /// For the models of `config`: its instances share the processors where no number of threads is given.
    pub(crate) fn new(config: &'c Config) -> Loader<'c> {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = config.runtime.threads.unwrap_or((processors / config.instances.max(1)).max(1));
        let instances = config.instances.max(1);
        let weights: usize = config.models.iter().map(|spec| memory::weights(&spec.path)).sum();
        let caches = config.limits.cache.or_else(|| memory::usual(weights.saturating_mul(instances)));
        let texts = config.models.iter().filter(|spec| has_tokenizer(&spec.path)).count().max(1);
        let cache = caches.map_or(usize::MAX, |bytes| bytes / texts / instances);
        Loader { config, options: Options { threads: Some(threads), ..config.runtime.clone() }, cache }
    }

    /// Loads a model and starts its threads.
    ///
    /// # Errors
    /// [`Error::Model`] for what cannot be loaded, [`Error::Template`] for its chat template, [`Error::Start`] without threads.
    pub(crate) fn load(&self, spec: &ModelSpec) -> Result<Served> {
        measure::model(&spec.name);
        let limits = &self.config.limits;
        let tensors = Arc::new(Queue::new(limits.queue));
        let texts = Arc::new(Queue::new(limits.queue));
        let served = self.start(spec, tensors.clone(), texts.clone());
        if served.is_err() {
            // Threads that were started end, and give their models' memory back.
            tensors.close();
            texts.close();
        }
        served
    }

    /// As [`Loader::load`], with the queues that the threads are to serve.
    fn start(
        &self,
        spec: &ModelSpec,
        tensors: Arc<Queue<tensors::Job>>,
        texts: Arc<Queue<text::Job>>,
    ) -> Result<Served> {
        let (began, health, limits) = (Instant::now(), Arc::new(Health::default()), &self.config.limits);
        let (mut first, mut threads) = (None, Vec::new());
        for instance in 0..self.config.instances.max(1) {
            let load = {
                let (path, options) = (spec.path.clone(), self.options.clone());
                let bound = Bound { limits: limits.clone(), cache: self.cache };
                move || load(Model::load(&path, &options)?, &bound)
            };
            let serve = {
                let (name, limits, health) = (spec.name.clone(), limits.clone(), health.clone());
                let (tensors, texts, memory) = (tensors.clone(), texts.clone(), self.cache);
                move |loaded: &mut Loaded| match loaded {
                    Loaded::Tensors(model, batching) => {
                        tensors::serve(&mut **model, &name, &tensors, batching.as_ref(), limits.window, &health);
                    }
                    Loaded::Text(batch, tokenizer, config) => {
                        let (name, queue, end) = (&*name, &*texts, &*config.end);
                        let (prefill, health) = (limits.prefill, &*health);
                        Engine { name, instance, queue, tokenizer, end, prefill, memory, health }.serve(&mut **batch);
                    }
                }
            };
            let started = worker::spawn(spec.name.clone(), health.clone(), load, serve).map_err(Error::Start)?;
            let (facts, thread) = started.map_err(|source| Error::Model { name: spec.name.clone(), source })?;
            first.get_or_insert(facts);
            threads.push(thread);
        }
        let facts = first.ok_or_else(|| Error::Start(std::io::Error::other("no instance was started")))?;
        for note in &facts.notes {
            tracing::warn!(model = spec.name, "{note}");
        }
        let seconds = began.elapsed().as_secs_f64();
        tracing::info!(model = spec.name, runtime = facts.runtime, instances = threads.len(), seconds, "loaded");
        let length = facts.text.as_ref().map_or(facts.config.max_length, |text| text.longest);
        let work = match facts.text {
            None => Work::Tensors(tensors),
            Some(TextFacts { tokenizer, vocabulary, size, slots, .. }) => {
                let longest = facts.config.max_length.unwrap_or(usize::MAX);
                let most = Some(size.bytes(slots, longest, longest).min(self.cache)).filter(|&most| most < usize::MAX);
                let (bound, token) = (most.map_or("any memory".to_owned(), memory::words), memory::words(size.token));
                tracing::info!(model = spec.name, "an instance's cache takes at most {bound}, for each token {token}");
                let usual = (self.cache < usize::MAX).then(|| size.longest(self.cache, slots));
                let chat = ChatTemplate::from_folder(&facts.folder)?;
                let config = facts.config;
                Work::Text(Box::new(TextModel { queue: texts, tokenizer, config, vocabulary, usual, chat }))
            }
        };
        Ok(Served {
            name: spec.name.clone(),
            inputs: facts.inputs,
            outputs: facts.outputs,
            platform: if facts.runtime == "tract" { "tract_onnx" } else { "onnxruntime_onnxv1" },
            loaded: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
            bounds: Bounds { rows: limits.batch, length },
            health,
            work,
            threads: Mutex::new(threads),
        })
    }
}

/// Whether a model has what texts need beside it.
fn has_tokenizer(path: &Path) -> bool {
    // Of a file in the folder one is in, the folder above is known only then.
    let path = &std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let folder = if path.is_dir() { Some(path.as_path()) } else { path.parent() };
    let folders = [folder, folder.and_then(Path::parent)];
    folders.into_iter().flatten().any(|folder| folder.join("tokenizer.json").is_file())
}

/// What a model is for: texts, where it is a language model with a tokenizer, else tensors.
fn load(model: Model, Bound { limits, cache }: &Bound) -> moh_tasks::Result<(Loaded, Facts)> {
    let folder = model.files_folder().to_owned();
    let mut config = GenerationConfig::from_folder(&folder)?;
    let mut facts = Facts {
        inputs: model.inputs().to_vec(),
        outputs: model.outputs().to_vec(),
        runtime: model.runtime_name(),
        notes: model.notices().iter().map(ToString::to_string).collect(),
        folder: folder.clone(),
        config: config.clone(),
        text: None,
    };
    let is_language = LanguageModel::check(&model).is_ok();
    if !is_language || !folder.join("tokenizer.json").is_file() {
        let batching = Batching::of(&model, limits.batch);
        if is_language {
            facts.notes.push(format!("{}: no tokenizer.json: served on tensors only, without texts", folder.display()));
        } else if batching.is_none() {
            facts.notes.push("requests run one by one: not all tensors begin with a batch of any size".to_owned());
        }
        return Ok((Loaded::Tensors(Box::new(model), batching), facts));
    }
    let model = LanguageModel::new(model)?;
    let vocabulary = model.vocabulary();
    let tokenizer = Arc::new(load_tokenizer(&folder, vocabulary)?);
    if !model.is_in_place() {
        let reason = "an instance generates one text at a time, because the model's cache is concatenated: export it \
                      with `moh-export CHECKPOINT -o FOLDER/model.onnx --cache in-place` to share steps";
        facts.notes.push(reason.to_owned());
    }
    let size = model.cache_size();
    let fits = size.longest(*cache, 1);
    let longest = config.max_length;
    if *cache < usize::MAX && longest.is_none_or(|longest| fits < longest) {
        // One of the prompt, and one more.
        if fits < 2 {
            let needed = size.bytes(1, 2, 2);
            let reason = format!(
                "no text fits: an instance's cache may take {cache} bytes, two tokens need {needed}; give more --cache-memory"
            );
            return Err(moh_tasks::Error::Setting(reason));
        }
        facts.notes.push(shorter(fits, longest, *cache));
        config.max_length = Some(fits);
        facts.config.max_length = Some(fits);
    }
    let batch = Batch::new(model, limits.slots, config.max_length);
    let slots = batch.slots();
    facts.text = Some(TextFacts { tokenizer: tokenizer.clone(), vocabulary, size, slots, longest });
    Ok((Loaded::Text(Box::new(batch), tokenizer, config), facts))
}

/// That texts of a model end at `fits` tokens, because an instance's cache has only so many bytes.
fn shorter(fits: usize, longest: Option<usize>, cache: usize) -> String {
    let own = longest.map_or(String::new(), |longest| format!(", not the model's {longest}"));
    format!(
        "a text with its prompt has at most {fits} tokens{own}: longer ones do not fit an instance's share of \
         --cache-memory, {}",
        memory::words(cache)
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_small_cache_is_told_in_words() {
        let note = shorter(30, Some(512), 655_360);
        assert!(note.contains("at most 30 tokens, not the model's 512") && note.ends_with("640 KiB"), "{note}");
        assert!(shorter(30, None, 655_360).contains("at most 30 tokens: "));
    }

    #[test]
    fn instances_of_all_language_models_share_the_cache_memory() {
        let folder = tempfile::tempdir().unwrap();
        let spec = |name: &str, files: &[&str]| {
            let path = folder.path().join(name);
            std::fs::create_dir(&path).unwrap();
            files.iter().for_each(|file| std::fs::write(path.join(file), "{}").unwrap());
            ModelSpec { name: name.to_owned(), path }
        };
        let text = ["model.onnx", "tokenizer.json"];
        let config = Config {
            models: vec![spec("a", &text), spec("b", &text), spec("pictures", &["model.onnx"])],
            listen: "127.0.0.1:0".parse().unwrap(),
            runtime: Options::default(),
            instances: 3,
            keys: None,
            limits: Limits { cache: Some(6000), ..Limits::default() },
        };
        assert_eq!(Loader::new(&config).cache, 1000);
    }
}
