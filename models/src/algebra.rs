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

/// Below it sigmoids are next to 0, and an infinite exp(-x) would have a gradient of infinity times 0.
const LEAST: f32 = -80.0;

/// 1 / (1 + exp(-x)).
pub(crate) fn sigmoid(x: &Tensor) -> Result<Tensor> {
    Ok((x.maximum(LEAST)?.neg()?.exp()? + 1.0)?.recip()?)
}

/// x * sigmoid(x).
pub(crate) fn silu(x: &Tensor) -> Result<Tensor> {
    let x = x.maximum(LEAST)?;
    Ok((&x * (x.neg()?.exp()? + 1.0)?.recip()?)?)
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use candle_core::{Device, Var};

    #[test]
    fn the_gradient_of_silu_is_finite_everywhere() {
        let values = [f32::MIN, -1e3, -89.0, -80.0, -20.0, 0.0, 20.0, 89.0, 1e3];
        let x = Var::new(&values, &Device::Cpu).unwrap();
        let y = silu(&x).unwrap();
        let gradients = y.sum_all().unwrap().backward().unwrap();
        let slopes = gradients.get(&x).unwrap().to_vec1::<f32>().unwrap();
        for ((&x, y), slope) in values.iter().zip(y.to_vec1::<f32>().unwrap()).zip(slopes) {
            let (exact, s) = (f64::from(x), 1.0 / (1.0 + (-f64::from(x)).exp()));
            assert!((f64::from(y) - exact * s).abs() <= 1e-6 * exact.abs().max(1.0) * s + 1e-30, "silu({x}) = {y}");
            assert!((f64::from(slope) - s * (1.0 + exact * (1.0 - s))).abs() < 1e-6, "slope at {x}: {slope}");
        }
        let nan = silu(&Tensor::new(f32::NAN, &Device::Cpu).unwrap()).unwrap();
        assert!(nan.to_scalar::<f32>().unwrap().is_nan());
    }
}
