//! RMSNorm and LayerNorm over the last axis.

use super::rows::{made, sum};
use super::softmax::dot;
use super::{Arithmetic, binary, numbers, of1, of2};
use candle_core::{CpuStorage, CustomOp1, CustomOp2, CustomOp3, D, Layout, Result, Shape, Tensor};

/// RMSNorm, weight x / sqrt(mean(x^2) + eps); or LayerNorm, (x - mean) / sqrt(variance + eps), and that times a weight plus a bias.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Norm {
    /// Added to the variance.
    pub(crate) eps: f32,
    /// Whether the mean is taken away.
    pub(crate) centres: bool,
}

impl Norm {
    /// The mean (0 where it stays), and 1 / sqrt(variance + eps).
    #[inline(always)]
    fn moments(self, row: &[f32]) -> (f32, f32) {
        let n = row.len() as f32;
        let mean = if self.centres { row.iter().sum::<f32>() / n } else { 0.0 };
        let mut squares = [0f32; 8];
        let (chunks, rest) = row.as_chunks::<8>();
        for chunk in chunks {
            squares.iter_mut().zip(chunk).for_each(|(sum, x)| *sum += (x - mean) * (x - mean));
        }
        let variance = squares.iter().sum::<f32>() + rest.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>();
        (mean, 1.0 / (variance / n + self.eps).sqrt())
    }

    fn forward(self, x: &[f32], width: usize, finish: impl Fn(&mut [f32]) + Sync) -> Vec<f32> {
        made(
            x.len(),
            width,
            #[inline(always)]
            |first, part| {
                for (out, x) in part.chunks_mut(width).zip(x[first * width..].chunks(width)) {
                    let (mean, factor) = self.moments(x);
                    out.iter_mut().zip(x).for_each(|(out, x)| *out = (x - mean) * factor);
                    finish(out);
                }
            },
        )
    }

    /// The gradient of x, where `scaled` gives the gradient of the normed row, times the weights.
    fn of_x(self, x: &Tensor, weight: Option<&Tensor>, gradient: &Tensor) -> Result<Tensor> {
        let (width, n) = (x.dim(D::Minus1)?, x.dim(D::Minus1)? as f32);
        let weighted = match weight {
            Some(weight) => binary(Arithmetic::Product, gradient, weight)?,
            None => gradient.clone(),
        };
        of2("norm-backward", x.shape(), (x, &weighted), |x, gradient| {
            made(
                x.len(),
                width,
                #[inline(always)]
                |first, part| {
                    let from = first * width;
                    let rows = x[from..].chunks(width).zip(gradient[from..].chunks(width));
                    for (out, (x, g)) in part.chunks_mut(width).zip(rows) {
                        let (mean, factor) = self.moments(x);
                        let total: f32 = g.iter().sum();
                        // sum(g y), with y the normed row.
                        let along = (dot(g, x) - mean * total) * factor;
                        let shift = if self.centres { total / n } else { 0.0 };
                        out.iter_mut().zip(x).zip(g).for_each(|((out, x), g)| {
                            *out = factor * (g - shift - (x - mean) * factor * along / n);
                        });
                    }
                },
            )
        })
    }

    /// The gradient of the weight: the sum over rows of the gradient times the normed row.
    fn of_weight(self, x: &Tensor, weight: &Tensor, gradient: &Tensor) -> Result<Tensor> {
        let width = x.dim(D::Minus1)?;
        of2("norm-backward", weight.shape(), (x, gradient), |x, gradient| {
            sum(
                x.len() / width,
                width,
                width,
                #[inline(always)]
                |first, end, sums| {
                    let rows = x[first * width..end * width].chunks(width);
                    for (x, g) in rows.zip(gradient[first * width..].chunks(width)) {
                        let (mean, factor) = self.moments(x);
                        sums.iter_mut().zip(x).zip(g).for_each(|((sum, x), g)| *sum += g * (x - mean) * factor);
                    }
                },
            )
        })
    }
}

impl CustomOp1 for Norm {
    fn name(&self) -> &'static str {
        "norm"
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = numbers(s1, l1)?;
        let out = self.forward(x, l1.dims().last().copied().unwrap_or(1), |_| ());
        Ok((CpuStorage::F32(out), l1.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.of_x(x, None, gradient)?))
    }
}

impl CustomOp2 for Norm {
    fn name(&self) -> &'static str {
        "norm"
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> Result<(CpuStorage, Shape)> {
        let (x, weight) = (numbers(s1, l1)?, numbers(s2, l2)?);
        let out = self.forward(x, weight.len(), |row| row.iter_mut().zip(weight).for_each(|(y, w)| *y *= w));
        Ok((CpuStorage::F32(out), l1.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((Some(self.of_x(x, Some(weight), gradient)?), Some(self.of_weight(x, weight, gradient)?)))
    }
}

impl CustomOp3 for Norm {
    fn name(&self) -> &'static str {
        "norm"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x, weight, bias) = (numbers(s1, l1)?, numbers(s2, l2)?, numbers(s3, l3)?);
        let out = self.forward(x, weight.len(), |row| {
            row.iter_mut().zip(weight).zip(bias).for_each(|((y, w), b)| *y = *y * w + b);
        });
        Ok((CpuStorage::F32(out), l1.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let width = x.dim(D::Minus1)?;
        let of_bias = of1("norm-backward", bias.shape(), gradient, |gradient| {
            sum(
                gradient.len() / width,
                width,
                width,
                #[inline(always)]
                |first, end, sums| {
                    for row in gradient[first * width..end * width].chunks(width) {
                        sums.iter_mut().zip(row).for_each(|(sum, g)| *sum += g);
                    }
                },
            )
        })?;
        let of_weight = self.of_weight(x, weight, gradient)?;
        Ok((Some(self.of_x(x, Some(weight), gradient)?), Some(of_weight), Some(of_bias)))
    }
}
