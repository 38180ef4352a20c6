//! Routers in tensor algebra.

use super::{Eager, GAPS};
use crate::error::Error;
use crate::heads::{HeadCounts, HeadSet};
use crate::ops::{Binary, Gating, Ops, Reduce, Result, Type};
use crate::router::Parts;
use candle_core::{D, DType, Tensor};

/// See [`Ops::route`].
pub(super) fn route(ops: &mut Eager, scores: &Tensor, gating: Gating, heads: &HeadSet) -> Result<Tensor> {
    let scores = ops.cast(scores, Type::F32)?;
    match gating {
        Gating::TwoStage => two_stage(ops, &scores, heads),
        Gating::Probabilities => experts(ops, &scores, heads.counts(), false),
        Gating::Renormalized => experts(ops, &scores, heads.counts(), true),
        Gating::QueryNorms => query_norms(ops, &scores, heads),
    }
}

fn two_stage(ops: &mut Eager, logits: &Tensor, heads: &HeadSet) -> Result<Tensor> {
    let counts = heads.counts();
    let parts = Parts::of(counts);
    let part = |ops: &mut Eager, start: usize, width: usize| match width {
        0 => Ok(None),
        _ => ops.slice(logits, -1, start, start + width).map(Some),
    };
    let routed = part(ops, 0, parts.routed)?;
    let balance = part(ops, parts.routed, parts.balance)?;
    let shared = part(ops, parts.routed + parts.balance, parts.shared)?;
    let shared = shared.map(|logits| ops.softmax(&logits)).transpose()?;
    let routed = match routed {
        Some(logits) if counts.top_k < counts.num_routed_heads() => Some(ops.softmax_top_k(&logits, counts.top_k)?),
        Some(logits) => Some(ops.softmax(&logits)?),
        None => None,
    };
    // Each part sums to its number of active heads; two parts are weighed by twice their share of the balance.
    let (of_shared, of_routed) = (counts.num_shared_heads as f64, counts.top_k as f64);
    let Some(balance) = balance else {
        let scaled = |gates: Option<Tensor>, factor: f64| gates.map(|gates| gates * factor).transpose();
        return place(ops, heads, scaled(shared, of_shared)?, scaled(routed, of_routed)?);
    };
    let weights = ops.softmax(&balance)?;
    let of_shared = (weights.narrow(D::Minus1, 0, 1)? * (2.0 * of_shared))?;
    let of_routed = (weights.narrow(D::Minus1, 1, 1)? * (2.0 * of_routed))?;
    let shared = match shared {
        Some(shared) => ops.mul(&shared, &of_shared)?,
        // A single shared head takes all of its part.
        None => of_shared,
    };
    let routed = routed.map(|routed| ops.mul(&routed, &of_routed)).transpose()?;
    place(ops, heads, Some(shared), routed)
}

fn experts(ops: &mut Eager, logits: &Tensor, counts: HeadCounts, renormalize: bool) -> Result<Tensor> {
    let mut gates = ops.softmax(logits)?;
    if counts.top_k < counts.num_heads {
        let mask = ops.top_k_mask(&gates, counts.top_k)?;
        gates = ops.mul(&gates, &mask)?;
    }
    if renormalize {
        let sum = ops.reduce(Reduce::Sum, &gates, &[-1])?;
        gates = ops.binary(Binary::Div, &gates, &sum)?;
    }
    Ok(gates)
}

fn query_norms(ops: &mut Eager, query: &Tensor, heads: &HeadSet) -> Result<Tensor> {
    let HeadCounts { num_heads, num_shared_heads: shared, top_k } = heads.counts();
    let routed = match heads.counts().num_routed_heads() {
        0 => None,
        rest if top_k == 0 || top_k == rest => {
            Some(ops.filled(Type::F32, query, rest, if top_k == 0 { 0.0 } else { 1.0 })?)
        }
        _ => {
            let query = ops.reshape(query, &[0, 0, num_heads as i64, -1])?;
            let norms = ops.reduce(Reduce::Sum, &query.sqr()?, &[-1])?;
            let norms = ops.reshape(&norms, &[0, 0, -1])?;
            let routed: Vec<u32> = heads.routed().iter().map(|&head| head as u32).collect();
            let norms = norms.index_select(&Tensor::new(routed, norms.device())?, 2)?;
            Some(ops.top_k_mask(&norms, top_k)?)
        }
    };
    let ones = match shared {
        0 => None,
        _ => Some(ops.filled(Type::F32, query, shared, 1.0)?),
    };
    place(ops, heads, ones, routed)
}

/// Gates in the order of the heads, from those of the shared and of the routed heads in ascending order.
fn place(ops: &mut Eager, heads: &HeadSet, shared: Option<Tensor>, routed: Option<Tensor>) -> Result<Tensor> {
    let parts: Vec<&Tensor> = [&shared, &routed].into_iter().flatten().collect();
    let joined = ops.concat(&parts, -1)?;
    let order: Vec<usize> = heads.shared().iter().copied().chain(heads.routed()).collect();
    let mut place = vec![0u32; order.len()];
    for (i, &head) in order.iter().enumerate() {
        place[head] = i as u32;
    }
    if joined.dim(D::Minus1)? != place.len() {
        return Err(Error::Internal("gates of another number than heads"));
    }
    Ok(joined.index_select(&Tensor::new(place, joined.device())?, 2)?)
}

impl Eager {
    /// 1 at the `k` largest of the last axis (the lowest index first among equals), 0 elsewhere; exactly `k` ones.
    fn top_k_mask(&mut self, x: &Tensor, k: usize) -> Result<Tensor> {
        let width = x.dim(D::Minus1)?;
        let values = x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let mut mask = vec![0f32; values.len()];
        let mut gaps = Vec::with_capacity(values.len() / width.max(1));
        for (row, mask) in values.chunks(width).zip(mask.chunks_mut(width)) {
            let mut order: Vec<usize> = (0..width).collect();
            order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
            for &i in order.iter().take(k) {
                mask[i] = 1.0;
            }
            let (last, first) = (order.get(k.wrapping_sub(1)), order.get(k));
            gaps.push(match (last, first) {
                (Some(&last), Some(&first)) => (row[last] - row[first]) / row[last].abs().max(f32::MIN_POSITIVE),
                _ => f32::INFINITY,
            });
        }
        let gaps = Tensor::from_vec(gaps, &x.dims()[..x.rank() - 1], x.device())?;
        self.keep(format!("{GAPS}{}", self.path()), &gaps);
        Ok(Tensor::from_vec(mask, x.shape(), x.device())?.to_dtype(x.dtype())?)
    }

    /// The softmax over the `k` largest of the last axis, those that `top_k_mask` takes; 0 elsewhere.
    fn softmax_top_k(&mut self, x: &Tensor, k: usize) -> Result<Tensor> {
        let exp = x.broadcast_sub(&x.max_keepdim(D::Minus1)?)?.exp()?;
        let kept = (&exp * self.top_k_mask(&exp, k)?)?;
        Ok(kept.broadcast_div(&kept.sum_keepdim(D::Minus1)?)?)
    }
}
