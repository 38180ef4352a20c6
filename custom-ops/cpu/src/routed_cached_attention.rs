//! RoutedCachedAttention on a CPU: RoutedAttention's kernels, on the part of the cache that each sequence sees.

use crate::isa::{Isa, MatrixUnit};
use crate::kernel::{Call, CpuOperator, Work};
use crate::routed_attention::{Span, Tensors, attend};
use moh_operators::routed_cached_attention::Inputs;
use moh_operators::{Element, Error, RoutedCachedAttention, routed_attention};

impl CpuOperator for RoutedCachedAttention {
    type Output<T: Element> = T;

    fn uses(_unit: MatrixUnit) -> bool {
        true
    }

    fn run<I: Isa, T: Element>(call: Call<'_, Self, I, T>) -> Result<Work, Error> {
        let Call { isa, unit, problem: p, inputs, output, host } = call;
        // An empty output allows dimensions of any size; otherwise memory bounds them.
        if output.is_empty() {
            return Ok(Work::default());
        }
        let Inputs { query, key, value, head_gates: gates, first, start } = inputs;
        let spans: Vec<Span> =
            first.iter().zip(start).map(|(&first, &start)| Span::in_cache(p.capacity, first, start)).collect();
        let problem = routed_attention::Problem {
            batch: p.batch,
            q_len: p.q_len,
            kv_len: p.capacity,
            num_heads: p.num_heads,
            kv_num_heads: p.kv_num_heads,
            head_dim: p.head_dim,
            value_dim: p.value_dim,
            cache_layout: true,
            scale: p.scale,
            is_causal: true,
            bias_strides: None,
        };
        attend(isa, unit, &problem, Tensors { query, key, value, gates, bias: None, spans: &spans }, output, host)
    }
}
