//! RoutedAggregatedAttention on CUDA: `cuda/aggregated.cu`.

use super::params::AggregatedParams;
use super::plan::int;
use super::{Call, Kernel, modules};
use crate::error::Error;
use crate::shape::aggregated_attention::Problem;
use crate::tensor::DType;
use std::ffi::CString;

const THREADS: usize = 128;
/// Widest head, lanes of a query, and pooled tokens in shared memory, of each kernel.
const VARIANTS: [(usize, usize, usize); 5] = [(32, 4, 32), (64, 8, 32), (128, 16, 32), (256, 32, 32), (512, 32, 16)];
/// Blocks that a thread block has side by side when it writes their zeros: enough to hide the memory's latency.
const ZEROS: usize = 256;

/// See [`super::Launch`].
pub(super) unsafe fn launch(call: &Call<'_>) -> Result<(), Error> {
    let shapes: Vec<Option<&[usize]>> = call.inputs.iter().map(|input| input.map(|input| input.shape)).collect();
    let p = Problem::new(call.attributes, &shapes)?;
    let Some(&(width, lanes, keys)) = VARIANTS.iter().find(|(width, ..)| p.head_dim <= *width) else {
        return Err(Error::Shape {
            operator: call.attributes.operator().name,
            input: "query",
            expected: "heads of at most 512 elements on CUDA".to_owned(),
            found: p.head_dim.to_string(),
        });
    };
    let params = AggregatedParams {
        query: call.input(0),
        key: call.input(1),
        value: call.input(2),
        pooled_key: call.input(3),
        pooled_value: call.input(4),
        gates: call.input(5),
        query_embedding: call.input(6),
        query_scale: call.input(7),
        local_bias: call.input(8),
        pooled_bias: call.input(9),
        learnable_tokens: call.input(10),
        learnable_bias: call.input(11),
        output: call.output.ptr,
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
        DType::BF16 => "bf16",
    };
    let name = CString::new(format!("moh_aggregated_{dtype}_{width}")).unwrap_or_default();
    let kernel = Kernel { module: modules::AGGREGATED, name: &name };
    let queries = THREADS / lanes;
    let squares = p.height.div_ceil(4) * p.width.div_ceil(4);
    let blocks = (squares * 16).div_ceil(queries) + p.tokens().div_ceil(ZEROS);
    let shared = 2 * keys * width * 4 + THREADS / 32 * 4;
    let grid = [int(blocks)? as u32, p.num_heads as u32, p.batch as u32];
    // SAFETY: the validated tensors of the call.
    unsafe { call.stream.launch(kernel, grid, THREADS as u32, shared as u32, &params) }
}
