//! Heads times their gates, from heads side by side in memory to tokens; and zeros in the blocks of heads that are off.

use super::rows::{each, made, made_of, per_task};
use super::softmax::dot;
use super::{numbers, numbers_mut, of2};
use candle_core::{CpuStorage, CustomOp2, InplaceOp2, Layout, Result, Shape, Tensor};

/// `x` (batch, q_len, heads * dim) with zeros in the blocks whose gates, (batch, q_len, heads), are 0.
pub(crate) fn mask_heads(x: &Tensor, gates: &Tensor) -> Result<Tensor> {
    of2("mask-heads", x.shape(), (x, gates), |x, gates| {
        let dim = x.len() / gates.len().max(1);
        made(
            x.len(),
            dim,
            #[inline(always)]
            |first, part| {
                let from = &x[first * dim..];
                for ((out, x), gate) in part.chunks_mut(dim).zip(from.chunks(dim)).zip(&gates[first..]) {
                    if *gate != 0.0 {
                        out.copy_from_slice(x);
                    }
                }
            },
        )
    })
}

/// Puts them into `x`, which nobody else reads.
pub(crate) fn mask_in_place(x: &Tensor, gates: &Tensor) -> Result<()> {
    x.inplace_op2(&gates.contiguous()?, &Mask)
}

struct Mask;

impl InplaceOp2 for Mask {
    fn name(&self) -> &'static str {
        "mask-heads"
    }

    fn cpu_fwd(&self, s1: &mut CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> Result<()> {
        let (x, gates) = (numbers_mut(s1, l1)?, numbers(s2, l2)?);
        let dim = x.len() / gates.len().max(1);
        each(
            x,
            dim,
            #[inline(always)]
            |first, part| {
                for (x, gate) in part.chunks_mut(dim).zip(&gates[first..]) {
                    if *gate == 0.0 {
                        x.fill(0.0);
                    }
                }
            },
        );
        Ok(())
    }
}

/// (batch, q_len, heads * dim) from (batch, heads, q_len, dim) and the gates (batch, q_len, heads); 0 where a gate is 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GateHeads {
    heads: usize,
    q_len: usize,
    dim: usize,
}

impl GateHeads {
    /// That of such heads.
    pub(crate) fn of(x: &Tensor) -> Result<GateHeads> {
        let (_, heads, q_len, dim) = x.dims4()?;
        Ok(GateHeads { heads, q_len, dim })
    }

    /// Where head `head` of token `token`, counted over the batch, begins in (batch, heads, q_len, dim).
    fn at(&self, token: usize, head: usize) -> usize {
        let (batch, query) = (token / self.q_len, token % self.q_len);
        ((batch * self.heads + head) * self.q_len + query) * self.dim
    }
}

impl CustomOp2 for GateHeads {
    fn name(&self) -> &'static str {
        "gate-heads"
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> Result<(CpuStorage, Shape)> {
        let (x, gates) = (numbers(s1, l1)?, numbers(s2, l2)?);
        let GateHeads { heads, q_len, dim } = *self;
        let out = made(
            x.len(),
            heads * dim,
            #[inline(always)]
            |first, part| {
                for (i, out) in part.chunks_mut(heads * dim).enumerate() {
                    for (head, out) in out.chunks_mut(dim).enumerate() {
                        let gate = gates[(first + i) * heads + head];
                        if gate != 0.0 {
                            let x = &x[self.at(first + i, head)..][..dim];
                            out.iter_mut().zip(x).for_each(|(out, x)| *out = gate * x);
                        }
                    }
                }
            },
        );
        let batch = l1.dims()[0];
        Ok((CpuStorage::F32(out), Shape::from((batch, q_len, heads * dim))))
    }

    fn bwd(
        &self,
        x: &Tensor,
        gates: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let GateHeads { heads, q_len, dim } = *self;
        let of_x = of2("gate-heads-backward", x.shape(), (gradient, gates), |gradient, gates| {
            made(
                gradient.len(),
                dim,
                #[inline(always)]
                |first, part| {
                    for (i, out) in part.chunks_mut(dim).enumerate() {
                        let row = first + i;
                        let (batch, head, query) = (row / (heads * q_len), row / q_len % heads, row % q_len);
                        let token = batch * q_len + query;
                        let gate = gates[token * heads + head];
                        if gate != 0.0 {
                            let g = &gradient[(token * heads + head) * dim..][..dim];
                            out.iter_mut().zip(g).for_each(|(out, g)| *out = gate * g);
                        }
                    }
                },
            )
        })?;
        let of_gates = of2("gate-heads-backward", gates.shape(), (gradient, x), |gradient, x| {
            made_of(
                gradient.len() / dim.max(1),
                heads,
                per_task(heads * dim),
                #[inline(always)]
                |first, part| {
                    for (i, out) in part.iter_mut().enumerate() {
                        let (token, head) = (first + i / heads, i % heads);
                        let g = &gradient[(token * heads + head) * dim..][..dim];
                        *out = dot(g, &x[self.at(token, head)..][..dim]);
                    }
                },
            )
        })?;
        // That of a gate of exactly 0 is 0: nothing is computed there.
        let of_gates = of2("gate-heads-backward", gates.shape(), (&of_gates, gates), |found, gates| {
            found.iter().zip(gates).map(|(found, gate)| if *gate == 0.0 { 0.0 } else { *found }).collect()
        })?;
        Ok((Some(of_x), Some(of_gates)))
    }
}
