//! AdamW (arXiv 1711.05101), whose state can be saved and read without losing a bit.

use crate::error::Result;
use crate::options::Options;
use crate::slices::{self, TASK, vectorised};
use candle_core::{CpuStorage, DType, Device, InplaceOp2, Layout, Tensor, Var};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// The moments of every tensor: (2, elements), first the mean of gradients, then that of their squares.
pub(crate) struct AdamW {
    moments: BTreeMap<String, Tensor>,
}

/// The numbers of one step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rates {
    pub(crate) learning_rate: f64,
    /// The step, counted from 1.
    pub(crate) step: usize,
    /// What gradients are multiplied by before they are used.
    pub(crate) scale: f64,
}

/// How names of tables of positions and queries end, which are no products' weights.
const TABLES: [&str; 5] = ["pos_embed", "embed_positions.weight", "query_embedding", "learnable_tokens", "temperature"];

/// Whether a tensor's numbers become smaller by themselves: those of matrices and kernels do, biases, whatever their shape, and tables do not.
fn decays(name: &str, shape: &[usize]) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    shape.iter().filter(|&&n| n > 1).count() > 1
        && !last.contains("bias")
        && !TABLES.iter().any(|table| name.ends_with(table))
}

impl AdamW {
    /// Moments of 0.
    pub(crate) fn new<'a>(vars: impl Iterator<Item = (&'a str, &'a Var)>, device: &Device) -> Result<AdamW> {
        let zero = |(name, var): (&str, &Var)| {
            Ok((name.to_owned(), Tensor::zeros((2, var.elem_count()), DType::F32, device)?))
        };
        Ok(AdamW { moments: vars.map(zero).collect::<Result<_>>()? })
    }

    /// Moments that were saved.
    pub(crate) fn with(moments: BTreeMap<String, Tensor>) -> AdamW {
        AdamW { moments }
    }

    pub(crate) fn moments(&self) -> &BTreeMap<String, Tensor> {
        &self.moments
    }

    /// Changes `var` and its moments by its gradient.
    pub(crate) fn update(
        &self,
        name: &str,
        var: &Var,
        gradient: &Tensor,
        rates: Rates,
        options: &Options,
    ) -> Result<()> {
        let Some(moments) = self.moments.get(name) else { return Ok(()) };
        let (beta1, beta2) = options.betas;
        let correction = |beta: f64| 1.0 - beta.powi(i32::try_from(rates.step).unwrap_or(i32::MAX));
        let decay = if decays(name, var.dims()) { options.weight_decay } else { 0.0 };
        let gradient = gradient.flatten_all()?.contiguous()?;
        if !moments.device().is_cpu() {
            let scaled = (&gradient * rates.scale)?;
            let mean = ((moments.get(0)? * beta1)? + (&scaled * (1.0 - beta1))?)?;
            let square = ((moments.get(1)? * beta2)? + (scaled.sqr()? * (1.0 - beta2))?)?;
            let root = ((&square / correction(beta2))?.sqrt()? + options.eps)?;
            let change = ((&mean / correction(beta1))? / root)?.reshape(var.shape())?;
            let kept = (var.as_tensor() * (1.0 - rates.learning_rate * decay))?;
            var.set(&(kept - (change * rates.learning_rate)?)?)?;
            moments.slice_set(&Tensor::stack(&[mean, square], 0)?, 0, 0)?;
            return Ok(());
        }
        let update = Moments { beta1: beta1 as f32, beta2: beta2 as f32, scale: rates.scale as f32 };
        moments.inplace_op2(&gradient, &update)?;
        var.inplace_op2(
            moments,
            &Weights {
                kept: (1.0 - rates.learning_rate * decay) as f32,
                rate: (rates.learning_rate / correction(beta1)) as f32,
                square: (1.0 / correction(beta2)) as f32,
                eps: options.eps as f32,
            },
        )?;
        Ok(())
    }
}

struct Moments {
    beta1: f32,
    beta2: f32,
    scale: f32,
}

impl InplaceOp2 for Moments {
    fn name(&self) -> &'static str {
        "adamw-moments"
    }

    fn cpu_fwd(&self, s1: &mut CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> candle_core::Result<()> {
        let (moments, gradient) = (slices::of_mut(s1, l1)?, slices::of(s2, l2)?);
        let (means, squares) = moments.split_at_mut(gradient.len());
        let Moments { beta1, beta2, scale } = *self;
        let parts = means.par_chunks_mut(TASK).zip(squares.par_chunks_mut(TASK)).zip(gradient.par_chunks(TASK));
        parts.for_each(|((means, squares), gradient)| {
            vectorised(|| {
                for ((mean, square), gradient) in means.iter_mut().zip(squares).zip(gradient) {
                    let gradient = gradient * scale;
                    *mean = beta1 * *mean + (1.0 - beta1) * gradient;
                    *square = beta2 * *square + (1.0 - beta2) * gradient * gradient;
                }
            });
        });
        Ok(())
    }
}

struct Weights {
    kept: f32,
    rate: f32,
    square: f32,
    eps: f32,
}

impl InplaceOp2 for Weights {
    fn name(&self) -> &'static str {
        "adamw-weights"
    }

    fn cpu_fwd(&self, s1: &mut CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> candle_core::Result<()> {
        let (weights, moments) = (slices::of_mut(s1, l1)?, slices::of(s2, l2)?);
        let (means, squares) = moments.split_at(weights.len());
        let parts = weights.par_chunks_mut(TASK).zip(means.par_chunks(TASK)).zip(squares.par_chunks(TASK));
        parts.for_each(|((weights, means), squares)| {
            vectorised(|| {
                for ((weight, mean), square) in weights.iter_mut().zip(means).zip(squares) {
                    *weight = self.kept * *weight - self.rate * mean / ((square * self.square).sqrt() + self.eps);
                }
            });
        });
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn norms_biases_and_tables_do_not_decay() {
        for (name, shape) in [
            ("q_proj.weight", &[8, 4][..]),
            ("patch_embed.proj.weight", &[8, 3, 2, 2]),
            ("experts.fc1.weight", &[2, 8, 4]),
        ] {
            assert!(decays(name, shape), "{name}");
        }
        for (name, shape) in [
            ("norm.weight", &[8][..]),
            ("attn.temperature", &[8, 1, 1]),
            ("experts.fc1.bias", &[2, 8]),
            ("attn.relative_pos_bias_local", &[8, 9]),
            ("attn.query_embedding", &[8, 1, 4]),
            ("pos_embed", &[1, 16, 8]),
            ("encoder.embed_positions.weight", &[16, 8]),
        ] {
            assert!(!decays(name, shape), "{name}");
        }
    }

    /// Three steps of a matrix and a vector, against the formulas in float64.
    #[test]
    fn follows_the_formulas() {
        let device = Device::Cpu;
        let options = Options { weight_decay: 0.1, ..Options::default() };
        let vars = [
            ("matrix".to_owned(), Var::from_vec(vec![1f32, -2.0, 0.5, 3.0], (2, 2), &device).unwrap()),
            ("vector".to_owned(), Var::from_vec(vec![1f32, -2.0], 2, &device).unwrap()),
        ];
        let adamw = AdamW::new(vars.iter().map(|(name, var)| (name.as_str(), var)), &device).unwrap();
        for (name, var) in &vars {
            let decay = if var.rank() > 1 { 0.1 } else { 0.0 };
            let mut expected: Vec<f64> =
                var.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f64::from).collect();
            let (mut mean, mut square) = (vec![0.0; expected.len()], vec![0.0; expected.len()]);
            for step in 1..=3 {
                let gradient: Vec<f64> = (0..expected.len()).map(|i| (i as f64 - 1.0) * 0.3 + step as f64).collect();
                let tensor = Tensor::from_iter(gradient.iter().map(|&g| g as f32), &device).unwrap();
                let rates = Rates { learning_rate: 0.01, step, scale: 0.5 };
                adamw.update(name, var, &tensor.reshape(var.shape()).unwrap(), rates, &options).unwrap();
                for i in 0..expected.len() {
                    let g = 0.5 * gradient[i];
                    mean[i] = 0.9 * mean[i] + 0.1 * g;
                    square[i] = 0.95 * square[i] + 0.05 * g * g;
                    let (m, v) =
                        (mean[i] / (1.0 - 0.9f64.powi(step as i32)), square[i] / (1.0 - 0.95f64.powi(step as i32)));
                    expected[i] -= 0.01 * decay * expected[i] + 0.01 * m / (v.sqrt() + 1e-8);
                }
            }
            let found = var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert!(
                found.iter().zip(&expected).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-6),
                "{found:?} {expected:?}"
            );
        }
    }
}
