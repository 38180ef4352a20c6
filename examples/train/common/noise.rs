//! Pictures of digits for a diffusion model.

use super::digits::{Digit, scaled};
use super::inputs;
use anyhow::Result;
use candle_core::{D, DType, Tensor};
use moh_models::eager::Eager;
use moh_models::sample::Rng;
use moh_models::{Model, Parameters, routing};
use moh_train::{Loss, Task, loss};
use std::sync::Arc;

const BATCH: usize = 32;
pub(crate) const SIDE: usize = 16;
pub(crate) const NULL_CLASS: i64 = 10;
/// Share of the digits that are trained without their class, for guidance.
const UNLABELLED: f32 = 0.1;
/// The factor of the load-balance loss.
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

/// A model that draws digits.
pub(crate) struct Denoise<'a> {
    model: &'a Model,
    noise: Noise,
    /// Pictures of SIDE x SIDE numbers from -1 to 1, and their labels.
    digits: Vec<(Vec<f32>, usize)>,
}

/// A batch of noisy pictures.
struct Batch {
    noisy: Vec<f32>,
    noise: Vec<f32>,
    steps: Vec<usize>,
    labels: Vec<i64>,
}

impl<'a> Denoise<'a> {
    pub(crate) fn new(model: &'a Model, digits: &[Digit]) -> Denoise<'a> {
        let drawn = |(pixels, label): &Digit| {
            let mut out = Vec::new();
            scaled(pixels, SIDE, (0.0, 0.0), &mut out);
            (out, *label)
        };
        Denoise { model, noise: Noise::new(), digits: digits.iter().map(drawn).collect() }
    }

    /// Digits with noise of random steps; some without their label.
    fn batch<'b>(&self, digits: impl Iterator<Item = &'b (Vec<f32>, usize)>, unlabelled: f32, rng: &mut Rng) -> Batch {
        let mut batch = Batch { noisy: Vec::new(), noise: Vec::new(), steps: Vec::new(), labels: Vec::new() };
        for (digit, label) in digits {
            let t = rng.below(Noise::STEPS);
            let (signal, spread) = (self.noise.kept[t].sqrt() as f32, (1.0 - self.noise.kept[t]).sqrt() as f32);
            for pixel in digit {
                let epsilon = rng.normal();
                batch.noisy.push(signal * pixel + spread * epsilon);
                batch.noise.push(epsilon);
            }
            batch.steps.push(t);
            batch.labels.push(if rng.uniform() < unlabelled { NULL_CLASS } else { *label as i64 });
        }
        batch
    }

    /// The mean squared error of the predicted noise, and the loss of the predicted variance.
    fn losses(&self, ops: &mut Eager, batch: Batch) -> moh_train::Result<[Tensor; 2]> {
        let Batch { noisy, noise, steps, labels } = batch;
        let device = ops.device().clone();
        let shape = (steps.len(), 1, SIDE, SIDE);
        let noise = Tensor::from_vec(noise, shape, &device)?;
        let times = steps.iter().map(|&t| t as f32).collect::<Vec<_>>();
        let values = inputs([
            ("hidden_states", Tensor::from_vec(noisy, shape, &device)?),
            ("timestep", Tensor::from_vec(times, steps.len(), &device)?),
            ("class_labels", Tensor::from_vec(labels, steps.len(), &device)?),
        ]);
        let output = self.model.forward(ops, &values)?.swap_remove(0).to_dtype(DType::F32)?;
        let (predicted, between) = (output.narrow(1, 0, 1)?, output.narrow(1, 1, 1)?);
        let mean_squared = loss::mean_squared(&predicted, &noise)?;

        // The variance is learnt from the divergence of the step back, whose mean is taken as it is.
        let per_step = |f: &dyn Fn(usize) -> f64| {
            Tensor::from_iter(steps.iter().map(|&t| f(t) as f32), &device)?.reshape((steps.len(), 1, 1, 1))
        };
        let least = per_step(&|t| self.noise.posterior_variance(t).ln())?;
        let range = per_step(&|t| self.noise.variances[t].ln() - self.noise.posterior_variance(t).ln())?;
        let error = (predicted.detach() - &noise)?.sqr()?.broadcast_mul(&per_step(&|t| self.noise.mean_factor(t))?)?;
        // Logarithm of the predicted variance over the least one.
        let excess = ((between + 1.0)? * 0.5)?.broadcast_mul(&range)?;
        let ratio = (error.broadcast_mul(&least.neg()?.exp()?)? + 1.0)?;
        let divergence = ((&excess - 1.0)? + (ratio * excess.neg()?.exp()?)?)?;
        let divergence = (divergence.flatten_from(1)?.mean(D::Minus1)?.mean_all()? * (0.5 / 2f64.ln()))?;
        Ok([mean_squared, divergence])
    }

    /// The mean squared error of the predicted noise for every digit with noise of `draws` steps, which are the same each time.
    pub(crate) fn measure(&self, parameters: &Arc<Parameters>, draws: usize) -> Result<f64> {
        let (mut rng, mut sum) = (Rng::new(1), 0.0);
        for digits in self.digits.chunks(BATCH).cycle().take(self.digits.len().div_ceil(BATCH) * draws) {
            let mut ops = Eager::new().with_parameters(parameters.clone());
            let [error, _] = self.losses(&mut ops, self.batch(digits.iter(), 0.0, &mut rng))?;
            sum += f64::from(error.to_scalar::<f32>()?) * digits.len() as f64;
        }
        Ok(sum / (self.digits.len() * draws) as f64)
    }
}

impl Task for Denoise<'_> {
    fn loss(&mut self, ops: &mut Eager, rng: &mut Rng) -> moh_train::Result<Loss> {
        let chosen: Vec<usize> = (0..BATCH).map(|_| rng.below(self.digits.len())).collect();
        let batch = self.batch(chosen.into_iter().map(|i| &self.digits[i]), UNLABELLED, rng);
        let [noise, variance] = self.losses(ops, batch)?;
        let mut parts = vec![("noise", 1.0, noise), ("variance", 1.0, variance)];
        parts.extend(routing::load_balance(ops.routing())?.map(|balance| ("balance", BALANCE, balance)));
        Loss::sum(parts)
    }
}
