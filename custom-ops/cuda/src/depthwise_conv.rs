//! DepthwiseConv on CUDA: `kernels/depthwise_conv.cu`.

use crate::call::{Call, CudaOperator};
use crate::kernel::Kernel;
use crate::modules;
use crate::params::DepthwiseConvParams;
use crate::plan::int;
use moh_operators::depthwise_conv::Inputs;
use moh_operators::{DType, DepthwiseConv, Error};

const THREADS: usize = 256;
/// Pixels of a thread.
const PIXELS: usize = 4;
/// No activation function.
const NONE: i32 = -1;

impl CudaOperator for DepthwiseConv {
    unsafe fn launch(call: &Call<'_, Self>) -> Result<(), Error> {
        let p = &call.problem;
        let Inputs { x, weight, bias } = call.inputs;
        let [images, height, width] = p.images;
        // A kernel adds these up.
        int(width + PIXELS + p.kernel[1])?;
        int(height + p.kernel[0])?;
        let params = DepthwiseConvParams {
            x,
            weight,
            bias: bias.unwrap_or(0),
            output: call.output,
            images: int(images)?,
            height: int(height)?,
            width: int(width)?,
            channels: int(p.channels)?,
            rows: int(p.kernel[0])?,
            columns: int(p.kernel[1])?,
            activation: p.then.activation().map_or(NONE, |activation| activation as i32),
        };
        let (wide, narrow, chunk) = match call.dtype {
            DType::F16 => (c"moh_depthwise_conv_f16_8", c"moh_depthwise_conv_f16_1", 8),
            DType::BF16 => (c"moh_depthwise_conv_bf16_8", c"moh_depthwise_conv_bf16_1", 8),
            _ => (c"moh_depthwise_conv_float_4", c"moh_depthwise_conv_float_1", 4),
        };
        // Tensors are aligned to 16 bytes.
        let (name, chunk) = if p.channels.is_multiple_of(chunk) { (wide, chunk) } else { (narrow, 1) };
        let kernel = Kernel { module: modules::DEPTHWISE_CONV, name };
        let items = images * height * width.div_ceil(PIXELS) * (p.channels / chunk);
        let blocks = int(items.div_ceil(THREADS))?.unsigned_abs();
        // SAFETY: the validated tensors of the call.
        unsafe { call.stream.launch(kernel, [blocks, 1, 1], THREADS as u32, 0, &params) }
    }
}
