//! The KV cache of a layer: a new one at every call, longer by the new tokens, or one with room for more, updated in place.

use super::{Inputs, PortDim, TOTAL};
use crate::checkpoint::Config;
use crate::ops::{Argument, Binary, Ops, Reduce, Result, Type};
use moh_operators::{
    CacheUpdate, RoutedAttention, RoutedCachedAttention, cache_update, routed_attention, routed_cached_attention,
};

/// How the cache grows; the configuration's key is `cache`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cache {
    /// Past and new tokens are concatenated.
    Concat,
    /// New tokens are written where each sequence ends. The cache's dimension is its capacity.
    InPlace,
}

/// The mask's dimension where the cache's is a capacity.
const MASKED: PortDim = PortDim::Named("total");
/// The larger of capacity and mask.
const CAPACITY: PortDim = PortDim::Named("capacity");

impl Cache {
    pub(super) fn configured(config: &Config) -> Result<Cache> {
        match config.str_opt("cache")? {
            None | Some("concat") => Ok(Cache::Concat),
            Some("in-place") => Ok(Cache::InPlace),
            Some(other) => Err(config.rejects("cache", "concat or in-place", other)),
        }
    }

    /// The dimension of the attention mask.
    pub(super) fn masked(self) -> PortDim {
        match self {
            Cache::Concat => TOTAL,
            Cache::InPlace => MASKED,
        }
    }

    /// The dimension of the cache that a call gives back.
    pub(super) fn present(self) -> PortDim {
        match self {
            Cache::Concat => TOTAL,
            Cache::InPlace => CAPACITY,
        }
    }

    /// What every layer's attention needs to know of the sequences.
    pub(super) fn sequences<O: Ops>(self, ops: &mut O, inputs: &Inputs<O::Value>) -> Result<Sequences<O::Value>> {
        let mask = inputs.get("attention_mask")?;
        match self {
            Cache::Concat => Ok(Sequences::Masked(padding_bias(ops, &mask)?)),
            Cache::InPlace => spans(ops, mask, &inputs.get("position_ids")?),
        }
    }
}

/// Which keys the queries of each sequence see.
pub(super) enum Sequences<V> {
    /// Those that a bias leaves open, up to the query's own.
    Masked(V),
    /// Those from `first` on, up to the query's own; query 0 is at `start`.
    Spans { mask: V, first: V, start: V },
}

/// Sizes of an attention layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Heads {
    pub(super) num_heads: usize,
    pub(super) kv_num_heads: usize,
    pub(super) head_dim: usize,
}

impl<V: Clone> Sequences<V> {
    /// Attention of queries (batch, sequence, heads * dim) to the cache and the new keys and values, which are (batch, sequence,
    /// kv_heads, dim). Gives the heads' outputs and the cache with the new tokens.
    pub(super) fn attend<O: Ops<Value = V>>(
        &self,
        ops: &mut O,
        heads: Heads,
        query: &V,
        gates: &V,
        past: &[V; 2],
        new: [V; 2],
    ) -> Result<(V, [V; 2])> {
        let Heads { num_heads, kv_num_heads, head_dim } = heads;
        let scale = (head_dim as f32).powf(-0.5);
        let ([past_k, past_v], [k, v]) = (past, &new);
        match self {
            Sequences::Masked(bias) => {
                let append = |ops: &mut O, past: &V, new: &V| {
                    let new = ops.transpose(new, &[0, 2, 1, 3])?;
                    ops.concat(&[past, &new], 2)
                };
                let (k, v) = (append(ops, past_k, k)?, append(ops, past_v, v)?);
                let attributes = routed_attention::Attributes { num_heads, kv_num_heads, scale, is_causal: true };
                let inputs = routed_attention::Inputs {
                    query: Argument::Value(query),
                    key: Argument::Value(&k),
                    value: Argument::Value(&v),
                    head_gates: Argument::Value(gates),
                    attn_bias: Some(Argument::Value(bias)),
                };
                let x = ops.operator::<RoutedAttention>(attributes, &inputs)?;
                Ok((x, [k, v]))
            }
            Sequences::Spans { mask, first, start } => {
                let update = |ops: &mut O, past: &V, new: &V| {
                    let new = ops.reshape(new, &[0, 0, (kv_num_heads * head_dim) as i64])?;
                    let inputs = cache_update::Inputs {
                        past: Argument::Value(past),
                        update: Argument::Value(&new),
                        attention_mask: Argument::Value(mask),
                        start: Argument::Value(start),
                    };
                    ops.operator::<CacheUpdate>(cache_update::Attributes {}, &inputs)
                };
                let (k, v) = (update(ops, past_k, k)?, update(ops, past_v, v)?);
                let attributes = routed_cached_attention::Attributes { num_heads, kv_num_heads, scale };
                let inputs = routed_cached_attention::Inputs {
                    query: Argument::Value(query),
                    key: Argument::Value(&k),
                    value: Argument::Value(&v),
                    head_gates: Argument::Value(gates),
                    first: Argument::Value(first),
                    start: Argument::Value(start),
                };
                let x = ops.operator::<RoutedCachedAttention>(attributes, &inputs)?;
                Ok((x, [k, v]))
            }
        }
    }
}

/// 0 where the mask is not 0, else -inf: (batch, 1, 1, past + sequence).
fn padding_bias<O: Ops>(ops: &mut O, mask: &O::Value) -> Result<O::Value> {
    let zero = ops.scalar(Type::I64, 0.0)?;
    let padding = ops.binary(Binary::Equal, mask, &zero)?;
    let (masked, open) = (ops.scalar(Type::Model, f32::NEG_INFINITY)?, ops.scalar(Type::Model, 0.0)?);
    let bias = ops.select(&padding, &masked, &open)?;
    ops.reshape(&bias, &[0, 1, 1, -1])
}

/// Where each sequence begins, and where its new tokens go: they end with the row's last 1 where its zeros are all on the left, and
/// where the first of them would come before its first 1, as in a prompt that is padded on the left. In any other row they go where
/// their positions say, counted from its first 1.
fn spans<O: Ops>(ops: &mut O, mask: O::Value, position_ids: &O::Value) -> Result<Sequences<O::Value>> {
    // Of (batch, n): how many are equal, (batch, 1).
    let count = |ops: &mut O, a: &O::Value, b: &O::Value| {
        let equal = ops.binary(Binary::Equal, a, b)?;
        let equal = ops.cast(&equal, Type::I64)?;
        ops.reduce(Reduce::Sum, &equal, &[1])
    };
    let zero = ops.scalar(Type::I64, 0.0)?;
    let padding = count(ops, &mask, &zero)?;
    let ones_so_far = ops.cumulative_sum(&mask, 1)?;
    let first = count(ops, &ones_so_far, &zero)?;
    let (total, q_len) = (count(ops, &mask, &mask)?, count(ops, position_ids, position_ids)?);
    let zeros_after = ops.binary(Binary::Sub, &padding, &first)?;
    let end = ops.binary(Binary::Sub, &total, &zeros_after)?;
    let to_the_end = ops.binary(Binary::Sub, &end, &q_len)?;
    let position = ops.slice(position_ids, 1, 0, 1)?;
    let by_position = ops.add(&first, &position)?;
    // A prompt that is padded on the left begins in the cache, and before its first 1.
    let one = ops.scalar(Type::I64, 1.0)?;
    let second = ops.add(&to_the_end, &one)?;
    let later = ops.binary(Binary::Max, &second, &first)?;
    let is_before = ops.binary(Binary::Equal, &later, &first)?;
    let start = ops.select(&is_before, &to_the_end, &by_position)?;
    let inside = ops.binary(Binary::Max, &to_the_end, &zero)?;
    let is_inside = ops.binary(Binary::Equal, &inside, &to_the_end)?;
    let start = ops.select(&is_inside, &start, &by_position)?;
    let padded_left = ops.binary(Binary::Equal, &first, &padding)?;
    let start = ops.select(&padded_left, &to_the_end, &start)?;
    let (first, start) = (ops.reshape(&first, &[-1])?, ops.reshape(&start, &[-1])?);
    Ok(Sequences::Spans { mask, first, start })
}
