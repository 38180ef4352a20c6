//! RoutedProjection: the linear layer that makes the heads' queries, computed for the heads that are on.

mod body;
mod reference;

use crate::error::Error;
use crate::head_linear::{self, Direction, Shapes};
use crate::inputs::{ElementType, List, Operand, Reader, inputs};
use crate::operator::{Body, Variant};
use crate::operator::{Definition, Example, Part};
use crate::shape::{OutputDim, PartialShape};
use crate::tensor::Tensor;

pub use crate::head_linear::{Attributes, Problem, WeightLayout};
pub(crate) use reference::reference;

/// The operator.
#[derive(Debug, Clone, Copy)]
pub struct RoutedProjection;

inputs! {
    /// RoutedProjection's inputs.
    pub struct Inputs {
        x: T, "(batch, q_len, width)", "The tokens.";
        weight: Weight, "(num_heads * head_dim, width), or (num_heads, width, head_dim) in layout 1",
            "The heads' matrices.";
        head_gates: F32, "(batch, q_len, num_heads)", "Any finite number; 0 switches the head off.";
        bias: T [optional], "(num_heads * head_dim)", "Added to the heads that are on.";
    }
}

impl Definition for RoutedProjection {
    const NAME: &'static str = "RoutedProjection";
    const DOC: &'static str = "`x W^T + bias` in the blocks of the heads that are on. The block of a head whose \
          gate is 0 is not computed and is exactly 0, even if inputs are NaN or infinite. The gates only select \
          heads; they do not scale the output.";
    const INPUTS: &'static [Operand] = Inputs::<List<'_, ()>>::OPERANDS;
    const OUTPUT: Operand = Operand {
        name: "output",
        ty: ElementType::T,
        optional: false,
        shape: "(batch, q_len, num_heads * head_dim)",
        doc: "The heads' blocks, concatenated.",
    };
    const PART: Part = Part::Projections;

    type Attributes = Attributes;
    type Inputs<R: Reader> = Inputs<R>;
    type Problem = Problem;

    fn inputs<R: Reader>(reader: &R) -> Result<Inputs<R>, R::Error> {
        Inputs::read(reader)
    }

    fn list<V: Copy>(inputs: &Inputs<List<'_, V>>) -> Vec<Option<V>> {
        inputs.list()
    }

    fn infer(attributes: &Attributes, shapes: &Inputs<List<'_, PartialShape<'_>>>) -> Result<Vec<OutputDim>, Error> {
        let Inputs { x, weight, head_gates, bias } = *shapes;
        head_linear::infer(Self::NAME, Direction::Projection, attributes, &Shapes { x, weight, head_gates, bias })
    }

    fn problem(attributes: &Attributes, shapes: &Inputs<List<'_, &[usize]>>) -> Result<Problem, Error> {
        Ok(head_linear::problem(Direction::Projection, attributes, shapes.x, shapes.weight))
    }

    fn variant(attributes: &Attributes, shapes: &Inputs<List<'_, PartialShape<'_>>>) -> Variant {
        head_linear::variant(attributes, shapes.bias.is_some())
    }

    fn zeros(attributes: &Attributes, shapes: &Inputs<List<'_, PartialShape<'_>>>, _: usize) -> Option<Vec<usize>> {
        let weight = shapes.weight.iter().copied().collect::<Option<Vec<_>>>()?;
        let p = Self::of_weight(attributes, &weight).ok()?;
        Some(vec![p.num_heads * p.block])
    }

    fn body(variant: Variant) -> Body {
        body::body(variant)
    }

    fn reference(p: &Problem, inputs: &Inputs<List<'_, Tensor<'_>>>) -> Vec<f64> {
        let Inputs { x, weight, head_gates, bias } = *inputs;
        reference(p, &x, &head_gates, bias.as_ref(), |h, d, c| match p.per_head() {
            true => weight.data.at((h * p.width + c) * p.block + d),
            false => weight.data.at((h * p.block + d) * p.width + c),
        })
    }

    fn examples() -> Vec<Example<Attributes>> {
        let attributes = |weight_layout| Attributes { num_heads: 3, weight_layout };
        vec![
            Example::new(attributes(WeightLayout::OutIn), &[&[2, 5, 7], &[12, 7], &[2, 5, 3], &[12]]),
            Example::new(attributes(WeightLayout::PerHead), &[&[1, 4, 7], &[3, 7, 4], &[1, 4, 3]]),
        ]
    }
}

impl RoutedProjection {
    /// The sizes that a weight of this shape implies, with 0 tokens.
    ///
    /// # Errors
    /// [`Error::Shape`] if the weight does not fit the attributes.
    pub fn of_weight(attributes: &Attributes, weight: &[usize]) -> Result<Problem, Error> {
        head_linear::of_weight(Self::NAME, Direction::Projection, attributes, weight)
    }
}
