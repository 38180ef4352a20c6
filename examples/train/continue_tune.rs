//! Turns a dense LLaMA into Mixture-of-Head models, trains these further, and shows how fast they recover.
//!
//!     examples/train/fetch.sh
//!     cargo run --release --example continue_tune -- target/continue-tune
//!
//! A small dense model learns Shakespeare's plays. `moh_export::convert`, which `moh-export convert` calls, makes two models of it that
//! use 6 of 8 heads: one chooses by query norms, one by routers with weights. Both are trained further, and so is the dense model, for as
//! many steps on the same batches with the same settings. Every few steps all are measured on text that none was trained on. `--steps` is
//! for the dense model; the others take half as many.

mod common;

use anyhow::{Context, Result};
use common::text::{TOKENIZER, Text, tokens};
use common::{Arguments, export, report};
use moh_export::convert::{self, RouterKind, convert};
use moh_models::{Checkpoint, Config, Model, Parameters};
use moh_train::{Options, Trainer, plot};
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

const CONFIG: &str = r#"{
  "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4,
  "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256, "rms_norm_eps": 1e-6
}
"#;
/// Tokens that are predicted in each sequence.
const WINDOW: usize = 96;
/// Batches of the held-out text that are measured, and steps from one measurement to the next.
const MEASURED: usize = 6;
const EVERY: usize = 20;

/// Held-out nats per token by step.
type Curve = BTreeMap<usize, f64>;

fn main() -> Result<()> {
    moh_train::join_pool();
    let arguments = Arguments::read()?;
    let (train, held_out) = tokens(&arguments)?;
    let options = arguments.options(Options { steps: 400, learning_rate: 3e-3, warmup: 40, ..Options::default() });
    let tuning = Options {
        steps: options.steps.div_ceil(2),
        learning_rate: 1e-3,
        warmup: options.warmup / 3,
        report_every: EVERY.min(options.steps.div_ceil(2)),
        ..options.clone()
    };

    let config = Config::new("config.json", serde_json::from_str(CONFIG)?);
    let (model, _) = Model::plan(&config, Some("llama"))?;
    let files = [("config.json", CONFIG), ("tokenizer.json", TOKENIZER)];
    let files = files.map(|(name, text)| (name.to_owned(), text.as_bytes().to_vec())).into();
    let start = Parameters::initial(&[&model], options.seed, &options.device)?;
    let mut trainer = Trainer::open(&arguments.folder.join("dense"), start, files, options)?;
    eprintln!("dense: {} parameters, {} tokens to train on", trainer.parameters().count(), train.len());
    let dense = trainer.train(&mut Text { model: &model, ids: &train, window: WINDOW }, report)?;

    let mut curves =
        vec![("dense, trained further", tune(&arguments, "dense-further", &dense, &train, &held_out, &tuning)?.1)];
    let mut tuned = None;
    for (title, name, router) in [
        ("6 of 8 heads, two-stage router", "two-stage", RouterKind::TwoStage),
        ("6 of 8 heads, query norms", "query-norm", RouterKind::QueryNorm),
    ] {
        let converted = arguments.folder.join(format!("{name}-converted"));
        if !converted.exists() {
            println!("{}", convert(&dense, &converted, &convert::Options { router, ..Default::default() })?);
        }
        let (checkpoint, curve) = tune(&arguments, name, &converted, &train, &held_out, &tuning)?;
        curves.push((title, curve));
        tuned = Some(checkpoint);
    }
    show(&arguments.folder, &curves)?;
    export(&arguments, &tuned.context("nothing was converted")?, None, "model.onnx")?;
    Ok(())
}

/// Trains a checkpoint further in the folder `name`. Gives the last checkpoint, and the measurements on the way, of which the first is
/// that of the checkpoint as it was.
fn tune(
    arguments: &Arguments,
    name: &str,
    checkpoint: &Path,
    train: &[i64],
    held_out: &[i64],
    options: &Options,
) -> Result<(PathBuf, Curve)> {
    let checkpoint = Checkpoint::open(checkpoint, None)?;
    let family = checkpoint.config().has("family");
    let model = Model::load(&checkpoint, (!family).then_some("llama"))?;
    let mut files = Vec::new();
    for name in ["config.json", "tokenizer.json"] {
        files.push((name.to_owned(), std::fs::read(checkpoint.folder().join(name))?));
    }
    let start = Parameters::of(&checkpoint, &[&model], &options.device)?;
    let folder = arguments.folder.join(name);
    let mut trainer = Trainer::open(&folder, start, files, options.clone())?;
    let parameters = trainer.parameters().clone();
    let held_out = Text { model: &model, ids: held_out, window: WINDOW };
    let table = folder.join("held-out.csv");
    let note = |step: usize| -> Result<()> {
        let nats = held_out.measure(&parameters, MEASURED)?;
        eprintln!("{name}, step {step}: {nats:.4} nats per held-out token");
        Ok(writeln!(OpenOptions::new().create(true).append(true).open(&table)?, "{step},{nats}")?)
    };
    if trainer.step() == 0 {
        note(0)?;
    }
    let mut failed = None;
    let tuned = trainer.train(&mut Text { model: &model, ids: train, window: WINDOW }, |progress| {
        report(progress);
        if let Err(error) = note(progress.step) {
            failed.get_or_insert(error);
        }
    })?;
    match failed {
        Some(error) => Err(error),
        None => Ok((tuned, read(&table)?)),
    }
}

/// A table of measurements; steps that were taken again after an interruption are there twice, with the same numbers.
fn read(table: &Path) -> Result<Curve> {
    let text = std::fs::read_to_string(table).with_context(|| table.display().to_string())?;
    let row = |line: &str| {
        let (step, nats) = line.split_once(',')?;
        Some((step.parse().ok()?, nats.parse().ok()?))
    };
    Ok(text.lines().filter_map(row).collect())
}

/// Prints the curves as a table, and draws them.
fn show(folder: &Path, curves: &[(&str, Curve)]) -> Result<()> {
    let named: Vec<(&str, Vec<(usize, f64)>)> =
        curves.iter().map(|(name, curve)| (*name, curve.iter().map(|(step, nats)| (*step, *nats)).collect())).collect();
    let file = folder.join("recovery.svg");
    std::fs::write(&file, plot::lines("Nats per held-out token", &named))?;
    let names: Vec<&str> = curves.iter().map(|(name, _)| *name).collect();
    println!("| step | {} |\n|--:|{}", names.join(" | "), "--:|".repeat(names.len()));
    let (_, first) = curves.first().context("there is a curve")?;
    for step in first.keys() {
        let nats: Vec<String> = curves
            .iter()
            .map(|(_, curve)| curve.get(step).map_or("-".to_owned(), |nats| format!("{nats:.3}")))
            .collect();
        println!("| {step} | {} |", nats.join(" | "));
    }
    println!("drew {}", file.display());
    Ok(())
}
