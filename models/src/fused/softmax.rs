//! Attention's softmax with its scale, bias and causal mask.

use super::broadcast::reduced;
use super::rows::{exp, made};
use super::{numbers, of2};
use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Tensor, bail};

/// softmax(scale * scores + bias) over the last axis of (batch, heads, q_len, kv_len), 0 where a query sees no key. `bias` broadcasts. If
/// causal, query i sees the keys up to i + kv_len - q_len.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionSoftmax {
    scale: f32,
    causal: bool,
    q_len: usize,
    kv_len: usize,
}

impl AttentionSoftmax {
    /// That of such scores.
    pub(crate) fn of(scores: &Tensor, scale: f32, causal: bool) -> Result<AttentionSoftmax> {
        let (_, _, q_len, kv_len) = scores.dims4()?;
        Ok(AttentionSoftmax { scale, causal, q_len, kv_len })
    }

    /// The weights.
    pub(crate) fn weights(&self, scores: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let scores = scores.contiguous()?;
        match bias {
            None => scores.apply_op1_no_bwd(self),
            Some(bias) => {
                let missing = 4usize.saturating_sub(bias.rank());
                let bias = (0..missing).try_fold(bias.clone(), |bias, _| bias.unsqueeze(0))?;
                scores.apply_op2_no_bwd(&bias.contiguous()?, self)
            }
        }
    }

    /// The gradient of the scores, and of a bias of the shape `bias`.
    pub(crate) fn gradients(
        &self,
        weights: &Tensor,
        gradient: &Tensor,
        bias: Option<&[usize]>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let Some(bias) = bias else { return Ok((self.backward(weights, gradient, self.scale)?, None)) };
        let of_sums = self.backward(weights, gradient, 1.0)?;
        Ok(((&of_sums * f64::from(self.scale))?, Some(reduced(&of_sums, bias)?)))
    }

    /// The keys that query `row % q_len` sees.
    fn seen(&self, row: usize) -> usize {
        match self.causal {
            true => (row % self.q_len + 1 + self.kv_len).saturating_sub(self.q_len).min(self.kv_len),
            false => self.kv_len,
        }
    }

    fn forward<'a>(&self, scores: &[f32], bias: impl Fn(usize) -> Option<(&'a [f32], usize)> + Sync) -> Vec<f32> {
        let width = self.kv_len;
        made(
            scores.len(),
            width,
            #[inline(always)]
            |first, part| {
                for (i, out) in part.chunks_mut(width).enumerate() {
                    let row = first + i;
                    let seen = self.seen(row);
                    let (out, hidden) = out.split_at_mut(seen);
                    let scores = &scores[row * width..][..seen];
                    match bias(row) {
                        None => out.iter_mut().zip(scores).for_each(|(out, s)| *out = self.scale * s),
                        Some((bias, 0)) => {
                            out.iter_mut().zip(scores).for_each(|(out, s)| *out = self.scale * s + bias[0])
                        }
                        Some((bias, _)) => {
                            out.iter_mut().zip(scores).zip(bias).for_each(|((out, s), b)| *out = self.scale * s + b);
                        }
                    }
                    let max = most(out);
                    hidden.fill(0.0);
                    // Of numbers that are none, too, the largest is none: they stay.
                    if max == f32::NEG_INFINITY && out.iter().all(|x| *x == max) {
                        out.fill(0.0);
                        continue;
                    }
                    for x in out.iter_mut() {
                        // Beyond what float32 has, and of masked keys, nothing is left.
                        *x = if *x - max < -86.0 { 0.0 } else { exp(*x - max) };
                    }
                    let total: f32 = sum(out);
                    let factor = 1.0 / total;
                    out.iter_mut().for_each(|x| *x *= factor);
                }
            },
        )
    }

    /// factor * p (g - sum(p g)), which is the gradient of the scaled and biased scores if `factor` is 1.
    fn backward(&self, weights: &Tensor, gradient: &Tensor, factor: f32) -> Result<Tensor> {
        let width = self.kv_len;
        of2("softmax-backward", weights.shape(), (weights, gradient), |weights, gradient| {
            made(
                weights.len(),
                width,
                #[inline(always)]
                |first, part| {
                    for (i, out) in part.chunks_mut(width).enumerate() {
                        let (from, seen) = ((first + i) * width, self.seen(first + i));
                        let (p, g) = (&weights[from..][..seen], &gradient[from..][..seen]);
                        let dot = dot(p, g);
                        out.iter_mut().zip(p).zip(g).for_each(|((out, p), g)| *out = factor * p * (g - dot));
                    }
                },
            )
        })
    }
}

/// A sum in sixteen parts, which compilers vectorise.
#[inline(always)]
pub(super) fn sum(x: &[f32]) -> f32 {
    let mut sums = [0f32; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    for chunk in chunks {
        sums.iter_mut().zip(chunk).for_each(|(sum, x)| *sum += x);
    }
    sums.iter().sum::<f32>() + rest.iter().sum::<f32>()
}

/// The largest number, found in sixteen parts.
#[inline(always)]
pub(super) fn most(x: &[f32]) -> f32 {
    let mut parts = [f32::NEG_INFINITY; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    for chunk in chunks {
        parts.iter_mut().zip(chunk).for_each(|(most, x)| *most = if *x > *most { *x } else { *most });
    }
    parts.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max)
}

#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; 8];
    let ((a_chunks, a_rest), (b_chunks, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum::<f32>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f32>()
}

impl CustomOp1 for AttentionSoftmax {
    fn name(&self) -> &'static str {
        "attention-softmax"
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout) -> Result<(CpuStorage, Shape)> {
        let scores = numbers(s1, l1)?;
        Ok((CpuStorage::F32(self.forward(scores, |_| None)), l1.shape().clone()))
    }
}

impl CustomOp2 for AttentionSoftmax {
    fn name(&self) -> &'static str {
        "attention-softmax"
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> Result<(CpuStorage, Shape)> {
        let (scores, bias) = (numbers(s1, l1)?, numbers(s2, l2)?);
        let &[_, heads, q_len, kv_len] = l1.dims() else { bail!("scores of four axes") };
        let dims = l2.dims();
        let fits = dims.iter().zip(l1.dims()).all(|(bias, scores)| bias == scores || *bias == 1);
        if !fits || dims.len() != 4 {
            bail!("a bias {dims:?} for scores {:?}", l1.dims());
        }
        let stride = |axis: usize| {
            if dims[axis] == 1 { 0 } else { dims[axis + 1..].iter().product::<usize>() }
        };
        let strides = [stride(0), stride(1), stride(2), stride(3)];
        let row_of = |row: usize| {
            let (batch, head, query) = (row / (heads * q_len), row / q_len % heads, row % q_len);
            let from = batch * strides[0] + head * strides[1] + query * strides[2];
            Some((&bias[from..from + if strides[3] == 0 { 1 } else { kv_len }], strides[3]))
        };
        Ok((CpuStorage::F32(self.forward(scores, row_of)), l1.shape().clone()))
    }
}
