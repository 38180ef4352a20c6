//! Linear on a CPU: on a matrix unit where there are enough rows, on vectors where there are few, else as a projection to one head that every
//! row uses.

mod dense;
mod few;

use crate::epilogue::Epilogue;
use crate::head_linear::{self, Tensors};
use crate::host::{Host, Scratch};
use crate::isa::{Isa, MatrixUnit};
use crate::kernel::{self, CpuOperator, WeightData, Work};
use crate::packed::Packed;
use crate::settings::{Precision, precision};
use crate::terms::terms_at;
use crate::workers::Shared;
use dense::Dense;
use moh_operators::linear::{Attributes, Inputs, Problem};
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
        let unit = unit.filter(|unit| !few && terms_at(host.precision(), T::FLOAT) <= unit.most_terms());
        if let (Some(unit), WeightData::Plain(weight)) = (unit, weight) {
            let dense = Dense { isa, unit, problem, x, weight, bias, epilogue, output: Shared(output.as_mut_ptr()) };
            if let Some(macs) = dense.run(host)? {
                return Ok(Work { macs });
            }
        }
        if let (true, WeightData::Plain(weight)) = (few, weight) {
            let after = (bias, &epilogue);
            let macs = few::run(isa, problem, [x, weight], after, Shared(output.as_mut_ptr()), host)?;
            return Ok(Work { macs });
        }
        let mut gates = Scratch::new::<f32>(host, problem.rows)?;
        let gates = gates.as_mut_slice::<f32>();
        gates.fill(1.0);
        let tensors = Tensors { x, weight, gates, bias };
        let work =
            head_linear::run::<I, T, RoutedProjection>(isa, None, &as_projection(problem), tensors, output, host)?;
        epilogue.apply(isa, output, host)?;
        Ok(work)
    }
}

/// Without a matrix unit the kernel does what hosts do.
pub(crate) fn is_left_to_body(unit: Option<MatrixUnit>, precision: Precision) -> bool {
    unit.is_none_or(|unit| unit.most_terms() < terms_at(precision, Float::F32))
}

/// Packs the weight. Not for a matrix unit, which splits the weight itself, and leaves few rows and what is not finite to vectors.
pub(crate) fn pack<I: Isa, T: Element>(
    isa: I,
    unit: Option<MatrixUnit>,
    input: usize,
    shape: &[usize],
    weight: &[T],
) -> Result<Option<Packed>, Error> {
    if input != WEIGHT || unit.is_some_and(|unit| terms_at(precision(), T::FLOAT) <= unit.most_terms()) {
        return Ok(None);
    }
    let problem = Linear::of_weight(shape)?;
    head_linear::pack::<I, T, RoutedProjection>(isa, &as_projection(&problem), shape, weight)
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

    fn is_left_to_body(unit: Option<MatrixUnit>, precision: Precision) -> bool {
        is_left_to_body(unit, precision)
    }

    fn pack<I: Isa, T: Element>(
        isa: I,
        unit: Option<MatrixUnit>,
        _: &Attributes,
        input: usize,
        shape: &[usize],
        weight: &[T],
    ) -> Result<Option<Packed>, Error> {
        pack(isa, unit, input, shape, weight)
    }
}

/// Number of the input that can be packed.
const WEIGHT: usize = 1;

/// The same as a projection to one head.
fn as_projection(p: &Problem) -> routed_projection::Problem {
    let (tokens, width, block) = (p.rows, p.width, p.out_width);
    routed_projection::Problem { tokens, num_heads: 1, width, block, weight_layout: WeightLayout::PerHead }
}
