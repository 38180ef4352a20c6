//! RoutedCombineNBits on a CPU.

use crate::epilogue::Epilogue;
use crate::head_linear_nbits::{self, Heads};
use crate::isa::{Isa, MatrixUnit};
use crate::kernel::{self, CpuOperator, Work};
use crate::nbits::{Engine, Level, NBits};
use crate::workers::Shared;
use moh_operators::routed_combine_nbits::{Inputs, Problem};
use moh_operators::{Definition, Element, Error, RoutedCombineNBits, routed_projection_nbits};

impl CpuOperator for RoutedCombineNBits {
    type Output<T: Element> = T;

    fn uses(unit: MatrixUnit) -> bool {
        unit.beats_bytes()
    }

    fn run<I: Isa, T: Element>(call: kernel::Call<'_, Self, I, T>) -> Result<Work, Error> {
        let kernel::Call { isa, unit, problem, inputs, output, host } = call;
        let Problem { product, all_heads } = problem;
        let &routed_projection_nbits::Problem { linear, format, int8_activations } = product;
        let Inputs { x, weight, scales, head_gates: gates, bias, gate, residual, zero_points } = inputs;
        let shape = [linear.width, linear.num_heads * linear.block];
        let call = head_linear_nbits::Call {
            isa,
            engine: Engine::of::<I>(unit),
            heads: Heads::Input,
            problem: &linear,
            level: Level::of_int8(int8_activations),
            x,
            weight: NBits::new(Self::NAME, format.bits, format.block, shape, weight, scales, zero_points)?,
            gates,
            bias,
            epilogue: Epilogue::sum(linear.width, (gate, all_heads.rows_per_gate), residual),
            output: Shared(output.as_mut_ptr()),
        };
        head_linear_nbits::run(call, host)
    }
}
