//! RoutedAttention in f64, following its documentation step by step.

use super::{Inputs, Problem};
use crate::inputs::List;
use crate::tensor::Tensor;

pub(super) fn reference(p: &Problem, inputs: &Inputs<List<'_, Tensor<'_>>>) -> Vec<f64> {
    let Inputs { query, key, value, head_gates, attn_bias } = *inputs;
    let (query, key, value, gates) = (query.data, key.data, value.data, head_gates.data);
    let mut output = Vec::with_capacity(p.batch * p.q_len * p.num_heads * p.value_dim);
    for b in 0..p.batch {
        for i in 0..p.q_len {
            for h in 0..p.num_heads {
                let gate = gates.at((b * p.q_len + i) * p.num_heads + h);
                if gate == 0.0 {
                    output.extend(std::iter::repeat_n(0.0, p.value_dim));
                    continue;
                }
                let kv_head = h / p.group_size();
                let q = ((b * p.q_len + i) * p.num_heads + h) * p.head_dim;
                let score = |j: usize| {
                    let k = p.kv_offset(b, kv_head, j, p.head_dim);
                    let dot: f64 = (0..p.head_dim).map(|d| query.at(q + d) * key.at(k + d)).sum();
                    let bias = match (p.bias_strides, attn_bias) {
                        (Some([sb, sh, si, sj]), Some(bias)) => bias.data.at(b * sb + h * sh + i * si + j * sj),
                        _ => 0.0,
                    };
                    f64::from(p.scale) * dot + bias
                };
                let scores: Vec<f64> = (0..p.visible_keys(i)).map(score).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                // All keys are masked: the output row is 0 by definition.
                if max == f64::NEG_INFINITY && !scores.iter().any(|s| s.is_nan()) {
                    output.extend(std::iter::repeat_n(0.0, p.value_dim));
                    continue;
                }
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for d in 0..p.value_dim {
                    let v = |j: usize| value.at(p.kv_offset(b, kv_head, j, p.value_dim) + d);
                    let mean: f64 = weights.iter().enumerate().map(|(j, w)| w * v(j)).sum::<f64>() / sum;
                    output.push(gate * mean);
                }
            }
        }
    }
    output
}
