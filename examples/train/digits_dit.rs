//! Trains a small MoH-DiT to draw handwritten digits, exports it, and draws some.
//!
//!     examples/train/fetch.sh
//!     cargo run --release --example digits_dit -- target/digits-dit
//!
//! Sizes are those of `examples/checkpoints/digits-moh-dit`, and so is the diffusion: 1000 steps of noise with variances from 1e-4 to 0.02;
//! the model predicts the noise, and where between its bounds the variance of a step back lies. The digits are scikit-learn's, which
//! `fetch.sh` tells more of. What is exported is the moving average of the weights.

mod common;

use anyhow::{Context, Result};
use candle_core::{D, DType, Tensor};
use common::{Arguments, digits, export, inputs, load, report, scaled};
use moh_models::eager::Eager;
use moh_models::routing;
use moh_models::sample::Rng;
use moh_models::{Config, Model, Parameters};
use moh_tasks::diffusion::{DiffusionModel, SampleOptions, Sampler, pictures};
use moh_train::{Loss, Options, Task, Trainer, loss};
use std::ops::ControlFlow;
use std::path::Path;

const CONFIG: &str = include_str!("../checkpoints/digits-moh-dit/config.json");
const BATCH: usize = 32;
const SIDE: usize = 16;
const NULL_CLASS: i64 = 10;
/// Share of the digits that are trained without their class, for guidance.
const UNLABELLED: f32 = 0.1;
const BALANCE: f64 = 0.01;

/// The numbers of every step of noise.
struct Noise {
    /// Products of the steps' 1 - variance.
    kept: Vec<f64>,
    variances: Vec<f64>,
}

impl Noise {
    const STEPS: usize = 1000;

    fn new() -> Noise {
        let variance = |t: usize| 1e-4 + (0.02 - 1e-4) * t as f64 / (Noise::STEPS - 1) as f64;
        let variances: Vec<f64> = (0..Noise::STEPS).map(variance).collect();
        let product = |kept: &mut f64, variance: &f64| {
            *kept *= 1.0 - variance;
            Some(*kept)
        };
        Noise { kept: variances.iter().scan(1.0, product).collect(), variances }
    }

    fn kept_before(&self, t: usize) -> f64 {
        if t == 0 { 1.0 } else { self.kept[t - 1] }
    }

    /// The variance of the step back from `t` where the picture is known; that of step 0 would be 0.
    fn posterior_variance(&self, t: usize) -> f64 {
        let t = t.max(1);
        self.variances[t] * (1.0 - self.kept_before(t)) / (1.0 - self.kept[t])
    }

    /// The square of what an error of the noise becomes in the mean of the step back.
    fn mean_factor(&self, t: usize) -> f64 {
        self.variances[t].powi(2) / ((1.0 - self.variances[t]) * (1.0 - self.kept[t]))
    }
}

struct Digits<'a> {
    model: &'a Model,
    noise: Noise,
    digits: Vec<(Vec<f32>, usize)>,
}

impl Task for Digits<'_> {
    fn loss(&mut self, ops: &mut Eager, rng: &mut Rng) -> moh_train::Result<Loss> {
        let (mut noisy, mut noise, mut steps, mut labels) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for _ in 0..BATCH {
            let (digit, label) = &self.digits[rng.below(self.digits.len())];
            let t = rng.below(Noise::STEPS);
            let (signal, spread) = (self.noise.kept[t].sqrt() as f32, (1.0 - self.noise.kept[t]).sqrt() as f32);
            for pixel in digit {
                let epsilon = rng.normal();
                noisy.push(signal * pixel + spread * epsilon);
                noise.push(epsilon);
            }
            steps.push(t);
            labels.push(if rng.uniform() < UNLABELLED { NULL_CLASS } else { *label as i64 });
        }
        let device = ops.device().clone();
        let shape = (BATCH, 1, SIDE, SIDE);
        let noise = Tensor::from_vec(noise, shape, &device)?;
        let times = steps.iter().map(|&t| t as f32).collect::<Vec<_>>();
        let values = inputs([
            ("hidden_states", Tensor::from_vec(noisy, shape, &device)?),
            ("timestep", Tensor::from_vec(times, BATCH, &device)?),
            ("class_labels", Tensor::from_vec(labels, BATCH, &device)?),
        ]);
        let output = self.model.forward(ops, &values)?.swap_remove(0).to_dtype(DType::F32)?;
        let (predicted, between) = (output.narrow(1, 0, 1)?, output.narrow(1, 1, 1)?);
        let mean_squared = loss::mean_squared(&predicted, &noise)?;

        // The variance is learnt from the divergence of the step back, whose mean is taken as it is.
        let per_step = |f: &dyn Fn(usize) -> f64| {
            Tensor::from_iter(steps.iter().map(|&t| f(t) as f32), &device)?.reshape((BATCH, 1, 1, 1))
        };
        let least = per_step(&|t| self.noise.posterior_variance(t).ln())?;
        let range = per_step(&|t| self.noise.variances[t].ln() - self.noise.posterior_variance(t).ln())?;
        let error = (predicted.detach() - &noise)?.sqr()?.broadcast_mul(&per_step(&|t| self.noise.mean_factor(t))?)?;
        // Logarithm of the predicted variance over the least one.
        let excess = ((between + 1.0)? * 0.5)?.broadcast_mul(&range)?;
        let ratio = (error.broadcast_mul(&least.neg()?.exp()?)? + 1.0)?;
        let divergence = ((&excess - 1.0)? + (ratio * excess.neg()?.exp()?)?)?;
        let divergence = (divergence.flatten_from(1)?.mean(D::Minus1)?.mean_all()? * (0.5 / 2f64.ln()))?;
        let mut parts = vec![("noise", 1.0, mean_squared), ("variance", 1.0, divergence)];
        parts.extend(routing::load_balance(ops.routing())?.map(|balance| ("balance", BALANCE, balance)));
        Loss::sum(parts)
    }
}

fn main() -> Result<()> {
    moh_train::join_pool();
    let arguments = Arguments::read()?;
    let drawn = |(pixels, label): ([f32; 64], usize)| {
        let mut out = Vec::new();
        scaled(&pixels, SIDE, (0.0, 0.0), &mut out);
        (out, label)
    };
    let digits = digits(&arguments)?.into_iter().map(drawn).collect();
    let options = arguments.options(Options {
        steps: 2000,
        learning_rate: 2e-3,
        warmup: 50,
        weight_decay: 0.0,
        ema: Some(0.99),
        ..Options::default()
    });
    let config = Config::new("config.json", serde_json::from_str(CONFIG)?);
    let (model, _) = Model::plan(&config, None)?;
    let files = vec![("config.json".to_owned(), CONFIG.as_bytes().to_vec())];
    let start = Parameters::initial(&[&model], options.seed, &options.device)?;
    let mut trainer = Trainer::open(&arguments.folder, start, files, options)?;
    eprintln!("{} parameters; {} steps done", trainer.parameters().count(), trainer.step());
    trainer.train(&mut Digits { model: &model, noise: Noise::new(), digits }, report)?;
    let checkpoint = trainer.averaged().context("an average was asked for")?;

    let folder = export(&arguments, &checkpoint, None, "model.onnx")?;
    draw(&folder, &arguments.folder.join("digits.svg"))
}

/// One digit of every class by the exported model in tract, as a picture and as text.
fn draw(folder: &Path, file: &Path) -> Result<()> {
    let mut model = DiffusionModel::new(load(folder, "model.onnx")?)?;
    let options = SampleOptions {
        steps: 50,
        sampler: Sampler::Ddpm,
        guidance: 2.0,
        guidance_channels: None,
        clip: true,
        seed: 0,
    };
    let labels: Vec<i64> = (0..10).collect();
    let samples = model.sample(&labels, 0, &options, |_| ControlFlow::Continue(()))?;
    let pictures = pictures(&samples)?;
    let mut svg = format!(r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {SIDE}">"#, 10 * SIDE);
    for (i, picture) in pictures.iter().enumerate() {
        for (at, gray) in picture.samples().iter().enumerate() {
            let (x, y) = (i * SIDE + at % SIDE, at / SIDE);
            svg += &format!(r#"<path d="M{x} {y}h1v1h-1z" fill="rgb({gray},{gray},{gray})"/>"#);
        }
    }
    std::fs::write(file, svg + "</svg>\n")?;
    println!("drawn by tract: {}", file.display());
    for rows in 0..SIDE / 2 {
        let line = pictures.iter().take(5).flat_map(|picture| {
            let of = |x: usize| usize::from(picture.samples()[2 * rows * SIDE + x]);
            (0..SIDE).map(move |x| char::from(b" .:-=+*#%@"[of(x) * 10 / 256]))
        });
        println!("{}", line.collect::<String>());
    }
    Ok(())
}
