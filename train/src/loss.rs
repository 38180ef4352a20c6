//! Losses over a model's outputs.

use crate::error::Result;
use candle_core::{D, DType, Tensor};

/// The mean cross-entropy, in nats, of `logits` (.., classes) and the classes `targets` (..), int64; targets below 0 do not count.
///
/// With `smoothing`, that share of the target's probability goes to all classes alike.
///
/// # Errors
/// A target that is no class, where tensors are on a CPU; what candle fails with.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor, smoothing: f64) -> Result<Tensor> {
    let classes = logits.dim(D::Minus1)?;
    let logits = logits.to_dtype(DType::F32)?.reshape(((), classes))?;
    let targets = targets.flatten_all()?;
    if targets.device().is_cpu()
        && let Some(wrong) = targets.to_vec1::<i64>()?.into_iter().find(|&target| target >= classes as i64)
    {
        let message = format!("targets: expected classes below {classes}, or less than 0 for none, found {wrong}");
        return Err(candle_core::Error::Msg(message).into());
    }
    let counted = targets.ge(0i64)?;
    let class = counted.where_cond(&targets, &targets.zeros_like()?)?.unsqueeze(1)?;
    // The largest logit is taken away for the exponentials' sake; as a constant, it has no gradient.
    let shifted = logits.broadcast_sub(&logits.detach().max_keepdim(1)?)?;
    let sum = shifted.exp()?.sum_keepdim(1)?.log()?;
    let of_target = (&sum - shifted.gather(&class, 1)?)?;
    let losses = match smoothing {
        0.0 => of_target,
        _ => {
            let of_all = (&sum - shifted.mean_keepdim(1)?)?;
            ((of_target * (1.0 - smoothing))? + (of_all * smoothing)?)?
        }
    };
    let counted = counted.to_dtype(DType::F32)?;
    let count = f64::from(counted.sum_all()?.to_scalar::<f32>()?).max(1.0);
    Ok(((losses.squeeze(1)? * counted)?.sum_all()? / count)?)
}

/// The mean squared difference.
///
/// # Errors
/// What candle fails with.
pub fn mean_squared(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    Ok((a.to_dtype(DType::F32)? - b)?.sqr()?.mean_all()?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn a_target_that_is_no_class_is_told() {
        let logits = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
        for wrong in [3, i64::MAX] {
            let targets = Tensor::new(&[-1i64, wrong], &Device::Cpu).unwrap();
            let error = cross_entropy(&logits, &targets, 0.0).unwrap_err().to_string();
            assert_eq!(error, format!("targets: expected classes below 3, or less than 0 for none, found {wrong}"));
        }
    }

    #[test]
    fn cross_entropy_by_hand() {
        let logits = Tensor::new(&[[1f32, 2.0, 3.0], [500.0, 0.0, 0.0], [7.0, 8.0, 9.0]], &Device::Cpu).unwrap();
        let targets = Tensor::new(&[2i64, 0, -1], &Device::Cpu).unwrap();
        let of = |smoothing| cross_entropy(&logits, &targets, smoothing).unwrap().to_scalar::<f32>().unwrap();
        let sum = (1f32.exp() + 2f32.exp() + 3f32.exp()).ln();
        assert!((of(0.0) - (sum - 3.0) / 2.0).abs() < 1e-6);
        let none = Tensor::new(&[-1i64, -1, -1], &Device::Cpu).unwrap();
        assert_eq!(cross_entropy(&logits, &none, 0.0).unwrap().to_scalar::<f32>().unwrap(), 0.0);
        // Of the second row, two of three classes are 500 below.
        let smooth = 0.9 * (sum - 3.0) + 0.1 * (sum - 2.0) + 0.1 * 1000.0 / 3.0;
        assert!((of(0.1) - smooth / 2.0).abs() < 1e-4);
    }
}
