//! LinearActivationNBits on CUDA: LinearNBits, and then `kernels/linear_epilogue.cu`.

use crate::call::{Call, CudaOperator};
use crate::linear::Then;
use crate::linear_nbits::Layer;
use moh_operators::{Error, LinearActivationNBits, linear};

impl CudaOperator for LinearActivationNBits {
    unsafe fn launch(call: &Call<'_, Self>) -> Result<(), Error> {
        let &Call { ref problem, inputs, output, dtype, stream, workspace } = call;
        let (layer, activation) = (&problem.linear, Some(problem.activation));
        let rows = &linear::Problem::of_rows(layer.rows, layer.width, layer.out_width);
        // SAFETY: the call's tensors; the output has a row for each of x's.
        unsafe {
            Layer { problem: layer, inputs, output, dtype, stream, workspace }.launch()?;
            Then { problem: rows, bias: 0, gate: 0, residual: 0, activation, output, dtype }.launch(stream)
        }
    }
}
