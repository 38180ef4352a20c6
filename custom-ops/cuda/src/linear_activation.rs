//! LinearActivation on CUDA: as Linear.

use crate::call::{Call, CudaOperator};
use crate::linear::Layer;
use moh_operators::linear;
use moh_operators::linear_activation::Inputs;
use moh_operators::{Error, LinearActivation};

impl CudaOperator for LinearActivation {
    unsafe fn launch(call: &Call<'_, Self>) -> Result<(), Error> {
        let &Call { ref problem, inputs, output, dtype, stream, workspace } = call;
        let Inputs { x, weight, bias } = inputs;
        let inputs = linear::Inputs { x, weight, bias, gate: None, residual: None };
        let (problem, activation) = (&problem.linear, Some(problem.activation));
        // SAFETY: the call's tensors.
        unsafe { Layer { problem, inputs, activation, output, dtype, stream, workspace }.launch() }
    }
}
