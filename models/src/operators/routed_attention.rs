//! RoutedAttention: every head's scores, softmax and values, and then the gates.

use super::{Computed, ModelOperator, Trained};
use crate::algebra::{select, softmax};
use crate::error::{Error, Result};
use crate::fused;
use crate::macs::Macs;
use crate::shape::Shape;
use candle_core::{CustomOp2 as _, D, DType, Tensor};
use moh_operators::List;
use moh_operators::routed_attention::{Attributes, Inputs, RoutedAttention};

impl ModelOperator for RoutedAttention {
    fn compute(attributes: &Attributes, inputs: &Inputs<List<'_, &Tensor>>) -> Result<Computed> {
        let Attributes { num_heads: heads, kv_num_heads, scale, is_causal } = *attributes;
        let Inputs { query, key, value, head_gates, attn_bias } = *inputs;
        attend((heads, kv_num_heads), scale, query, [key, value], head_gates, |mut scores| {
            let (q_len, kv_len) = (scores.dim(2)?, scores.dim(3)?);
            if let Some(bias) = attn_bias {
                scores = scores.broadcast_add(bias)?;
            }
            if is_causal {
                let hidden = |(i, j): (usize, usize)| if j + q_len <= i + kv_len { 0.0 } else { f32::NEG_INFINITY };
                let mask: Vec<f32> = (0..q_len).flat_map(|i| (0..kv_len).map(move |j| (i, j))).map(hidden).collect();
                scores = scores.broadcast_add(&Tensor::from_vec(mask, (q_len, kv_len), query.device())?)?;
            }
            Ok(scores)
        })
    }

    fn train(
        attributes: &Attributes,
        inputs: &Inputs<List<'_, &Tensor>>,
        wants: &dyn Fn(&Tensor) -> bool,
    ) -> Result<Option<Trained>> {
        let Attributes { num_heads: heads, kv_num_heads, scale, is_causal } = *attributes;
        let Inputs { query, key, value, head_gates, attn_bias } = *inputs;
        let (batch, q_len, _) = query.dims3()?;
        // The heads of a group, one below the other, share keys and values.
        let per_head = |x: &Tensor| -> Result<Tensor> {
            let x = match x.rank() {
                3 => x.reshape((batch, x.dim(1)?, kv_num_heads, ()))?.transpose(1, 2)?,
                _ => x.clone(),
            };
            Ok(x)
        };
        let (k, v) = (per_head(key)?, per_head(value)?);
        let kv_len = k.dim(2)?;
        let group = heads / kv_num_heads * q_len;
        let query_heads = query.reshape((batch, q_len, heads, ()))?.transpose(1, 2)?;
        let q = match heads == kv_num_heads {
            true => query_heads,
            false => fused::packed(&query_heads)?.reshape((batch, kv_num_heads, group, ()))?,
        };
        let scores = fused::product(&q, &k.t()?)?.reshape((batch, heads, q_len, kv_len))?;
        let softmax = fused::AttentionSoftmax::of(&scores, scale, is_causal)?;
        let weights = softmax.weights(&scores, attn_bias)?;
        let out = fused::product(&weights.reshape((batch, kv_num_heads, group, kv_len))?, &v)?;
        let out = out.reshape((batch, heads, q_len, ()))?;
        let gate = fused::GateHeads::of(&out)?;
        let gates = head_gates.contiguous()?;
        let y = out.apply_op2_no_bwd(&gates, &gate)?;

        let shapes = [query, key, value].map(|x| x.dims().to_vec());
        let (has_bias, bias) =
            (attn_bias.is_some(), attn_bias.filter(|bias| wants(bias)).map(|bias| bias.dims().to_vec()));
        let back = move |gradient: &Tensor| {
            let (of_out, of_gates) = gate.bwd(&out, &gates, &out, gradient)?;
            let of_out =
                of_out.ok_or(Error::Internal("no gradient of heads"))?.reshape((batch, kv_num_heads, group, ()))?;
            let grouped = weights.reshape((batch, kv_num_heads, group, kv_len))?;
            let of_weights = fused::product(&of_out, &v.t()?)?.reshape((batch, heads, q_len, kv_len))?;
            let (of_scores, of_bias) = softmax.gradients(&weights, &of_weights, bias.as_deref())?;
            let of_scores = of_scores.reshape((batch, kv_num_heads, group, kv_len))?;
            // In the layout of the input: tokens, or heads.
            let gradient = |a: &Tensor, b: &Tensor, shape: &[usize]| match shape.len() {
                3 => fused::product_of_heads(a, b)?.reshape(shape),
                _ => fused::product(a, b)?.reshape(shape),
            };
            let of_q = match heads == kv_num_heads {
                true => gradient(&of_scores, &k, &shapes[0])?,
                false => {
                    let of_q = fused::product(&of_scores, &k)?.reshape((batch, heads, q_len, ()))?.transpose(1, 2)?;
                    fused::packed(&of_q)?.reshape(shapes[0].as_slice())?
                }
            };
            let of_k = gradient(&of_scores.t()?, &q, &shapes[1])?;
            let of_v = gradient(&grouped.t()?, &of_out, &shapes[2])?;
            let mut all = vec![Some(of_q), Some(of_k), Some(of_v), of_gates];
            all.extend(has_bias.then_some(of_bias));
            Ok(all)
        };
        Ok(Some((y, Box::new(back))))
    }

    fn macs(attributes: &Attributes, inputs: &Inputs<List<'_, &Shape>>) -> Macs {
        let Attributes { num_heads, kv_num_heads, is_causal, .. } = *attributes;
        let (query, value) = (inputs.query.dims(), inputs.value.dims());
        let (kv_len, value_dim) = match *value {
            [_, kv_len, width] => (kv_len, width / kv_num_heads),
            [_, _, kv_len, dim] => (kv_len, dim),
            _ => (0, 0),
        };
        let (batch, q_len, head_dim) = (query[0], query[1], query[2] / num_heads);
        let seen = |i: usize| if is_causal { (i + 1 + kv_len).saturating_sub(q_len) } else { kv_len };
        let pairs = batch * (0..q_len).map(|i| seen(i).min(kv_len)).sum::<usize>();
        Macs::of_heads(pairs.saturating_mul((head_dim + value_dim) * num_heads), num_heads, inputs.head_gates)
    }
}

/// Attention with the scores (batch, heads, q_len, kv_len) that `mask` makes of the scaled ones, and the gates.
pub(super) fn attend(
    (heads, kv_num_heads): (usize, usize),
    scale: f32,
    query: &Tensor,
    [key, value]: [&Tensor; 2],
    head_gates: &Tensor,
    mask: impl FnOnce(Tensor) -> Result<Tensor>,
) -> Result<Computed> {
    let (batch, q_len, _) = query.dims3()?;
    let group = heads / kv_num_heads;
    let per_head = |x: &Tensor| -> Result<Tensor> {
        let x = match x.rank() {
            3 => x.reshape((batch, x.dim(1)?, kv_num_heads, ()))?.transpose(1, 2)?,
            _ => x.clone(),
        };
        let (_, kv_heads, kv_len, dim) = x.dims4()?;
        let x = x.unsqueeze(2)?.broadcast_as((batch, kv_heads, group, kv_len, dim))?;
        Ok(x.reshape((batch, heads, kv_len, dim))?.contiguous()?)
    };
    let q = query.reshape((batch, q_len, heads, ()))?.transpose(1, 2)?.contiguous()?;
    let (k, v) = (per_head(key)?, per_head(value)?);
    let scores = mask((q.matmul(&k.t()?)? * f64::from(scale))?)?;
    let max = scores.max_keepdim(D::Minus1)?;
    let dead = max.eq(&Tensor::full(f32::NEG_INFINITY, max.shape(), query.device())?)?;
    let zero = Tensor::zeros(&[1], DType::F32, query.device())?;
    // A row that sees nothing would be 0 / 0, and so would its gradients.
    let scores = select(&dead, &zero, &scores)?;
    let heads_out = softmax(&scores)?.matmul(&v)?;
    let gates = head_gates.transpose(1, 2)?.unsqueeze(D::Minus1)?;
    let off = (gates.eq(&gates.zeros_like()?)? + dead)?;
    let gated = heads_out.broadcast_mul(&gates)?;
    let routed = select(&off, &zero, &gated)?;
    Ok(routed.transpose(1, 2)?.reshape((batch, q_len, ()))?.into())
}
