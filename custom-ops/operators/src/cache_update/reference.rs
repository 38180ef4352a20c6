//! CacheUpdate in f64, following its documentation step by step.

use super::{Inputs, Problem};
use crate::inputs::List;
use crate::tensor::Tensor;

pub(super) fn reference(p: &Problem, inputs: &Inputs<List<'_, Tensor<'_>>>) -> Vec<f64> {
    let Inputs { past, update, start, .. } = *inputs;
    let mut present = Vec::with_capacity(p.batch * p.kv_num_heads * p.length * p.dim);
    for b in 0..p.batch {
        let start = p.position(start.data.at(b) as i64);
        for h in 0..p.kv_num_heads {
            for t in 0..p.length {
                for d in 0..p.dim {
                    present.push(if (start..start + p.q_len).contains(&t) {
                        update.data.at(((b * p.q_len + t - start) * p.kv_num_heads + h) * p.dim + d)
                    } else if t < p.capacity {
                        past.data.at(((b * p.kv_num_heads + h) * p.capacity + t) * p.dim + d)
                    } else {
                        0.0
                    });
                }
            }
        }
    }
    present
}
