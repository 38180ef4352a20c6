//! Pictures of digits for a classifier.

use super::digits::{Digit, scaled};
use super::inputs;
use anyhow::{Context, Result};
use candle_core::Tensor;
use moh_models::eager::Eager;
use moh_models::sample::Rng;
use moh_models::{Model, Parameters, routing};
use moh_train::{Loss, Task, loss};
use std::sync::Arc;

pub(crate) const BATCH: usize = 32;
pub(crate) const SIDE: usize = 64;
/// The factor of the load-balance loss, as published.
const BALANCE: f64 = 0.01;

/// A model that reads digits.
pub(crate) struct Classes<'a> {
    pub(crate) model: &'a Model,
    pub(crate) digits: &'a [Digit],
}

impl Classes<'_> {
    fn logits(&self, ops: &mut Eager, pixels: Vec<f32>) -> moh_train::Result<Tensor> {
        let pixels = Tensor::from_vec(pixels, ((), 3, SIDE, SIDE), &ops.device().clone())?;
        Ok(self.model.forward(ops, &inputs([("pixel_values", pixels)]))?.swap_remove(0))
    }

    /// How many are read right, and nats per digit.
    pub(crate) fn measure(&self, parameters: &Arc<Parameters>) -> Result<(usize, f64)> {
        let (mut right, mut sum) = (0, 0.0);
        for digits in self.digits.chunks(BATCH) {
            let mut ops = Eager::new().with_parameters(parameters.clone());
            let logits = self.logits(&mut ops, pictures(digits))?;
            let labels = Tensor::from_iter(digits.iter().map(|(_, label)| *label as i64), ops.device())?;
            let nats = loss::cross_entropy(&logits, &labels, 0.0)?.to_scalar::<f32>()?;
            sum += f64::from(nats) * digits.len() as f64;
            right += count_right(&logits.flatten_all()?.to_vec1()?, digits)?;
        }
        Ok((right, sum / self.digits.len() as f64))
    }
}

impl Task for Classes<'_> {
    fn loss(&mut self, ops: &mut Eager, rng: &mut Rng) -> moh_train::Result<Loss> {
        let (mut pixels, mut labels) = (Vec::new(), Vec::new());
        for _ in 0..BATCH {
            let (digit, label) = &self.digits[rng.below(self.digits.len())];
            let moved = (10.0 * rng.uniform() - 5.0, 10.0 * rng.uniform() - 5.0);
            picture(digit, moved, &mut pixels);
            labels.push(*label as i64);
        }
        let labels = Tensor::from_vec(labels, BATCH, &ops.device().clone())?;
        let logits = self.logits(ops, pixels)?;
        let mut parts = vec![("classes", 1.0, loss::cross_entropy(&logits, &labels, 0.1)?)];
        parts.extend(routing::load_balance(ops.routing())?.map(|balance| ("balance", BALANCE, balance)));
        Loss::sum(parts)
    }
}

/// A digit in three equal channels.
fn picture(digit: &[f32; 64], moved: (f32, f32), out: &mut Vec<f32>) {
    let begin = out.len();
    scaled(digit, SIDE, moved, out);
    for _ in 0..2 {
        out.extend_from_within(begin..begin + SIDE * SIDE);
    }
}

/// Digits where they were, (digits, 3, SIDE, SIDE).
pub(crate) fn pictures(digits: &[Digit]) -> Vec<f32> {
    let mut pixels = Vec::new();
    digits.iter().for_each(|(digit, _)| picture(digit, (0.0, 0.0), &mut pixels));
    pixels
}

/// How many of the digits have their largest logit at their label.
pub(crate) fn count_right(logits: &[f32], digits: &[Digit]) -> Result<usize> {
    let mut right = 0;
    for (logits, (_, label)) in logits.chunks(10).zip(digits) {
        let best = (0..10).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).context("ten classes")?;
        right += usize::from(best == *label);
    }
    Ok(right)
}
