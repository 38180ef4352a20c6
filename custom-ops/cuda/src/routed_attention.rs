//! RoutedAttention on CUDA: chooses the kernel and its parameters.

mod decode;
mod hopper;
mod mma;
mod simt;

use crate::call::{Call, CudaOperator};
use crate::driver::RawPtr;
use crate::params::{AttentionParams, TileParams};
use crate::plan::int;
use moh_operators::routed_attention::{Inputs, Problem};
use moh_operators::{DType, Error, RoutedAttention};

/// A call, converted to kernel parameters.
struct Attention<'a, 'c> {
    call: &'a Call<'c, RoutedAttention>,
    problem: Problem,
    /// All parameters except the plan.
    params: AttentionParams,
}

impl CudaOperator for RoutedAttention {
    unsafe fn launch(call: &Call<'_, Self>) -> Result<(), Error> {
        let attention = Attention { call, problem: call.problem, params: params(call)? };
        // SAFETY: the caller's contract.
        unsafe {
            if attention.is_decoding() {
                decode::launch(&attention)
            } else if attention.fits_mma() && attention.fits_hopper() {
                hopper::launch(&attention)
            } else if attention.fits_mma() {
                mma::launch(&attention)
            } else {
                simt::launch(&attention)
            }
        }
    }
}

impl Attention<'_, '_> {
    /// Whether the mma.sync kernels support this call: 16-bit types, and all widths and strides multiples of 16 bytes.
    fn fits_mma(&self) -> bool {
        let Problem { head_dim, value_dim, .. } = self.problem;
        let pointers = [self.params.query, self.params.key, self.params.value, self.params.output];
        self.call.dtype != DType::F32
            && self.call.stream.properties().capability >= (8, 0)
            && head_dim.max(value_dim) <= mma::MAX_WIDTH
            && head_dim.is_multiple_of(8)
            && value_dim.is_multiple_of(8)
            && pointers.iter().all(|pointer| pointer % 16 == 0)
    }

    /// The element type's suffix in kernel names.
    fn type_name(&self) -> &'static str {
        match self.call.dtype {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
        }
    }
}

fn params(call: &Call<'_, RoutedAttention>) -> Result<AttentionParams, Error> {
    let p = &call.problem;
    let Inputs { query, key, value, head_gates, attn_bias } = call.inputs;
    // Strides in elements along batch, head, token.
    let strides = |dim: usize| {
        let (heads, tokens) = (p.kv_num_heads, p.kv_len);
        let [batch, head, token] = match p.cache_layout {
            true => [heads * tokens * dim, tokens * dim, dim],
            false => [heads * tokens * dim, dim, heads * dim],
        };
        [batch as i64, head as i64, token as i64]
    };
    // Kernels use 32-bit token strides.
    int(strides(p.head_dim)[2].max(strides(p.value_dim)[2]) as usize)?;
    let none: RawPtr = 0;
    Ok(AttentionParams {
        query,
        key,
        value,
        gates: head_gates,
        bias: attn_bias.unwrap_or(none),
        output: call.output,
        tiles: TileParams::NONE,
        partial: none,
        partial_lse: none,
        key_strides: strides(p.head_dim),
        value_strides: strides(p.value_dim),
        bias_strides: p.bias_strides.unwrap_or_default().map(|stride| stride as i64),
        batch: int(p.batch)?,
        q_len: int(p.q_len)?,
        kv_len: int(p.kv_len)?,
        num_heads: int(p.num_heads)?,
        kv_num_heads: int(p.kv_num_heads)?,
        head_dim: int(p.head_dim)?,
        value_dim: int(p.value_dim)?,
        is_causal: i32::from(p.is_causal),
        splits: 1,
        keys_per_split: int(p.kv_len)?,
        stages: 0,
        scale: p.scale,
    })
}
