//! Linear on a CPU: on a matrix unit where there are enough rows, on vectors where there are few, else as a projection to one head that every
//! row uses.

mod dense;
mod few;

use crate::head_linear::{self, Tensors};
use crate::host::Scratch;
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
const FEW: usize = 8;

impl CpuOperator for Linear {
    type Output<T: Element> = T;

    fn uses(_: MatrixUnit) -> bool {
        true
    }

    fn run<I: Isa, T: Element>(call: kernel::Call<'_, Self, I, T>) -> Result<Work, Error> {
        let kernel::Call { isa, unit, problem, inputs, output, host } = call;
        let Inputs { x, weight, bias } = inputs;
        let few = problem.rows <= FEW;
        let unit = unit.filter(|unit| !few && terms_at(host.precision(), T::FLOAT) <= unit.most_terms());
        if let (Some(unit), WeightData::Plain(weight)) = (unit, weight) {
            let dense = Dense { isa, unit, problem, x, weight, bias, output: Shared(output.as_mut_ptr()) };
            if let Some(macs) = dense.run(host)? {
                return Ok(Work { macs });
            }
        }
        if let (true, WeightData::Plain(weight)) = (few, weight) {
            let macs = few::run(isa, problem, [x, weight], bias, Shared(output.as_mut_ptr()), host)?;
            return Ok(Work { macs });
        }
        let mut gates = Scratch::new::<f32>(host, problem.rows)?;
        let gates = gates.as_mut_slice::<f32>();
        gates.fill(1.0);
        let tensors = Tensors { x, weight, gates, bias };
        head_linear::run::<I, T, RoutedProjection>(isa, None, &as_projection(problem), tensors, output, host)
    }

    /// Without a matrix unit the kernel does what hosts do.
    fn is_left_to_body(unit: Option<MatrixUnit>, precision: Precision) -> bool {
        unit.is_none_or(|unit| unit.most_terms() < terms_at(precision, Float::F32))
    }

    /// Not for a matrix unit, which splits the weight itself, and leaves few rows and what is not finite to vectors.
    fn pack<I: Isa, T: Element>(
        isa: I,
        unit: Option<MatrixUnit>,
        _: &Attributes,
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
}

/// Number of the input that can be packed.
const WEIGHT: usize = 1;

/// The same as a projection to one head.
fn as_projection(p: &Problem) -> routed_projection::Problem {
    let (tokens, width, block) = (p.rows, p.width, p.out_width);
    routed_projection::Problem { tokens, num_heads: 1, width, block, weight_layout: WeightLayout::PerHead }
}
