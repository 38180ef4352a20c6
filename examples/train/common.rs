//! What the examples of training have in common: arguments, data, and what follows a training.

use anyhow::{Context, Result, bail};
use candle_core::{DType, Tensor};
use moh_models::Model;
use moh_models::eager::Eager;
use moh_models::families::Inputs;
use moh_train::{Error, Options, Progress};
use std::path::{Path, PathBuf};

/// Steps take the memory of those before them.
#[global_allocator]
static MEMORY: moh_train::Memory = moh_train::Memory::new();

/// The arguments: FOLDER [--steps N] [--data FOLDER] [--seed N].
pub(crate) struct Arguments {
    /// Where checkpoints, plots and the exported model go.
    pub(crate) folder: PathBuf,
    /// What `fetch.sh` fetched.
    pub(crate) data: PathBuf,
    steps: Option<usize>,
    seed: u64,
}

impl Arguments {
    /// Reads them.
    pub(crate) fn read() -> Result<Arguments> {
        let usage = "usage: FOLDER [--steps N] [--data FOLDER] [--seed N]";
        let mut read = Arguments { folder: PathBuf::new(), data: "target/train-data".into(), steps: None, seed: 0 };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().with_context(|| format!("{argument}: expected a value; {usage}"));
            match argument.as_str() {
                "--steps" => read.steps = Some(value()?.parse().context("--steps")?),
                "--seed" => read.seed = value()?.parse().context("--seed")?,
                "--data" => read.data = value()?.into(),
                _ if argument.starts_with('-') => bail!("{argument}: unknown; {usage}"),
                _ => read.folder = argument.into(),
            }
        }
        if read.folder.as_os_str().is_empty() {
            bail!("{usage}");
        }
        Ok(read)
    }

    /// The options with these numbers of steps, unless the arguments say others.
    pub(crate) fn options(&self, options: Options) -> Options {
        let steps = self.steps.unwrap_or(options.steps);
        Options { steps, warmup: options.warmup.min(steps / 2), seed: self.seed, ..options }
    }

    /// The text of a file among the data.
    pub(crate) fn text(&self, name: &str) -> Result<String, Error> {
        let file = self.data.join(name);
        std::fs::read_to_string(&file).map_err(|reason| Error::Data {
            problem: format!("{reason}; examples/train/fetch.sh {} fetches it", self.data.display()),
            file,
        })
    }
}

/// Shows progress.
pub(crate) fn report(progress: &Progress) {
    eprintln!("{progress}");
}

/// Exports a checkpoint, or a part of it, which compares the file's outputs with candle's, into `onnx/NAME` in the training's folder. Gives
/// that folder.
pub(crate) fn export(
    arguments: &Arguments,
    checkpoint: &Path,
    part: Option<moh_export::Part>,
    name: &str,
) -> Result<PathBuf> {
    let folder = arguments.folder.join("onnx");
    let options = moh_export::Options { force: true, part, ..Default::default() };
    println!("{}", moh_export::export(checkpoint, &folder.join(name), &options)?);
    Ok(folder)
}

/// A model of the folder in tract, which needs no other library.
pub(crate) fn load(folder: &Path, name: &str) -> Result<moh_runtime::Model> {
    let options =
        moh_runtime::Options { runtime: moh_runtime::RuntimeChoice::Tract, ..moh_runtime::Options::default() };
    Ok(moh_runtime::Model::load(folder.join(name), &options)?)
}

/// Inputs by name.
#[allow(dead_code)]
pub(crate) fn inputs<const N: usize>(named: [(&str, Tensor); N]) -> Inputs<Tensor> {
    Inputs::new(named.map(|(name, tensor)| (name.to_owned(), tensor)))
}

/// The digits of `digits.csv`: 64 numbers from 0 to 16 and a label each.
#[allow(dead_code)]
pub(crate) fn digits(arguments: &Arguments) -> Result<Vec<([f32; 64], usize)>> {
    let text = arguments.text("digits.csv")?;
    let mut digits = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let numbers: Vec<f32> = line.split(',').map(str::parse).collect::<Result<_, _>>()?;
        let Some((&label, pixels)) = numbers.split_last() else { continue };
        let pixels = <[f32; 64]>::try_from(pixels).ok().filter(|_| (0.0..10.0).contains(&label));
        let pixels =
            pixels.with_context(|| format!("digits.csv, line {}: expected 64 pixels and a digit", number + 1))?;
        digits.push((pixels, label as usize));
    }
    Ok(digits)
}

/// A digit of -1 to 1 in `side` x `side` pixels, scaled bilinearly, and moved by (down, right) pixels.
#[allow(dead_code)]
pub(crate) fn scaled(pixels: &[f32; 64], side: usize, (down, right): (f32, f32), out: &mut Vec<f32>) {
    let factor = 8.0 / side as f32;
    // Centres of pixels are at halves.
    let place = |i: usize, by: f32| {
        let at = ((i as f32 + 0.5 - by) * factor - 0.5).clamp(0.0, 7.0);
        (at as usize, (at as usize + 1).min(7), at.fract())
    };
    for y in 0..side {
        let (top, bottom, below) = place(y, down);
        for x in 0..side {
            let (left, beside, after) = place(x, right);
            let row = |y: usize| pixels[y * 8 + left] * (1.0 - after) + pixels[y * 8 + beside] * after;
            out.push((row(top) * (1.0 - below) + row(bottom) * below) / 8.0 - 1.0);
        }
    }
}

/// Nats per token of `window` tokens after each of `starts` in the text `ids`, as a language model predicts them.
#[allow(dead_code)]
pub(crate) fn predict(
    model: &Model,
    ops: &mut Eager,
    ids: &[i64],
    starts: &[usize],
    window: usize,
) -> moh_train::Result<Tensor> {
    let (batch, device) = (starts.len(), ops.device().clone());
    let windows = |shift: usize| {
        let ids = starts.iter().flat_map(|start| &ids[start + shift..start + shift + window]).copied();
        Tensor::from_iter(ids, &device)?.reshape((batch, window))
    };
    let positions = Tensor::arange(0, window as i64, &device)?.unsqueeze(0)?.repeat((batch, 1))?;
    let mut values = vec![
        ("input_ids".to_owned(), windows(0)?),
        ("attention_mask".to_owned(), Tensor::ones((batch, window), DType::I64, &device)?),
        ("position_ids".to_owned(), positions),
    ];
    // Nothing is cached in a training.
    for (i, layer) in model.layers().iter().enumerate() {
        for kind in ["key", "value"] {
            let empty = Tensor::zeros((batch, layer.kv_num_heads, 0, layer.head_dim), DType::F32, &device)?;
            values.push((format!("past_key_values.{i}.{kind}"), empty));
        }
    }
    let logits = model.forward(ops, &Inputs::new(values))?.swap_remove(0);
    moh_train::loss::cross_entropy(&logits, &windows(1)?, 0.0)
}
