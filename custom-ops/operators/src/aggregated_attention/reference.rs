//! RoutedAggregatedAttention in f64, following its documentation step by step.

use super::{Inputs, Problem};
use crate::inputs::List;
use crate::tensor::Tensor;

pub(super) fn reference(p: &Problem, inputs: &Inputs<List<'_, Tensor<'_>>>) -> Vec<f64> {
    let Inputs { query, key, value, pooled_key, pooled_value, head_gates, query_embedding, query_scale, .. } = inputs;
    let Inputs { local_bias, pooled_bias, learnable_tokens, learnable_bias, .. } = inputs;
    let (tokens, cells, dim) = (p.tokens(), p.cells(), p.head_dim);
    let mut output = Vec::with_capacity(p.batch * tokens * p.num_heads * dim);
    for block in 0..p.batch * tokens * p.num_heads {
        let (b, n, h) = (block / p.num_heads / tokens, block / p.num_heads % tokens, block % p.num_heads);
        let gate = head_gates.data.at(block);
        if gate == 0.0 {
            output.extend(std::iter::repeat_n(0.0, dim));
            continue;
        }
        let row = |x: &Tensor<'_>, len: usize, token: usize| -> Vec<f64> {
            (0..dim).map(|d| x.data.at(((b * len + token) * p.num_heads + h) * dim + d)).collect()
        };
        let qn = unit(row(query, tokens, n));
        let scale = query_scale.data.at(n * p.num_heads + h);
        let qs: Vec<f64> = (0..dim).map(|d| (qn[d] + query_embedding.data.at(h * dim + d)) * scale).collect();

        let window: Vec<(usize, usize)> = (0..cells).filter_map(|cell| Some((cell, p.neighbour(n, cell)?))).collect();
        let local = window
            .iter()
            .map(|&(cell, token)| dot(&qs, &unit(row(key, tokens, token))) + local_bias.data.at(h * cells + cell));
        let pooled = (0..p.pooled).map(|m| {
            dot(&qs, &unit(row(pooled_key, p.pooled, m))) + pooled_bias.data.at((h * tokens + n) * p.pooled + m)
        });
        let scores: Vec<f64> = local.chain(pooled).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let sum: f64 = weights.iter().sum();

        let mut head = vec![0.0; dim];
        let mut add = |weight: f64, value: Vec<f64>| head.iter_mut().zip(value).for_each(|(x, v)| *x += weight * v);
        for (&(cell, token), weight) in window.iter().zip(&weights) {
            let learnt: Vec<f64> = (0..dim).map(|d| learnable_tokens.data.at((h * dim + d) * cells + cell)).collect();
            let weight = weight / sum + dot(&qn, &learnt) + learnable_bias.data.at(h * cells + cell);
            add(weight, row(value, tokens, token));
        }
        for (m, weight) in weights[window.len()..].iter().enumerate() {
            add(weight / sum, row(pooled_value, p.pooled, m));
        }
        output.extend(head.iter().map(|x| gate * x));
    }
    output
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `z / max(|z|, 1e-12)`.
fn unit(z: Vec<f64>) -> Vec<f64> {
    let norm = dot(&z, &z).sqrt();
    // Not `f64::max`, which would drop a NaN.
    let norm = if norm < 1e-12 { 1e-12 } else { norm };
    z.iter().map(|z| z / norm).collect()
}
