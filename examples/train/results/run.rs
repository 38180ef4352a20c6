//! One training, and what came out.

use super::cases::{Case, Kind, Routing, Task};
use super::common::classes::Classes;
use super::common::noise::Denoise;
use super::common::numbers::Numbers;
use super::common::text::{TOKENIZER, Text, tokens};
use super::common::{Arguments, digits, report};
use anyhow::{Context, Result};
use moh_models::eager::Eager;
use moh_models::sample::Rng;
use moh_models::{Config, Model, Parameters, sharing};
use moh_train::{Loss, Options, Trainer};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Tokens of a sequence that is trained on.
pub(crate) const WINDOW: usize = 128;
/// Batches of held-out text, noisy copies of each held-out digit, held-out numbers.
const BATCHES: usize = 32;
const DRAWS: usize = 4;
const NUMBERS: usize = 1024;

/// The file with the results of a training, in its folder.
pub(crate) const RESULT: &str = "result.json";

/// The folder of a training.
pub(crate) fn folder_of(all: &Path, task: &Task, case: &Case, seed: u64) -> PathBuf {
    all.join(task.name).join(case.name).join(format!("seed-{seed}"))
}

/// Trains a case, unless that was done already, and writes its results.
pub(crate) fn run(arguments: &Arguments, task: &Task, case: &Case) -> Result<Value> {
    let folder = folder_of(&arguments.folder, task, case, arguments.seed);
    let file = folder.join(RESULT);
    if let Ok(text) = std::fs::read_to_string(&file) {
        return serde_json::from_str(&text).with_context(|| file.display().to_string());
    }
    let mut training = Training {
        case,
        config: case.config.clone(),
        start: None,
        options: arguments.options(options(task)),
        folder,
        checkpoint: None,
    };
    let (config, steps) = (&case.config, training.options.steps);
    let measured = match task.kind {
        Kind::Text => {
            let (train, held_out) = tokens(arguments)?;
            let mut model = plan(config)?;
            if case.routing == Routing::Learned {
                model = training.search(&model, Text { model: &model, ids: &train, window: WINDOW })?;
            }
            let parameters = training.train(&[&model], &mut Text { model: &model, ids: &train, window: WINDOW })?;
            vec![Text { model: &model, ids: &held_out, window: WINDOW }.measure(&parameters, BATCHES)?]
        }
        Kind::Classes => {
            let (digits, held_out) = digits::split(arguments)?;
            let mut model = plan(config)?;
            if case.routing == Routing::Learned {
                model = training.search(&model, Classes { model: &model, digits: &digits })?;
            }
            let parameters = training.train(&[&model], &mut Classes { model: &model, digits: &digits })?;
            let (right, nats) = Classes { model: &model, digits: &held_out }.measure(&parameters)?;
            vec![nats, 100.0 * right as f64 / held_out.len() as f64]
        }
        Kind::Noise => {
            let (digits, held_out) = digits::split(arguments)?;
            let model = plan(config)?;
            let parameters = training.train(&[&model], &mut Denoise::new(&model, &digits))?;
            vec![Denoise::new(&model, &held_out).measure(&parameters, DRAWS)?]
        }
        Kind::Numbers => {
            let mut numbers = Numbers::new(config)?;
            let same = Numbers::new(config)?;
            let parameters = training.train(&same.models(), &mut numbers)?;
            let (right, nats) = numbers.measure(&parameters, NUMBERS)?;
            vec![nats, 100.0 * right as f64 / NUMBERS as f64]
        }
    };
    let checkpoint = training.checkpoint.context("a training ends with a checkpoint")?;
    let result = json!({
        "task": task.name, "case": case.name, "seed": arguments.seed, "steps": steps, "measured": measured,
        "checkpoint": checkpoint.strip_prefix(&arguments.folder)?,
    });
    std::fs::write(&file, format!("{result:#}\n")).with_context(|| file.display().to_string())?;
    Ok(result)
}

/// A model of that configuration, without weights.
pub(crate) fn plan(config: &Map<String, Value>) -> Result<Model> {
    Ok(Model::plan(&Config::new("config.json", config.clone()), None)?.0)
}

/// How the models of a task are trained.
fn options(task: &Task) -> Options {
    let options =
        Options { steps: task.steps, report_every: 50, save_every: task.steps, keep: 1, ..Options::default() };
    match task.kind {
        Kind::Text => Options { learning_rate: 3e-3, warmup: 40, weight_decay: 0.1, ..options },
        Kind::Classes => Options { learning_rate: 1e-3, warmup: 30, ..options },
        Kind::Noise => Options { learning_rate: 2e-3, warmup: 50, weight_decay: 0.0, ..options },
        Kind::Numbers => Options { learning_rate: 2e-3, warmup: 150, weight_decay: 0.01, final_rate: 0.02, ..options },
    }
}

struct Training<'a> {
    case: &'a Case,
    /// That of the model to be trained: the case's, but for shared heads that were learnt.
    config: Map<String, Value>,
    /// Weights to begin with, where they are not initial ones.
    start: Option<Parameters>,
    options: Options,
    folder: PathBuf,
    checkpoint: Option<PathBuf>,
}

impl Training<'_> {
    /// Trains the models, which share their weights.
    fn train(&mut self, models: &[&Model], task: &mut impl moh_train::Task) -> Result<Arc<Parameters>> {
        let start = match self.start.take() {
            Some(start) => start,
            None => Parameters::initial(models, self.options.seed, &self.options.device)?,
        };
        if self.case.routing == Routing::OneStage {
            for (name, var) in start.iter().filter(|(name, _)| name.ends_with(".wg_0.weight")) {
                // Scores of 0 make both parts' weights 1.
                var.set(&var.zeros_like()?)?;
                self.options.frozen.push(name.to_owned());
            }
        }
        let mut files = vec![("config.json".to_owned(), serde_json::to_vec_pretty(&self.config)?)];
        if models.iter().any(|model| model.inputs().iter().any(|input| input.name == "position_ids")) {
            files.push(("tokenizer.json".to_owned(), TOKENIZER.as_bytes().to_vec()));
        }
        let mut trainer = Trainer::open(&self.folder, start, files, self.options.clone())?;
        eprintln!(
            "{}: {} parameters; {} steps done",
            self.folder.display(),
            trainer.parameters().count(),
            trainer.step()
        );
        self.checkpoint = Some(trainer.train(task, report)?);
        Ok(trainer.parameters().clone())
    }

    /// Searches for heads to share in half of the steps, and leaves the other half to the model that it gives. Both halves have parts of a
    /// cosine, so that the learning rate falls about as in one.
    fn search(&mut self, model: &Model, task: impl moh_train::Task) -> Result<Model> {
        let options = self.options.clone();
        let half = options.steps / 2;
        let between = (1.0 + options.final_rate) / 2.0;
        let first = Options { steps: half, final_rate: between, save_every: half, ..options.clone() };
        let start = Parameters::initial(&[model], options.seed, &options.device)?;
        let start = sharing::parameters(model, &start)?;
        let mut search = Trainer::open(&self.folder.join("search"), start, Vec::new(), first)?;
        search.train(&mut Searching(task), report)?;
        let config = Config::new("config.json", self.config.clone());
        let chosen = sharing::chosen(&config, model, search.parameters())?;
        eprintln!("shared heads: {}", chosen.config["shared_heads"]);
        (self.config, self.start) = (chosen.config, Some(chosen.parameters));
        self.options = Options {
            steps: options.steps - half,
            learning_rate: options.learning_rate * between,
            final_rate: options.final_rate / between,
            warmup: 0,
            ..options
        };
        Ok(chosen.model)
    }
}

/// A task whose model is searched for heads to share.
struct Searching<T>(T);

impl<T: moh_train::Task> moh_train::Task for Searching<T> {
    fn loss(&mut self, ops: &mut Eager, rng: &mut Rng) -> moh_train::Result<Loss> {
        ops.search_shared_heads(Some(rng.bits()))?;
        self.0.loss(ops, rng)
    }
}
