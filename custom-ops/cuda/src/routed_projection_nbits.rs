//! RoutedProjectionNBits on CUDA.

use crate::call::{Call, CudaOperator};
use crate::nbits::{Few, Heads, Operation, Weight};
use crate::product::Linear;
use crate::routed_projection;
use moh_operators::routed_projection_nbits::Inputs;
use moh_operators::{Error, RoutedProjectionNBits};

impl CudaOperator for RoutedProjectionNBits {
    unsafe fn launch(call: &Call<'_, Self>) -> Result<(), Error> {
        let p = call.problem.linear;
        let Inputs { x, weight, scales, head_gates, bias, zero_points } = call.inputs;
        let quantised = Weight {
            weight,
            scales,
            zero_points,
            matrices: 1,
            rows: p.num_heads * p.block,
            depth: p.width,
            format: Some(call.problem.format),
        };
        let linear = Linear {
            problem: p,
            x,
            weight: 0,
            gates: head_gates,
            bias: bias.unwrap_or(0),
            output: call.output,
            dtype: call.dtype,
            stream: call.stream,
            workspace: call.workspace,
        };
        let heads = Heads { gates: head_gates, tokens: p.tokens, heads: p.num_heads, rows: p.block };
        // SAFETY: the call's tensors.
        unsafe {
            let few = Few::linear(Operation::Projection, quantised, &linear);
            if few.fits() {
                return few.launch(call.stream);
            }
            let weight = quantised.dequantize(Some(heads), false, call.dtype, call.stream, call.workspace)?;
            routed_projection::launch(&Linear { weight, ..linear })
        }
    }
}
