//! RoutedProjectionNBits on a CPU.

use crate::epilogue::Epilogue;
use crate::head_linear_nbits::{self, Heads};
use crate::isa::{Isa, MatrixUnit};
use crate::kernel::{self, CpuOperator, Work};
use crate::nbits::{Engine, Level, NBits};
use crate::workers::Shared;
use moh_operators::routed_projection_nbits::{Inputs, Problem};
use moh_operators::{Definition, Element, Error, RoutedProjectionNBits};

impl CpuOperator for RoutedProjectionNBits {
    type Output<T: Element> = T;

    fn uses(unit: MatrixUnit) -> bool {
        unit.beats_bytes()
    }

    fn run<I: Isa, T: Element>(call: kernel::Call<'_, Self, I, T>) -> Result<Work, Error> {
        let kernel::Call { isa, unit, problem, inputs, output, host } = call;
        let &Problem { linear, format, int8_activations } = problem;
        let Inputs { x, weight, scales, head_gates: gates, bias, zero_points } = inputs;
        let shape = [linear.num_heads * linear.block, linear.width];
        let call = head_linear_nbits::Call {
            isa,
            engine: Engine::of::<I>(unit),
            heads: Heads::Output,
            problem: &linear,
            level: Level::of_int8(int8_activations),
            x,
            weight: NBits::new(Self::NAME, format.bits, format.block, shape, weight, scales, zero_points)?,
            gates,
            bias,
            epilogue: Epilogue::nothing(linear.num_heads * linear.block),
            output: Shared(output.as_mut_ptr()),
        };
        head_linear_nbits::run(call, host)
    }
}
