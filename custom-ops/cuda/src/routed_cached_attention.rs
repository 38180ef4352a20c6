//! RoutedCachedAttention on CUDA: the kernels of RoutedAttention, which read each sequence's keys where the GPU says.

use crate::call::{Call, CudaOperator};
use crate::params::AttentionParams;
use crate::routed_attention::{Attention, Tensors, params};
use moh_operators::routed_cached_attention::Inputs;
use moh_operators::{Definition, Error, RoutedCachedAttention, routed_attention};

impl CudaOperator for RoutedCachedAttention {
    unsafe fn launch(call: &Call<'_, Self>) -> Result<(), Error> {
        let p = &call.problem;
        let Inputs { query, key, value, head_gates, first, start } = call.inputs;
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
            is_causal: false,
            bias_strides: None,
        };
        let tensors = Tensors { query, key, value, gates: head_gates, output: call.output };
        let attention = Attention {
            operator: Self::NAME,
            dtype: call.dtype,
            stream: call.stream,
            workspace: call.workspace,
            problem,
            params: AttentionParams { first, start, ..params(&problem, &tensors)? },
        };
        // SAFETY: the call's tensors.
        unsafe { attention.launch() }
    }
}
