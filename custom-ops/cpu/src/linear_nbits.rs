//! LinearNBits on a CPU.

use crate::host::Host;
use crate::isa::{Isa, MatrixUnit};
use crate::kernel::{Call, CpuOperator, Slices, Work};
use crate::nbits::{Engine, Level, NBits, layer};
use moh_operators::linear_nbits::{Inputs, Problem};
use moh_operators::routed_mlp::Activation;
use moh_operators::{Definition, Element, Error, LinearNBits};

impl CpuOperator for LinearNBits {
    type Output<T: Element> = T;

    fn uses(unit: MatrixUnit) -> bool {
        unit.beats_bytes()
    }

    fn run<I: Isa, T: Element>(call: Call<'_, Self, I, T>) -> Result<Work, Error> {
        let Call { unit, problem, inputs, output, host, .. } = call;
        run(Self::NAME, Engine::of::<I>(unit), problem, (inputs, None), output, host)
    }
}

/// The layer, and an activation function of its sums.
pub(crate) fn run<T: Element>(
    operator: &'static str,
    engine: Engine,
    problem: &Problem,
    (inputs, activation): (Inputs<Slices<'_, T>>, Option<Activation>),
    output: &mut [T],
    host: &dyn Host,
) -> Result<Work, Error> {
    let &Problem { width, out_width, format, int8_activations, .. } = problem;
    let Inputs { x, weight, scales, bias, zero_points } = inputs;
    let weight = NBits::new(operator, format.bits, format.block, [out_width, width], weight, scales, zero_points)?;
    let level = Level::of_int8(int8_activations);
    Ok(Work { macs: layer(engine, operator, x, &weight, (bias, activation), output, level, host)? })
}
