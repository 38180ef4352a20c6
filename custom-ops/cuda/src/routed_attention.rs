//! RoutedAttention on CUDA: chooses the kernel and its parameters.

mod decode;
mod hopper;
mod mma;
mod simt;

use crate::call::{Call, CudaOperator};
use crate::driver::RawPtr;
use crate::params::{AttentionParams, TileParams};
use crate::plan::int;
use crate::stream::Stream;
use crate::workspace::Workspace;
use moh_operators::routed_attention::{Inputs, Problem};
use moh_operators::{DType, Definition, Error, RoutedAttention};

/// A call of RoutedAttention or RoutedCachedAttention, converted to kernel parameters.
pub(crate) struct Attention<'c> {
    pub(crate) operator: &'static str,
    pub(crate) dtype: DType,
    pub(crate) stream: &'c Stream<'c>,
    pub(crate) workspace: &'c dyn Workspace,
    /// The sizes. Of a cache, `kv_len` is the capacity, and causality is not among them: `first` and `start` of the
    /// parameters say which keys a token sees.
    pub(crate) problem: Problem,
    /// All parameters except the plan.
    pub(crate) params: AttentionParams,
}

impl CudaOperator for RoutedAttention {
    unsafe fn launch(call: &Call<'_, Self>) -> Result<(), Error> {
        let Inputs { query, key, value, head_gates, attn_bias } = call.inputs;
        let tensors = Tensors { query, key, value, gates: head_gates, output: call.output };
        let strides = call.problem.bias_strides.unwrap_or_default().map(|stride| stride as i64);
        let attention = Attention {
            operator: Self::NAME,
            dtype: call.dtype,
            stream: call.stream,
            workspace: call.workspace,
            problem: call.problem,
            params: AttentionParams {
                bias: attn_bias.unwrap_or(0),
                bias_strides: strides,
                ..params(&call.problem, &tensors)?
            },
        };
        // SAFETY: the caller's contract.
        unsafe { attention.launch() }
    }
}

impl Attention<'_> {
    /// Launches the kernels on the stream.
    ///
    /// # Safety
    /// As [`CudaOperator::launch`]; the parameters are those of the problem.
    pub(crate) unsafe fn launch(&self) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        unsafe {
            if self.is_decoding() {
                decode::launch(self)
            } else if self.fits_mma() && self.fits_hopper() {
                hopper::launch(self)
            } else if self.fits_mma() {
                mma::launch(self)
            } else {
                simt::launch(self)
            }
        }
    }

    /// Whether keys and values are a cache, of which each row of the batch has its own part.
    fn is_cached(&self) -> bool {
        self.params.first != 0
    }

    /// Whether the mma.sync kernels support this call: 16-bit types, and all widths and strides multiples of 16 bytes.
    fn fits_mma(&self) -> bool {
        let Problem { head_dim, value_dim, .. } = self.problem;
        let pointers = [self.params.query, self.params.key, self.params.value, self.params.output];
        self.dtype != DType::F32
            && self.stream.properties().capability >= (8, 0)
            && head_dim.max(value_dim) <= mma::MAX_WIDTH
            && head_dim.is_multiple_of(8)
            && value_dim.is_multiple_of(8)
            && pointers.iter().all(|pointer| pointer % 16 == 0)
    }

    /// The element type's suffix in kernel names.
    fn type_name(&self) -> &'static str {
        match self.dtype {
            DType::F32 => "f32",
            DType::F16 => "f16",
            _ => "bf16",
        }
    }
}

/// The tensors of an attention.
pub(crate) struct Tensors {
    pub(crate) query: RawPtr,
    pub(crate) key: RawPtr,
    pub(crate) value: RawPtr,
    pub(crate) gates: RawPtr,
    pub(crate) output: RawPtr,
}

/// The parameters without a bias.
pub(crate) fn params(p: &Problem, tensors: &Tensors) -> Result<AttentionParams, Error> {
    let &Tensors { query, key, value, gates, output } = tensors;
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
        gates,
        bias: none,
        output,
        tiles: TileParams::NONE,
        partial: none,
        partial_weight: none,
        first: none,
        start: none,
        key_strides: strides(p.head_dim),
        value_strides: strides(p.value_dim),
        bias_strides: [0; 4],
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
