//! Linear on a CPU: on a matrix unit where there are enough rows, or where its packed weight has few bytes; on vectors where there are few rows, else as
//! a projection to one head that every row uses.

mod dense;
mod few;

use crate::epilogue::Epilogue;
use crate::head_linear::{self, Tensors};
use crate::host::{Host, Scratch};
use crate::isa::{Isa, MAX_LANES, MatrixUnit};
use crate::kernel::{self, CpuOperator, ToPack, WeightData, Work};
use crate::matrix::{is_for_few, with_parts};
use crate::packed::Packed;
use crate::settings::Precision;
use crate::terms::unit_for;
use crate::workers::Shared;
use dense::Dense;
use moh_operators::linear::{Inputs, Problem};
use moh_operators::routed_projection::{self, WeightLayout};
use moh_operators::{Element, Error, Float, Linear, RoutedProjection};

/// Rows up to which vectors multiply the weight while it is read; to split it for a matrix unit takes longer.
const FEW: usize = few::ROWS;

/// A dense layer. Slice lengths have been validated against `problem`.
pub(crate) struct Layer<'a, I, T> {
    pub(crate) isa: I,
    pub(crate) unit: Option<MatrixUnit>,
    pub(crate) problem: &'a Problem,
    pub(crate) x: &'a [T],
    pub(crate) weight: WeightData<'a, T>,
    /// One number for all, or one for every column.
    pub(crate) bias: Option<&'a [T]>,
    pub(crate) epilogue: Epilogue<'a, T>,
}

impl<I: Isa, T: Element> Layer<'_, I, T> {
    /// Computes the output.
    pub(crate) fn run(self, output: &mut [T], host: &dyn Host) -> Result<Work, Error> {
        let Layer { isa, unit, problem, x, weight, bias, epilogue } = self;
        let repeated: Vec<T>;
        let bias = match bias {
            Some(&[number]) if number.to_f32() == 0.0 => None,
            Some(&[number]) => {
                repeated = vec![number; problem.out_width];
                Some(&repeated[..])
            }
            bias => bias,
        };
        let few = problem.rows <= FEW;
        let size = [problem.width, problem.out_width];
        let is_for_few =
            |unit| with_parts!(T, host.precision(), |P| weight.blocks::<P>(size).is_some() && is_for_few::<T, P>(unit));
        if let Some(unit) = unit_for::<T>(unit, host.precision())
            && (!few || is_for_few(unit))
        {
            let dense = Dense { isa, unit, problem, x, weight, bias, epilogue, output: Shared(output.as_mut_ptr()) };
            if let Some(macs) = dense.run(host)? {
                return Ok(Work { macs });
            }
        }
        let after = (bias, &epilogue);
        if few
            && T::FLOAT == Float::F32
            && I::LANES == MAX_LANES
            && let Some(blocks) = weight.blocks::<few::One>(size)
        {
            // SAFETY: the blocks are those of the weight.
            let macs = unsafe {
                let blocks = Shared(blocks.cast_mut());
                few::run_blocks::<I, T>(isa, problem, (x, blocks), after, Shared(output.as_mut_ptr()), host)?
            };
            if let Some(macs) = macs {
                return Ok(Work { macs });
            }
        }
        if let (true, Some(weight)) = (few, weight.without_panels()) {
            let macs = few::run(isa, problem, [x, weight], after, Shared(output.as_mut_ptr()), host)?;
            return Ok(Work { macs });
        }
        let mut gates = Scratch::new::<f32>(host, problem.rows)?;
        let gates = gates.as_mut_slice::<f32>();
        gates.fill(1.0);
        let epilogue = (!epilogue.is_nothing()).then_some(&epilogue);
        let tensors = Tensors { x, weight, gates, bias, epilogue };
        head_linear::run::<I, T, RoutedProjection>(isa, None, &as_projection(problem), tensors, output, host)
    }
}

/// Without a matrix unit the kernel does what hosts do, and better only with a weight that is packed once. (Measured with AVX-512 and AVX2; hosts that
/// pack take 1.0 to 1.3 of the time.)
pub(crate) fn is_left_to_body<I: Isa>(unit: Option<MatrixUnit>, precision: Precision, packs: bool) -> bool {
    const LEAST_LANES: usize = 8;
    unit_for::<f32>(unit, precision).is_none() && !(packs && I::LANES >= LEAST_LANES)
}

/// Packs the weight: for a matrix unit in parts, beside the tensor, else for vectors. 16-bit elements are packed on request only, because that
/// may double their memory.
pub(crate) fn pack<O: CpuOperator, I: Isa, T: Element>(isa: I, of: &ToPack<'_, O, T>) -> Result<Option<Packed>, Error> {
    let &ToPack { unit, input, shape, weight, packing, .. } = of;
    if input != WEIGHT || !packing.all && T::FLOAT != Float::F32 {
        return Ok(None);
    }
    let problem = &Linear::of_weight(shape)?;
    if unit_for::<T>(unit, packing.precision).is_none() {
        return head_linear::pack_panels::<I, T, RoutedProjection>(isa, &as_projection(problem), shape, weight)
            .map(Some);
    }
    if !packing.beside {
        return Ok(None);
    }
    let (size, matrix) = ([problem.width, problem.out_width], dense::matrix(problem, weight));
    // SAFETY: the weight's length has been checked against its shape, from which `problem` was made.
    with_parts!(T, packing.precision, |P| unsafe { Packed::in_parts::<I, T, P>(isa, &matrix, size, shape) })
}

impl CpuOperator for Linear {
    type Output<T: Element> = T;

    fn uses(_: MatrixUnit) -> bool {
        true
    }

    fn run<I: Isa, T: Element>(call: kernel::Call<'_, Self, I, T>) -> Result<Work, Error> {
        let kernel::Call { isa, unit, problem, inputs, output, host } = call;
        let Inputs { x, weight, bias, gate, residual } = inputs;
        let epilogue = Epilogue::sum(problem.out_width, (gate, problem.rows_per_gate), residual);
        Layer { isa, unit, problem, x, weight, bias, epilogue }.run(output, host)
    }

    fn is_left_to_body<I: Isa>(unit: Option<MatrixUnit>, precision: Precision, packs: bool) -> bool {
        is_left_to_body::<I>(unit, precision, packs)
    }

    fn pack<I: Isa, T: Element>(isa: I, of: &ToPack<'_, Self, T>) -> Result<Option<Packed>, Error> {
        pack(isa, of)
    }
}

/// Number of the input that can be packed.
const WEIGHT: usize = 1;

/// The same as a projection to one head.
fn as_projection(p: &Problem) -> routed_projection::Problem {
    let (tokens, width, block) = (p.rows, p.width, p.out_width);
    routed_projection::Problem { tokens, num_heads: 1, width, block, weight_layout: WeightLayout::PerHead }
}
