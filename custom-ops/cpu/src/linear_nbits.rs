//! LinearNBits on a CPU.

use crate::epilogue::Epilogue;
use crate::host::Host;
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
        let Inputs { x, weight, scales, bias, gate, residual, zero_points } = inputs;
        let epilogue = &Epilogue::sum(problem.linear.out_width, (gate, problem.linear.rows_per_gate), residual);
        let layer = Layer { problem, x, weight, scales, zero_points, bias, epilogue };
        layer.run(Self::NAME, Engine::of::<I>(unit), output, host)
    }
}

/// A dense layer. Slice lengths have been validated against `problem`.
pub(crate) struct Layer<'a, T> {
    pub(crate) problem: &'a Problem,
    pub(crate) x: &'a [T],
    pub(crate) weight: &'a [u8],
    pub(crate) scales: &'a [T],
    pub(crate) zero_points: Option<&'a [u8]>,
    pub(crate) bias: Option<&'a [T]>,
    pub(crate) epilogue: &'a Epilogue<'a, T>,
}

impl<T: Element> Layer<'_, T> {
    /// Computes the output.
    pub(crate) fn run(
        self,
        operator: &'static str,
        engine: Engine,
        output: &mut [T],
        host: &dyn Host,
    ) -> Result<Work, Error> {
        let Layer { problem, x, weight, scales, zero_points, bias, epilogue } = self;
        let &Problem { linear, format, int8_activations } = problem;
        let shape = [linear.out_width, linear.width];
        let weight = NBits::new(operator, format.bits, format.block, shape, weight, scales, zero_points)?;
        let level = Level::of_int8(int8_activations);
        Ok(Work { macs: layer(engine, operator, x, &weight, (bias, epilogue), output, level, host)? })
    }
}
