//! RoutedCachedAttention in f64, following its documentation step by step.

use super::{Inputs, Problem};
use crate::inputs::List;
use crate::tensor::Tensor;

pub(super) fn reference(p: &Problem, inputs: &Inputs<List<'_, Tensor<'_>>>) -> Vec<f64> {
    let Inputs { query, key, value, head_gates, first, start } = *inputs;
    let (query, key, value, gates) = (query.data, key.data, value.data, head_gates.data);
    let mut output = Vec::with_capacity(p.batch * p.q_len * p.num_heads * p.value_dim);
    for b in 0..p.batch {
        for i in 0..p.q_len {
            let seen = p.visible_keys(first.data.at(b) as i64, start.data.at(b) as i64, i);
            for h in 0..p.num_heads {
                let gate = gates.at((b * p.q_len + i) * p.num_heads + h);
                if gate == 0.0 || seen.is_empty() {
                    output.extend(std::iter::repeat_n(0.0, p.value_dim));
                    continue;
                }
                let kv_head = b * p.kv_num_heads + h / (p.num_heads / p.kv_num_heads);
                let q = ((b * p.q_len + i) * p.num_heads + h) * p.head_dim;
                let score = |j: usize| {
                    let k = (kv_head * p.capacity + j) * p.head_dim;
                    f64::from(p.scale) * (0..p.head_dim).map(|d| query.at(q + d) * key.at(k + d)).sum::<f64>()
                };
                let scores: Vec<f64> = seen.clone().map(score).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for d in 0..p.value_dim {
                    let v = |j: usize| value.at((kv_head * p.capacity + j) * p.value_dim + d);
                    let mean = weights.iter().zip(seen.clone()).map(|(w, j)| w * v(j)).sum::<f64>() / sum;
                    output.push(gate * mean);
                }
            }
        }
    }
    output
}
