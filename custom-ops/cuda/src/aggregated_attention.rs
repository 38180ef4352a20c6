//! RoutedAggregatedAttention on CUDA: `kernels/aggregated.cu`.

use crate::call::{Call, CudaOperator};
use crate::kernel::Kernel;
use crate::modules;
use crate::params::AggregatedParams;
use crate::plan::int;
use moh_operators::{DType, Definition, Error, RoutedAggregatedAttention};
use std::ffi::CString;

const THREADS: usize = 128;
/// Per kernel: maximum head width, lanes per query, and pooled tokens in shared memory.
const VARIANTS: [(usize, usize, usize); 5] = [(32, 4, 32), (64, 8, 32), (128, 16, 32), (256, 32, 32), (512, 32, 16)];
/// Blocks of a grid along y.
const MOST_HEADS: usize = 65_535;
/// Blocks per thread block that writes zeros: enough to hide memory latency.
const ZEROS: usize = 256;

impl CudaOperator for RoutedAggregatedAttention {
    unsafe fn launch(call: &Call<'_, Self>) -> Result<(), Error> {
        let (p, inputs) = (&call.problem, &call.inputs);
        let Some(&(width, lanes, keys)) = VARIANTS.iter().find(|(width, ..)| p.head_dim <= *width) else {
            return Err(Error::Shape {
                operator: Self::NAME,
                input: "query",
                expected: "heads of at most 512 elements on CUDA".to_owned(),
                found: p.head_dim.to_string(),
            });
        };
        if p.num_heads > MOST_HEADS {
            return Err(Error::Attribute {
                operator: Self::NAME,
                attribute: "num_heads",
                expected: format!("at most {MOST_HEADS} on CUDA"),
                found: p.num_heads.to_string(),
            });
        }
        let params = AggregatedParams {
            query: inputs.query,
            key: inputs.key,
            value: inputs.value,
            pooled_key: inputs.pooled_key,
            pooled_value: inputs.pooled_value,
            gates: inputs.head_gates,
            query_embedding: inputs.query_embedding,
            query_scale: inputs.query_scale,
            local_bias: inputs.local_bias,
            pooled_bias: inputs.pooled_bias,
            learnable_tokens: inputs.learnable_tokens,
            learnable_bias: inputs.learnable_bias,
            output: call.output,
            batch: int(p.batch)?,
            height: int(p.height)?,
            width: int(p.width)?,
            window: int(p.window)?,
            pooled: int(p.pooled)?,
            heads: int(p.num_heads)?,
            dim: int(p.head_dim)?,
        };
        let dtype = match call.dtype {
            DType::F32 => "float",
            DType::F16 => "f16",
            _ => "bf16",
        };
        let name = CString::new(format!("moh_aggregated_{dtype}_{width}")).unwrap_or_default();
        let kernel = Kernel { module: modules::AGGREGATED, name: &name };
        let queries = THREADS / lanes;
        let squares = p.height.div_ceil(4) * p.width.div_ceil(4);
        let blocks = (squares * 16).div_ceil(queries) + p.tokens().div_ceil(ZEROS);
        let shared = 2 * keys * width * 4 + THREADS / 32 * 4;
        // Not images along z, which has at most 65,535 blocks.
        let grid = [int(blocks * p.batch)?.unsigned_abs(), int(p.num_heads)?.unsigned_abs(), 1];
        // SAFETY: the validated tensors of the call.
        unsafe { call.stream.launch(kernel, grid, THREADS as u32, shared as u32, &params) }
    }
}
