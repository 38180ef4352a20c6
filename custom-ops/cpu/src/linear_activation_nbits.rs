//! LinearActivationNBits on a CPU: as LinearNBits.

use crate::isa::{Isa, MatrixUnit};
use crate::kernel::{Call, CpuOperator, Work};
use crate::linear_nbits;
use crate::nbits::Engine;
use moh_operators::linear_activation_nbits::Problem;
use moh_operators::{Definition, Element, Error, LinearActivationNBits};

impl CpuOperator for LinearActivationNBits {
    type Output<T: Element> = T;

    fn uses(unit: MatrixUnit) -> bool {
        unit.beats_bytes()
    }

    fn run<I: Isa, T: Element>(call: Call<'_, Self, I, T>) -> Result<Work, Error> {
        let Call { unit, problem, inputs, output, host, .. } = call;
        let Problem { linear, activation } = problem;
        linear_nbits::run(Self::NAME, Engine::of::<I>(unit), linear, (inputs, Some(*activation)), output, host)
    }
}
