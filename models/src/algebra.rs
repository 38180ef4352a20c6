//! Tensor algebra that candle does not bring along.

use crate::error::Result;
use candle_core::{D, DType, Tensor};

/// exp(x) / sum(exp(x)) over the last axis.
pub(crate) fn softmax(x: &Tensor) -> Result<Tensor> {
    let exp = x.broadcast_sub(&x.max_keepdim(D::Minus1)?)?.exp()?;
    Ok(exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)?)
}

/// `multiply` of `x` and `weight`: a matrix product or a convolution.
///
/// candle has no bfloat16 products on CPUs. There they are made of the same numbers in float32 and then rounded, as on GPUs.
pub(crate) fn multiply(
    x: &Tensor,
    weight: &Tensor,
    multiply: impl Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
) -> Result<Tensor> {
    match x.dtype() == DType::BF16 && x.device().is_cpu() {
        true => Ok(multiply(&x.to_dtype(DType::F32)?, &weight.to_dtype(DType::F32)?)?.to_dtype(DType::BF16)?),
        false => Ok(multiply(x, weight)?),
    }
}

/// Matrix products over the last two axes; leading axes broadcast. One matrix for all rows of `x` is one product.
pub(crate) fn product(x: &Tensor, matrix: &Tensor) -> Result<Tensor> {
    match (x.rank(), matrix.dims()) {
        (3.., &[inner, columns]) => {
            let mut dims = x.dims().to_vec();
            if let Some(last) = dims.last_mut() {
                *last = columns;
            }
            let rows = x.contiguous()?.reshape((x.elem_count() / inner.max(1), inner))?;
            Ok(multiply(&rows, matrix, Tensor::matmul)?.reshape(dims)?)
        }
        _ => multiply(&x.contiguous()?, &matrix.contiguous()?, Tensor::broadcast_matmul),
    }
}

/// 1 / (1 + exp(-x)).
pub(crate) fn sigmoid(x: &Tensor) -> Result<Tensor> {
    Ok((x.neg()?.exp()? + 1.0)?.recip()?)
}

/// x * sigmoid(x).
pub(crate) fn silu(x: &Tensor) -> Result<Tensor> {
    Ok(x.broadcast_mul(&sigmoid(x)?)?)
}

/// `a` where `condition`, else `b`, with broadcasting.
pub(crate) fn select(condition: &Tensor, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let shape = condition.shape().broadcast_shape_binary_op(a.shape(), "select")?;
    let shape = shape.broadcast_shape_binary_op(b.shape(), "select")?;
    let [condition, a, b] = [condition, a, b].map(|x| x.broadcast_as(&shape));
    Ok(condition?.where_cond(&a?, &b?)?)
}

/// `x` (batch, q_len, heads * dim) with zeros in the blocks whose gates, (batch, q_len, heads), are 0.
pub(crate) fn mask_heads(x: &Tensor, gates: &Tensor) -> Result<Tensor> {
    let heads = gates.dim(D::Minus1)?;
    let (batch, q_len, width) = x.dims3()?;
    let blocks = x.reshape((batch, q_len, heads, width / heads))?;
    let off = gates.eq(&gates.zeros_like()?)?.unsqueeze(D::Minus1)?;
    let zero = Tensor::zeros(&[1], x.dtype(), x.device())?;
    Ok(select(&off, &zero, &blocks)?.reshape((batch, q_len, width))?)
}
