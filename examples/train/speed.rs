//! Times steps of a training: forward, backward, clipping and AdamW, on random inputs.
//!
//!     cargo run --release --example train_speed -- CONFIG.json [NAME=SIZE ..] [--steps N]
//!
//! CONFIG.json is any configuration that exports; NAME=SIZE are sizes of its inputs' dimensions, such as batch=8. Prints a line of JSON: the
//! milliseconds of a step, the fastest and the median. `RAYON_NUM_THREADS` sets the threads. `ci/train_speed.py` compares with the published
//! code.

use anyhow::{Context, Result, bail};
use candle_core::{Device, Tensor};
use moh_models::eager::Eager;
use moh_models::families::{Inputs, Sizes};
use moh_models::routing;
use moh_models::sample::{Rng, SampleData};
use moh_models::{Config, Model, Parameters};
use moh_train::{Loss, Options, Task, Trainer};
use std::path::PathBuf;
use std::time::Instant;

#[global_allocator]
static MEMORY: moh_train::Memory = moh_train::Memory::new();

struct Random {
    model: Model,
    inputs: Inputs<Tensor>,
    began: Vec<Instant>,
}

impl Task for Random {
    fn loss(&mut self, ops: &mut Eager, _: &mut Rng) -> moh_train::Result<Loss> {
        self.began.push(Instant::now());
        let output = self.model.forward(ops, &self.inputs)?.swap_remove(0);
        let mut parts = vec![("squares", 1.0, output.sqr()?.mean_all()?)];
        parts.extend(routing::load_balance(ops.routing())?.map(|balance| ("balance", 0.01, balance)));
        Loss::sum(parts)
    }
}

fn main() -> Result<()> {
    let usage = "usage: CONFIG.json [NAME=SIZE ..] [--steps N]";
    let (mut file, mut sizes, mut steps) = (None, Vec::new(), 12);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.split_once('=') {
            _ if argument == "--steps" => steps = arguments.next().context(usage)?.parse().context("--steps")?,
            Some((name, size)) => {
                sizes.push((name.to_owned(), size.parse().with_context(|| format!("{argument}: a size"))?));
            }
            None if argument.starts_with('-') || file.is_some() => bail!("{argument}: unknown; {usage}"),
            None => file = Some(PathBuf::from(argument)),
        }
    }
    moh_train::join_pool();
    let (model, _) = Model::plan(&Config::read(&file.context(usage)?)?, None)?;
    let samples = model.samples(&Sizes::new(sizes)).swap_remove(0);
    let tensor = |data: &SampleData, shape: &[usize]| match data {
        SampleData::F32(values) => Tensor::from_slice(values, shape, &Device::Cpu),
        SampleData::I64(values) => Tensor::from_slice(values, shape, &Device::Cpu),
    };
    let inputs = samples.iter().map(|sample| Ok((sample.name.clone(), tensor(&sample.data, &sample.shape)?)));
    let inputs = Inputs::new(inputs.collect::<candle_core::Result<Vec<_>>>()?);
    let folder = tempfile::tempdir()?;
    let options = Options { steps, warmup: 1, report_every: steps, save_every: steps, ..Options::default() };
    let start = Parameters::initial(&[&model], 0, &options.device)?;
    let parameters = start.count();
    let mut trainer = Trainer::open(folder.path(), start, vec![], options)?;
    let mut task = Random { model, inputs, began: Vec::new() };
    trainer.train(&mut task, |_| ())?;
    print(parameters, &task.began)
}

/// The first step warms up; the last one has no other after it, and what follows it is saving.
fn print(parameters: usize, began: &[Instant]) -> Result<()> {
    let mut times: Vec<f64> = began.windows(2).skip(1).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3).collect();
    times.sort_by(f64::total_cmp);
    let (fastest, median) = (times.first().context("three steps or more")?, times[times.len() / 2]);
    println!("{{\"parameters\": {parameters}, \"fastest_ms\": {fastest:.2}, \"median_ms\": {median:.2}}}");
    Ok(())
}
