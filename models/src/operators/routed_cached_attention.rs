//! RoutedCachedAttention: attention to the whole cache, of which keys and values that no query sees are 0, under a mask.

use super::routed_attention::attend;
use super::{Computed, ModelOperator};
use crate::algebra::select;
use crate::error::Result;
use crate::macs::Macs;
use crate::shape::Shape;
use candle_core::{DType, Tensor};
use moh_operators::List;
use moh_operators::routed_cached_attention::{Attributes, Inputs, RoutedCachedAttention};

impl ModelOperator for RoutedCachedAttention {
    fn compute(attributes: &Attributes, inputs: &Inputs<List<'_, &Tensor>>) -> Result<Computed> {
        let Attributes { num_heads, kv_num_heads, scale } = *attributes;
        let Inputs { query, key, value, head_gates, first, start } = *inputs;
        let device = query.device();
        let (batch, _, capacity, _) = key.dims4()?;
        let q_len = query.dim(1)?;
        let positions = |x: &Tensor| Ok::<_, crate::Error>(x.to_dtype(DType::I64)?.reshape((batch, 1, 1, 1))?);
        let (first, start) = (positions(first)?, positions(start)?);
        let keys = Tensor::arange(0, capacity as i64, device)?;
        let queries = Tensor::arange(0, q_len as i64, device)?.reshape((1, 1, q_len, 1))?;
        let newest = start.broadcast_add(&queries)?;
        let of_row = keys.reshape((1, 1, 1, capacity))?;
        // (batch, 1, q_len, capacity)
        let hidden = (of_row.broadcast_lt(&first)?.broadcast_add(&of_row.broadcast_gt(&newest)?))?;
        let zero = Tensor::zeros(&[1], DType::F32, device)?;
        let mask = select(&hidden, &Tensor::full(f32::NEG_INFINITY, &[1], device)?, &zero)?;
        // (batch, 1, capacity, 1)
        let of_column = keys.reshape((1, 1, capacity, 1))?;
        let end = (start + q_len as f64)?;
        let unused = (of_column.broadcast_lt(&first)?.broadcast_add(&of_column.broadcast_ge(&end)?))?;
        let (key, value) = (select(&unused, &zero, key)?, select(&unused, &zero, value)?);
        attend((num_heads, kv_num_heads), scale, query, [&key, &value], head_gates, |scores| {
            Ok(scores.broadcast_add(&mask)?)
        })
    }

    /// As if the cache were full: shapes do not say how far it is.
    fn macs(attributes: &Attributes, inputs: &Inputs<List<'_, &Shape>>) -> Macs {
        let (query, key, value) = (inputs.query.dims(), inputs.key.dims(), inputs.value.dims());
        let (batch, q_len, capacity) = (query[0], query[1], key[2]);
        let pairs = batch * (0..q_len).map(|i| (i + 1 + capacity).saturating_sub(q_len)).sum::<usize>();
        let heads = attributes.num_heads;
        Macs::of_heads(pairs.saturating_mul((key[3] + value[3]) * heads), heads, inputs.head_gates)
    }
}
