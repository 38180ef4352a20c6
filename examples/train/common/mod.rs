//! What the examples of training have in common: arguments, data, tasks, and what follows a training. Each uses a part of it.
#![allow(dead_code)]

pub(crate) mod classes;
pub(crate) mod digits;
pub(crate) mod noise;
pub(crate) mod numbers;
pub(crate) mod text;

use anyhow::{Context, Result, bail};
use candle_core::Tensor;
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
    /// Steps, where they are not the example's.
    pub(crate) steps: Option<usize>,
    /// What weights and batches are drawn from.
    pub(crate) seed: u64,
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
                "--help" | "-h" => {
                    println!("{usage}");
                    std::process::exit(0);
                }
                _ if argument.starts_with('-') => bail!("{argument}: unknown; {usage}"),
                _ if !read.folder.as_os_str().is_empty() => bail!("{argument}: expected one folder; {usage}"),
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
pub(crate) fn inputs<const N: usize>(named: [(&str, Tensor); N]) -> Inputs<Tensor> {
    Inputs::new(named.map(|(name, tensor)| (name.to_owned(), tensor)))
}
