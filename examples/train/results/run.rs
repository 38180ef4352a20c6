//! One training, and what came out.

use super::cases::{Case, Kind, Routing, Task};
use super::common::classes::Classes;
use super::common::noise::Denoise;
use super::common::numbers::Numbers;
use super::common::text::{TOKENIZER, Text, tokens};
use super::common::{Arguments, digits, report};
use anyhow::{Context, Result};
use moh_models::{Config, Model, Parameters};
use moh_train::{Options, Trainer};
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
    let mut training = Training { case, options: arguments.options(options(task)), folder, checkpoint: None };
    let config = &case.config;
    let measured = match task.kind {
        Kind::Text => {
            let (train, held_out) = tokens(arguments)?;
            let model = plan(config)?;
            let parameters = training.train(&[&model], &mut Text { model: &model, ids: &train, window: WINDOW })?;
            vec![Text { model: &model, ids: &held_out, window: WINDOW }.measure(&parameters, BATCHES)?]
        }
        Kind::Classes => {
            let (digits, held_out) = digits::split(arguments)?;
            let model = plan(config)?;
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
        "task": task.name, "case": case.name, "seed": arguments.seed, "steps": training.options.steps, "measured": measured,
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
    options: Options,
    folder: PathBuf,
    checkpoint: Option<PathBuf>,
}

impl Training<'_> {
    /// Trains new weights of the models, which share them.
    fn train(&mut self, models: &[&Model], task: &mut impl moh_train::Task) -> Result<Arc<Parameters>> {
        let start = Parameters::initial(models, self.options.seed, &self.options.device)?;
        if self.case.routing == Routing::OneStage {
            for (name, var) in start.iter().filter(|(name, _)| name.ends_with(".wg_0.weight")) {
                // Scores of 0 make both parts' weights 1.
                var.set(&var.zeros_like()?)?;
                self.options.frozen.push(name.to_owned());
            }
        }
        let config = format!("{:#}\n", Value::Object(self.case.config.clone())).into_bytes();
        let mut files = vec![("config.json".to_owned(), config)];
        if self.case.config.contains_key("vocab_size") && self.case.config.contains_key("rms_norm_eps") {
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
}
