//! RoutedAggregatedAttention, word by word.

use crate::schema::Attributes;
use crate::shape::aggregated_attention::Problem;
use crate::tensor::Tensor;

/// See [`crate::Operator::reference`].
pub(crate) fn reference(attributes: &Attributes, inputs: &[Option<Tensor<'_>>]) -> Vec<f64> {
    let shapes: Vec<Option<&[usize]>> = inputs.iter().map(|t| t.map(|t| t.shape)).collect();
    let data: Vec<_> = inputs.iter().flatten().map(|tensor| &tensor.data).collect();
    let (Ok(p), [query, key, value, pooled_key, pooled_value, gates, constants @ ..]) =
        (Problem::new(attributes, &shapes), data.as_slice())
    else {
        return Vec::new();
    };
    let [query_embedding, query_scale, local_bias, pooled_bias, learnable_tokens, learnable_bias] = constants else {
        return Vec::new();
    };
    let (tokens, cells, dim) = (p.tokens(), p.cells(), p.head_dim);
    let mut output = Vec::with_capacity(p.batch * tokens * p.num_heads * dim);
    for block in 0..p.batch * tokens * p.num_heads {
        let (b, n, h) = (block / p.num_heads / tokens, block / p.num_heads % tokens, block % p.num_heads);
        let gate = gates.at(block);
        if gate == 0.0 {
            output.extend(std::iter::repeat_n(0.0, dim));
            continue;
        }
        let row = |x: &crate::Data<'_>, len: usize, token: usize| -> Vec<f64> {
            (0..dim).map(|d| x.at(((b * len + token) * p.num_heads + h) * dim + d)).collect()
        };
        let qn = unit(row(query, tokens, n));
        let scale = query_scale.at(n * p.num_heads + h);
        let qs: Vec<f64> = (0..dim).map(|d| (qn[d] + query_embedding.at(h * dim + d)) * scale).collect();

        let window: Vec<(usize, usize)> = (0..cells).filter_map(|cell| Some((cell, p.neighbour(n, cell)?))).collect();
        let local = window
            .iter()
            .map(|&(cell, token)| dot(&qs, &unit(row(key, tokens, token))) + local_bias.at(h * cells + cell));
        let pooled = (0..p.pooled)
            .map(|m| dot(&qs, &unit(row(pooled_key, p.pooled, m))) + pooled_bias.at((h * tokens + n) * p.pooled + m));
        let scores: Vec<f64> = local.chain(pooled).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let sum: f64 = weights.iter().sum();

        let mut head = vec![0.0; dim];
        let mut add = |weight: f64, value: Vec<f64>| head.iter_mut().zip(value).for_each(|(x, v)| *x += weight * v);
        for (&(cell, token), weight) in window.iter().zip(&weights) {
            let learnt: Vec<f64> = (0..dim).map(|d| learnable_tokens.at((h * dim + d) * cells + cell)).collect();
            let weight = weight / sum + dot(&qn, &learnt) + learnable_bias.at(h * cells + cell);
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

/// The vector, of length 1; vectors near 0 stay short.
fn unit(z: Vec<f64>) -> Vec<f64> {
    let norm = dot(&z, &z).sqrt();
    // Not f64::max, which would hide a NaN.
    let norm = if norm < 1e-12 { 1e-12 } else { norm };
    z.iter().map(|z| z / norm).collect()
}
