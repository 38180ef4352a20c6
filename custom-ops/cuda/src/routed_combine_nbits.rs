//! RoutedCombineNBits on CUDA, and `kernels/linear_epilogue.cu` for what follows the sums.

use crate::call::{Call, CudaOperator};
use crate::linear_nbits::after;
use crate::nbits::{Few, Operation, Weight};
use crate::product::Linear;
use crate::routed_combine;
use moh_operators::routed_combine_nbits::{Inputs, Problem};
use moh_operators::{Error, RoutedCombineNBits};

impl CudaOperator for RoutedCombineNBits {
    unsafe fn launch(call: &Call<'_, Self>) -> Result<(), Error> {
        let Problem { product, all_heads } = call.problem;
        let p = product.linear;
        let Inputs { x, weight, scales, head_gates, bias, gate, residual, zero_points } = call.inputs;
        let quantised = Weight {
            weight,
            scales,
            zero_points,
            matrices: 1,
            rows: p.width,
            depth: p.num_heads * p.block,
            format: Some(product.format),
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
        // SAFETY: the call's tensors.
        unsafe {
            let few = Few::linear(Operation::Combination, quantised, &linear);
            if few.fits() {
                few.launch(call.stream)?;
            } else {
                // Heads are columns of the weight; a row belongs to all of them.
                let weight = quantised.dequantize(None, false, call.dtype, call.stream, call.workspace)?;
                routed_combine::launch(&Linear { weight, ..linear })?;
            }
            after(&all_heads, gate, residual, call.output, call.dtype, call.stream)
        }
    }
}
