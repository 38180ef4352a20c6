//! Products of rows with matrices.

use super::rows::{each, sum};
use super::{numbers, numbers_mut, of1, packed, product};
use candle_core::{CpuStorage, D, InplaceOp2, Layout, Result, Tensor};

/// x W^T + b over the last axis, with W (out, in).
pub(crate) fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let y = product(&rows(x)?, &weight.t()?)?;
    if let Some(bias) = bias {
        y.inplace_op2(&bias.contiguous()?, &AddBias)?;
    }
    let mut dims = x.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last = weight.dim(0)?;
    }
    y.reshape(dims)
}

/// The gradients of x, W and b that are wanted.
pub(crate) fn linear_gradients(
    gradient: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    wanted: [bool; 3],
) -> Result<[Option<Tensor>; 3]> {
    let (g, [of_x, of_weight, of_bias]) = (rows(gradient)?, wanted);
    let of_x = of_x.then(|| product(&g, weight)?.reshape(x.dims())).transpose()?;
    let of_weight = of_weight.then(|| product(&g.t()?, &rows(x)?)).transpose()?;
    let width = g.dim(D::Minus1)?;
    let of_bias = of_bias.then(|| {
        of1("bias-backward", &width.into(), &g, |g| {
            sum(
                g.len() / width.max(1),
                width,
                width,
                #[inline(always)]
                |first, end, sums| {
                    for row in g[first * width..end * width].chunks(width) {
                        sums.iter_mut().zip(row).for_each(|(sum, g)| *sum += g);
                    }
                },
            )
        })
    });
    Ok([of_x, of_weight, of_bias.transpose()?])
}

/// (rows, width).
fn rows(x: &Tensor) -> Result<Tensor> {
    let width = x.dim(D::Minus1)?;
    packed(x)?.reshape((x.elem_count() / width.max(1), width))
}

struct AddBias;

impl InplaceOp2 for AddBias {
    fn name(&self) -> &'static str {
        "add-bias"
    }

    fn cpu_fwd(&self, s1: &mut CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> Result<()> {
        let (x, bias) = (numbers_mut(s1, l1)?, numbers(s2, l2)?);
        each(x, bias.len(), |_, part| {
            for row in part.chunks_mut(bias.len()) {
                row.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
            }
        });
        Ok(())
    }
}
