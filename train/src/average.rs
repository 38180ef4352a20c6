//! The moving average of the weights.

use crate::error::Result;
use crate::slices;
use candle_core::{CpuStorage, InplaceOp2, Layout, Tensor};
use std::collections::BTreeMap;

/// The averages by the tensors' names.
pub(crate) struct Average {
    tensors: BTreeMap<String, Tensor>,
}

impl Average {
    pub(crate) fn with(tensors: BTreeMap<String, Tensor>) -> Average {
        Average { tensors }
    }

    pub(crate) fn tensors(&self) -> &BTreeMap<String, Tensor> {
        &self.tensors
    }

    /// `share` of the old average, and the rest of `now`.
    pub(crate) fn update(&mut self, name: &str, now: &Tensor, share: f64) -> Result<()> {
        let Some(average) = self.tensors.get_mut(name) else { return Ok(()) };
        match average.device().is_cpu() {
            true => average.inplace_op2(now, &Mix { share: share as f32 })?,
            false => *average = ((&*average * share)? + (now.detach() * (1.0 - share))?)?,
        }
        Ok(())
    }
}

struct Mix {
    share: f32,
}

impl InplaceOp2 for Mix {
    fn name(&self) -> &'static str {
        "moving-average"
    }

    fn cpu_fwd(&self, s1: &mut CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> candle_core::Result<()> {
        let (averages, now) = (slices::of_mut(s1, l1)?, slices::of(s2, l2)?);
        for (average, now) in averages.iter_mut().zip(now) {
            *average = self.share * *average + (1.0 - self.share) * now;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use candle_core::Device;

    #[test]
    fn the_share_is_that_of_the_old_average() {
        let tensor = |x: f32| Tensor::new(&[x, -x], &Device::Cpu).unwrap();
        let mut average = Average::with(BTreeMap::from([("w".to_owned(), tensor(1.0))]));
        average.update("w", &tensor(3.0), 0.75).unwrap();
        average.update("other", &tensor(9.0), 0.75).unwrap();
        assert_eq!(average.tensors()["w"].to_vec1::<f32>().unwrap(), [1.5, -1.5]);
    }
}
