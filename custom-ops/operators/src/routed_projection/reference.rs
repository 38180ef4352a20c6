//! RoutedProjection in f64, following its documentation step by step.

use super::Problem;
use crate::tensor::Tensor;

/// The output; `weight` gives the weight of a head, of an output within it and of an input.
pub(crate) fn reference(
    p: &Problem,
    x: &Tensor<'_>,
    gates: &Tensor<'_>,
    bias: Option<&Tensor<'_>>,
    weight: impl Fn(usize, usize, usize) -> f64,
) -> Vec<f64> {
    let mut output = Vec::with_capacity(p.tokens * p.num_heads * p.block);
    for t in 0..p.tokens {
        for h in 0..p.num_heads {
            let on = gates.data.at(t * p.num_heads + h) != 0.0;
            output.extend((0..p.block).map(|d| {
                if !on {
                    return 0.0;
                }
                let sum: f64 = (0..p.width).map(|c| x.data.at(t * p.width + c) * weight(h, d, c)).sum();
                sum + bias.map_or(0.0, |bias| bias.data.at(h * p.block + d))
            }));
        }
    }
    output
}
