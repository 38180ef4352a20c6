//! TopKRouter in f64, following its documentation step by step.

use super::{Inputs, Kind, Problem};
use crate::inputs::List;
use crate::tensor::Tensor;

pub(super) fn reference(p: &Problem, inputs: &Inputs<List<'_, Tensor<'_>>>) -> Vec<f64> {
    let scores = inputs.scores;
    let row = |token: usize| -> Vec<f64> { (0..p.width).map(|i| scores.data.at(token * p.width + i)).collect() };
    (0..p.tokens).flat_map(|token| gates(p, &row(token))).collect()
}

/// The gates of one token.
fn gates(p: &Problem, row: &[f64]) -> Vec<f64> {
    let heads = &p.heads;
    let (num_shared, top_k) = (heads.shared.len() as f64, heads.top_k as f64);
    let scores: Vec<f64> = match heads.kind {
        Kind::QueryNorms => {
            let norm = |&head: &usize| row[head * p.head_dim()..][..p.head_dim()].iter().map(|x| x * x).sum();
            heads.routed.iter().map(norm).collect()
        }
        _ => row[heads.routed_columns()].to_vec(),
    };
    let selected = select(&scores, heads.top_k);
    let of_selected = || softmax(&selected.iter().map(|&i| scores[i]).collect::<Vec<_>>());
    let weights: Vec<f64> = match heads.kind {
        Kind::TwoStage => of_selected().iter().map(|x| top_k * x).collect(),
        Kind::Renormalized => of_selected(),
        Kind::Probabilities => {
            let all = softmax(&scores);
            selected.iter().map(|&i| all[i]).collect()
        }
        Kind::QueryNorms => vec![1.0; heads.top_k],
    };
    let shared: Vec<f64> = match (heads.kind, heads.shared_columns()) {
        (Kind::TwoStage, columns) if !columns.is_empty() => {
            softmax(&row[columns]).iter().map(|x| num_shared * x).collect()
        }
        _ => vec![1.0; heads.shared.len()],
    };
    let balance = match heads.balance_columns() {
        columns if columns.is_empty() => vec![0.5, 0.5],
        columns => softmax(&row[columns]),
    };
    let mut gates = vec![0.0; heads.count()];
    for (&head, gate) in heads.shared.iter().zip(shared) {
        gates[head] = 2.0 * balance[0] * gate;
    }
    for (&i, gate) in selected.iter().zip(weights) {
        gates[heads.routed[i]] = 2.0 * balance[1] * gate;
    }
    gates
}

/// Indices of the `k` largest scores, in any order. Ties go to the lower index; NaN counts as -inf.
fn select(scores: &[f64], k: usize) -> Vec<usize> {
    let key = |i: usize| if scores[i].is_nan() { f64::NEG_INFINITY } else { scores[i] };
    let mut order: Vec<usize> = (0..scores.len()).collect();
    // `sort_by` is stable, so ties keep the lower index.
    order.sort_by(|&a, &b| key(b).partial_cmp(&key(a)).unwrap_or(std::cmp::Ordering::Equal));
    order.truncate(k);
    order
}

fn softmax(scores: &[f64]) -> Vec<f64> {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exp: Vec<f64> = scores.iter().map(|x| (x - max).exp()).collect();
    let sum: f64 = exp.iter().sum();
    exp.iter().map(|x| x / sum).collect()
}
