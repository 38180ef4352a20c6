//! LinearActivationNBits on a CPU: as LinearNBits.

use crate::epilogue::Epilogue;
use crate::isa::{Isa, MatrixUnit};
use crate::kernel::{Call, CpuOperator, Work};
use crate::linear_nbits::Layer;
use crate::nbits::Engine;
use moh_operators::linear_activation_nbits::{Inputs, Problem};
use moh_operators::{Definition, Element, Error, LinearActivationNBits};

impl CpuOperator for LinearActivationNBits {
    type Output<T: Element> = T;

    fn uses(unit: MatrixUnit) -> bool {
        unit.beats_bytes()
    }

    fn run<I: Isa, T: Element>(call: Call<'_, Self, I, T>) -> Result<Work, Error> {
        let Call { unit, problem, inputs, output, host, .. } = call;
        let Problem { linear: problem, activation } = problem;
        let Inputs { x, weight, scales, bias, zero_points } = inputs;
        let epilogue = &Epilogue::activation(problem.linear.out_width, *activation);
        let layer = Layer { problem, x, weight, scales, zero_points, bias, epilogue };
        layer.run(Self::NAME, Engine::of::<I>(unit), output, host)
    }
}
