//! LinearNBits on a CPU.

use crate::isa::{Isa, MatrixUnit};
use crate::kernel::{Call, CpuOperator, Work};
use crate::nbits::{Engine, Level, NBits, layer};
use moh_operators::linear_nbits::{Inputs, Problem};
use moh_operators::{Definition, Element, Error, LinearNBits};

impl CpuOperator for LinearNBits {
    type Output<T: Element> = T;

    fn uses(unit: MatrixUnit) -> bool {
        unit.beats_bytes()
    }

    fn run<I: Isa, T: Element>(call: Call<'_, Self, I, T>) -> Result<Work, Error> {
        let Call { unit, problem, inputs, output, host, .. } = call;
        let &Problem { width, out_width, format, int8_activations, .. } = problem;
        let Inputs { x, weight, scales, bias, zero_points } = inputs;
        let weight =
            NBits::new(Self::NAME, format.bits, format.block, [out_width, width], weight, scales, zero_points)?;
        let level = Level::of_int8(int8_activations);
        let macs = layer(Engine::of::<I>(unit), Self::NAME, x, &weight, bias, output, level, host)?;
        Ok(Work { macs })
    }
}
