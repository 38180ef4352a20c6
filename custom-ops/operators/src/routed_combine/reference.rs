//! RoutedCombine in f64, following its documentation step by step.

use super::Problem;
use crate::tensor::Tensor;

/// The output; `weight` gives the weight of a head, of an input within it and of an output.
pub(crate) fn reference(
    p: &Problem,
    x: &Tensor<'_>,
    gates: &Tensor<'_>,
    bias: Option<&Tensor<'_>>,
    weight: impl Fn(usize, usize, usize) -> f64,
) -> Vec<f64> {
    let mut output = Vec::with_capacity(p.tokens * p.width);
    for t in 0..p.tokens {
        for c in 0..p.width {
            let mut sum = bias.map_or(0.0, |bias| bias.data.at(c));
            for h in (0..p.num_heads).filter(|h| gates.data.at(t * p.num_heads + h) != 0.0) {
                for d in 0..p.block {
                    sum += x.data.at((t * p.num_heads + h) * p.block + d) * weight(h, d, c);
                }
            }
            output.push(sum);
        }
    }
    output
}
