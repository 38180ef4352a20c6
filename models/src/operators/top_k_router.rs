//! TopKRouter in tensor algebra.

use super::{Computed, ModelOperator};
use crate::algebra::softmax;
use crate::error::{Error, Result};
use crate::heads::{HeadCounts, HeadSet, Parts};
use crate::macs::Macs;
use crate::routing::Choice;
use crate::shape::Shape;
use candle_core::{D, DType, Tensor};
use moh_operators::List;
use moh_operators::top_k_router::{Attributes, Inputs, Kind, TopKRouter};

/// Added to squared norms and to their variance, which have gradients where they are 0 only so. Norms that decide anything are larger by far.
const NORM_EPS: f64 = 1e-12;

impl ModelOperator for TopKRouter {
    fn compute(attributes: &Attributes, inputs: &Inputs<List<'_, &Tensor>>) -> Result<Computed> {
        let number = |n: i64| usize::try_from(n).map_err(|_| Error::Internal("a negative number of heads"));
        let shared = attributes.shared_heads.iter().map(|&head| number(head)).collect::<Result<_>>()?;
        let heads = HeadSet::new(attributes.num_heads, shared, number(attributes.top_k)?);
        let scores = inputs.scores.to_dtype(DType::F32)?;
        let mut margins = None;
        let output = match attributes.kind {
            Kind::TwoStage => two_stage(&scores, &heads, &mut margins)?,
            Kind::Probabilities => experts(&scores, heads.counts(), false, &mut margins)?,
            Kind::Renormalized => experts(&scores, heads.counts(), true, &mut margins)?,
            Kind::QueryNorms => query_norms(&scores, &heads, &mut margins)?,
        };
        let choice = choice(attributes.kind, &scores, &heads, &output)?;
        Ok(Computed { output, margins, choice })
    }

    /// A selection has no matrix products.
    fn macs(_: &Attributes, _: &Inputs<List<'_, &Shape>>) -> Macs {
        Macs::default()
    }
}

/// What the gates were selected from; `None` without a candidate.
fn choice(kind: Kind, scores: &Tensor, heads: &HeadSet, gates: &Tensor) -> Result<Option<Choice>> {
    let routed = heads.routed();
    if routed.is_empty() {
        return Ok(None);
    }
    let logits = match kind {
        Kind::TwoStage => scores.narrow(D::Minus1, 0, routed.len())?,
        Kind::Probabilities | Kind::Renormalized => scores.clone(),
        Kind::QueryNorms => {
            // n / std(n), from which the mean is taken away too: equal norms are equally likely, where the quotient is 0 / 0.
            let norms = (routed_norms(scores, heads)? + NORM_EPS)?.sqrt()?;
            let deviation = norms.broadcast_sub(&norms.mean_keepdim(D::Minus1)?)?;
            let variance = (deviation.sqr()?.sum_keepdim(D::Minus1)? / (routed.len() as f64 - 1.0).max(1.0))?;
            deviation.broadcast_div(&(variance + NORM_EPS)?.sqrt()?)?
        }
    };
    let routed = Tensor::from_iter(routed.into_iter().map(|head| head as u32), scores.device())?;
    let selected = gates.ne(0f32)?.to_dtype(DType::F32)?.index_select(&routed, 2)?;
    Ok(Some(Choice { kind, probabilities: softmax(&logits)?, logits, selected }))
}

fn two_stage(logits: &Tensor, heads: &HeadSet, margins: &mut Option<Tensor>) -> Result<Tensor> {
    let counts = heads.counts();
    let parts = Parts::of(counts);
    let part = |start: usize, width: usize| match width {
        0 => Ok(None),
        _ => logits.narrow(D::Minus1, start, width).map(Some),
    };
    let routed = part(0, parts.routed)?;
    let balance = part(parts.routed, parts.balance)?;
    let shared = part(parts.routed + parts.balance, parts.shared)?;
    let shared = shared.map(|logits| softmax(&logits)).transpose()?;
    let routed = match routed {
        Some(logits) if counts.top_k < counts.num_routed_heads() => {
            Some(softmax_top_k(&logits, counts.top_k, margins)?)
        }
        Some(logits) => Some(softmax(&logits)?),
        None => None,
    };
    // Each part sums to its number of active heads; two parts are weighed by twice their share of the balance.
    let (of_shared, of_routed) = (counts.num_shared_heads as f64, counts.top_k as f64);
    let Some(balance) = balance else {
        let scaled = |gates: Option<Tensor>, factor: f64| gates.map(|gates| gates * factor).transpose();
        return place(heads, scaled(shared, of_shared)?, scaled(routed, of_routed)?);
    };
    let weights = softmax(&balance)?;
    let of_shared = (weights.narrow(D::Minus1, 0, 1)? * (2.0 * of_shared))?;
    let of_routed = (weights.narrow(D::Minus1, 1, 1)? * (2.0 * of_routed))?;
    let shared = match shared {
        Some(shared) => shared.broadcast_mul(&of_shared)?,
        // A single shared head takes all of its part.
        None => of_shared,
    };
    let routed = routed.map(|routed| routed.broadcast_mul(&of_routed)).transpose()?;
    place(heads, Some(shared), routed)
}

fn experts(logits: &Tensor, counts: HeadCounts, renormalize: bool, margins: &mut Option<Tensor>) -> Result<Tensor> {
    let mut gates = softmax(logits)?;
    if counts.top_k < counts.num_heads {
        gates = (&gates * top_k_mask(&gates, counts.top_k, margins)?)?;
    }
    if renormalize {
        gates = gates.broadcast_div(&gates.sum_keepdim(D::Minus1)?)?;
    }
    Ok(gates)
}

fn query_norms(query: &Tensor, heads: &HeadSet, margins: &mut Option<Tensor>) -> Result<Tensor> {
    let HeadCounts { num_shared_heads: shared, top_k, .. } = heads.counts();
    let (batch, tokens, _) = query.dims3()?;
    let filled = |heads: usize, gate: f32| Tensor::full(gate, (batch, tokens, heads), query.device());
    let routed = match heads.counts().num_routed_heads() {
        0 => None,
        rest if top_k == 0 || top_k == rest => Some(filled(rest, if top_k == 0 { 0.0 } else { 1.0 })?),
        _ => Some(top_k_mask(&routed_norms(query, heads)?, top_k, margins)?),
    };
    let ones = match shared {
        0 => None,
        _ => Some(filled(shared, 1.0)?),
    };
    place(heads, ones, routed)
}

/// The squared norms of the routed heads' queries, (batch, q_len, routed).
fn routed_norms(query: &Tensor, heads: &HeadSet) -> Result<Tensor> {
    let (batch, tokens, _) = query.dims3()?;
    let query = query.contiguous()?.reshape((batch, tokens, heads.counts().num_heads, ()))?;
    let norms = query.sqr()?.sum(D::Minus1)?;
    let routed: Vec<u32> = heads.routed().iter().map(|&head| head as u32).collect();
    Ok(norms.index_select(&Tensor::new(routed, norms.device())?, 2)?)
}

/// Gates in the order of the heads, from those of the shared and of the routed heads in ascending order.
fn place(heads: &HeadSet, shared: Option<Tensor>, routed: Option<Tensor>) -> Result<Tensor> {
    let parts: Vec<Tensor> =
        [shared, routed].into_iter().flatten().map(|part| part.contiguous()).collect::<candle_core::Result<_>>()?;
    let joined = Tensor::cat(&parts, D::Minus1)?;
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

/// 1 at the `k` largest of the last axis (the lowest index first among equals), 0 elsewhere; exactly `k` ones.
fn top_k_mask(x: &Tensor, k: usize, margins: &mut Option<Tensor>) -> Result<Tensor> {
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
    *margins = Some(Tensor::from_vec(gaps, &x.dims()[..x.rank() - 1], x.device())?);
    Ok(Tensor::from_vec(mask, x.shape(), x.device())?.to_dtype(x.dtype())?)
}

/// The softmax over the `k` largest of the last axis, those that `top_k_mask` takes; 0 elsewhere.
fn softmax_top_k(x: &Tensor, k: usize, margins: &mut Option<Tensor>) -> Result<Tensor> {
    let exp = x.broadcast_sub(&x.max_keepdim(D::Minus1)?)?.exp()?;
    let kept = (&exp * top_k_mask(&exp, k, margins)?)?;
    Ok(kept.broadcast_div(&kept.sum_keepdim(D::Minus1)?)?)
}
