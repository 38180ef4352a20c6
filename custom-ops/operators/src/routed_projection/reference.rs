//! RoutedProjection in f64, following its documentation step by step.

use super::{Inputs, Problem};
use crate::inputs::List;
use crate::tensor::Tensor;

pub(super) fn reference(p: &Problem, inputs: &Inputs<List<'_, Tensor<'_>>>) -> Vec<f64> {
    let Inputs { x, weight, head_gates: gates, bias } = *inputs;
    let mut output = Vec::with_capacity(p.tokens * p.num_heads * p.block);
    for t in 0..p.tokens {
        for h in 0..p.num_heads {
            let on = gates.data.at(t * p.num_heads + h) != 0.0;
            output.extend((0..p.block).map(|d| {
                if !on {
                    return 0.0;
                }
                let w = |c: usize| match p.per_head() {
                    true => weight.data.at((h * p.width + c) * p.block + d),
                    false => weight.data.at((h * p.block + d) * p.width + c),
                };
                let sum: f64 = (0..p.width).map(|c| x.data.at(t * p.width + c) * w(c)).sum();
                sum + bias.map_or(0.0, |bias| bias.data.at(h * p.block + d))
            }));
        }
    }
    output
}
