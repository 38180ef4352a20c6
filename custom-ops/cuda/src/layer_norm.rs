//! LayerNorm on CUDA: `kernels/layer_norm.cu`.

use crate::call::{Call, CudaOperator};
use crate::kernel::Kernel;
use crate::modules;
use crate::params::LayerNormParams;
use crate::plan::int;
use moh_operators::layer_norm::Inputs;
use moh_operators::{DType, Error, LayerNorm};

const THREADS: usize = 128;
/// Rows of a block: one a warp.
const ROWS: usize = THREADS / 32;

impl CudaOperator for LayerNorm {
    unsafe fn launch(call: &Call<'_, Self>) -> Result<(), Error> {
        let p = &call.problem;
        let Inputs { x, weight, bias, scale, shift } = call.inputs;
        let [bias, scale, shift] = [bias, scale, shift].map(|input| input.unwrap_or(0));
        let params = LayerNormParams {
            x,
            weight,
            bias,
            scale,
            shift,
            output: call.output,
            rows: int(p.rows)?,
            width: int(p.width)?,
            rows_per_scale: int(p.rows_per_scale)?,
            rows_per_shift: int(p.rows_per_shift)?,
            epsilon: p.epsilon,
        };
        let (wide, narrow, chunk) = match call.dtype {
            DType::F16 => (c"moh_layer_norm_f16_8", c"moh_layer_norm_f16_1", 8),
            DType::BF16 => (c"moh_layer_norm_bf16_8", c"moh_layer_norm_bf16_1", 8),
            _ => (c"moh_layer_norm_float_4", c"moh_layer_norm_float_1", 4),
        };
        // Tensors are aligned to 16 bytes.
        let name = if p.width.is_multiple_of(chunk) { wide } else { narrow };
        let kernel = Kernel { module: modules::LAYER_NORM, name };
        let blocks = int(p.rows.div_ceil(ROWS))?.unsigned_abs();
        // SAFETY: the validated tensors of the call.
        unsafe { call.stream.launch(kernel, [blocks, 1, 1], THREADS as u32, 0, &params) }
    }
}
