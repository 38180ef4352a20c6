//! RoutedCombine in f64, following its documentation step by step.

use super::{Inputs, Problem};
use crate::inputs::List;
use crate::tensor::Tensor;

pub(super) fn reference(p: &Problem, inputs: &Inputs<List<'_, Tensor<'_>>>) -> Vec<f64> {
    let Inputs { x, weight, head_gates: gates, bias } = *inputs;
    let mut output = Vec::with_capacity(p.tokens * p.width);
    for t in 0..p.tokens {
        for c in 0..p.width {
            let mut sum = bias.map_or(0.0, |bias| bias.data.at(c));
            for h in (0..p.num_heads).filter(|h| gates.data.at(t * p.num_heads + h) != 0.0) {
                for d in 0..p.block {
                    let w = match p.per_head() {
                        true => weight.data.at((h * p.block + d) * p.width + c),
                        false => weight.data.at((c * p.num_heads + h) * p.block + d),
                    };
                    sum += x.data.at((t * p.num_heads + h) * p.block + d) * w;
                }
            }
            output.push(sum);
        }
    }
    output
}
