//! LinearActivationNBits on CUDA: as LinearNBits.

use crate::call::{Call, CudaOperator};
use crate::linear_nbits::Layer;
use moh_operators::linear_activation_nbits::Inputs;
use moh_operators::{Error, LinearActivationNBits};

impl CudaOperator for LinearActivationNBits {
    unsafe fn launch(call: &Call<'_, Self>) -> Result<(), Error> {
        let &Call { ref problem, inputs, output, dtype, stream, workspace } = call;
        let Inputs { x, weight, scales, bias, zero_points } = inputs;
        let (problem, activation) = (&problem.linear, Some(problem.activation));
        // SAFETY: the call's tensors, of the sizes of its problem.
        unsafe {
            Layer { problem, x, weight, scales, zero_points, bias, activation, output, dtype, stream, workspace }
                .launch()
        }
    }
}
