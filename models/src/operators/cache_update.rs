//! CacheUpdate: every sequence's cache cut where its new tokens go, and joined again.

use super::{Computed, ModelOperator};
use crate::error::Result;
use crate::macs::Macs;
use crate::shape::Shape;
use candle_core::Tensor;
use moh_operators::List;
use moh_operators::cache_update::{Attributes, CacheUpdate, Inputs};

impl ModelOperator for CacheUpdate {
    fn compute(_: &Attributes, inputs: &Inputs<List<'_, &Tensor>>) -> Result<Computed> {
        let Inputs { past, update, attention_mask, start } = *inputs;
        let (batch, heads, capacity, dim) = past.dims4()?;
        let (q_len, length) = (update.dim(1)?, capacity.max(attention_mask.dim(1)?));
        let growth = Tensor::zeros((batch, heads, length - capacity, dim), past.dtype(), past.device())?;
        let grown = Tensor::cat(&[&past.contiguous()?, &growth], 2)?;
        let update = update.reshape((batch, q_len, heads, dim))?.transpose(1, 2)?.contiguous()?;
        // Rows in float32 have lost the type of numbers that say where.
        let start = start.to_dtype(candle_core::DType::I64)?.to_vec1::<i64>()?;
        let mut rows = Vec::with_capacity(batch);
        for (b, start) in start.into_iter().enumerate() {
            let start = usize::try_from(start).unwrap_or(0).min(length.saturating_sub(q_len));
            let (row, end) = (grown.narrow(0, b, 1)?, start + q_len);
            let (before, after) = (row.narrow(2, 0, start)?, row.narrow(2, end, length - end)?);
            rows.push(Tensor::cat(&[before, update.narrow(0, b, 1)?, after], 2)?);
        }
        Ok(if rows.is_empty() { grown } else { Tensor::cat(&rows, 0)? }.into())
    }

    fn macs(_: &Attributes, _: &Inputs<List<'_, &Shape>>) -> Macs {
        Macs::default()
    }
}
