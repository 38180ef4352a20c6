//! RoutedProjectionNBits: RoutedProjection with a quantised weight.

use crate::error::Error;
use crate::head_linear::{Direction, masked};
use crate::head_linear_nbits::{self, Shapes};
use crate::inputs::{ElementType, List, Operand, Reader, inputs};
use crate::nbits;
use crate::operator::{Body, Builder, Definition, Example, Part, Variant};
use crate::routed_projection::reference;
use crate::shape::{OutputDim, PartialShape};
use crate::tensor::Tensor;

pub use crate::head_linear_nbits::{Attributes, Problem};

/// The operator.
#[derive(Debug, Clone, Copy)]
pub struct RoutedProjectionNBits;

inputs! {
    /// RoutedProjectionNBits's inputs.
    pub struct Inputs {
        x: T, "(batch, q_len, width)", "The tokens.";
        weight: U8, "(num_heads * head_dim, width / block_size, block_size * bits / 8)",
            "The heads' matrices, quantised. Of 4 bits, the low half of a byte comes first.";
        scales: T, "(num_heads * head_dim, width / block_size)", "The blocks' scales.";
        head_gates: F32, "(batch, q_len, num_heads)", "Any finite number; 0 switches the head off.";
        bias: T [optional], "(num_heads * head_dim)", "Added to the heads that are on.";
        zero_points: U8 [optional], "(num_heads * head_dim, ceil(width / block_size * bits / 8))",
            "The blocks' zero points, packed as the weight. Without them 8 for 4 bits, 128 for 8 bits.";
    }
}

fn shapes<'a>(inputs: &Inputs<List<'_, PartialShape<'a>>>) -> Shapes<'a> {
    let Inputs { x, weight, scales, head_gates, bias, zero_points } = *inputs;
    Shapes { x, weight, scales, head_gates, bias, zero_points }
}

impl Definition for RoutedProjectionNBits {
    const NAME: &'static str = "RoutedProjectionNBits";
    const DOC: &'static str = "RoutedProjection with a quantised weight `W = (q - zero_point) * scale`: \
          `x W^T + bias` in the blocks of the heads that are on. The block of a head whose gate is 0 is not computed \
          and is exactly 0, even if inputs are NaN or infinite. The gates only select heads; they do not scale the \
          output.";
    const INPUTS: &'static [Operand] = Inputs::<List<'_, ()>>::OPERANDS;
    const OUTPUT: Operand = Operand {
        name: "output",
        ty: ElementType::T,
        optional: false,
        shape: "(batch, q_len, num_heads * head_dim)",
        doc: "The heads' blocks, concatenated.",
    };
    const PART: Part = Part::Projections;
    const SINCE: i64 = 2;

    type Attributes = Attributes;
    type Inputs<R: Reader> = Inputs<R>;
    type Problem = Problem;

    fn inputs<R: Reader>(reader: &R) -> Result<Inputs<R>, R::Error> {
        Inputs::read(reader)
    }

    fn list<V: Copy>(inputs: &Inputs<List<'_, V>>) -> Vec<Option<V>> {
        inputs.list()
    }

    fn check(attributes: &Attributes) -> Result<(), Error> {
        attributes.check(Self::NAME)
    }

    fn infer(attributes: &Attributes, inputs: &Inputs<List<'_, PartialShape<'_>>>) -> Result<Vec<OutputDim>, Error> {
        head_linear_nbits::infer(Self::NAME, Direction::Projection, attributes, &shapes(inputs))
    }

    fn problem(attributes: &Attributes, shapes: &Inputs<List<'_, &[usize]>>) -> Result<Problem, Error> {
        Ok(head_linear_nbits::problem(Direction::Projection, attributes, shapes.x, shapes.weight))
    }

    fn variant(_: &Attributes, inputs: &Inputs<List<'_, PartialShape<'_>>>) -> Variant {
        Variant::taking(&[inputs.bias, inputs.zero_points])
    }

    fn zeros(attributes: &Attributes, shapes: &Inputs<List<'_, PartialShape<'_>>>, input: usize) -> Option<Vec<usize>> {
        head_linear_nbits::zeros(attributes.format(), shapes.weight, Self::INPUTS.get(input)?.name)
    }

    fn filler(attributes: &Attributes, input: usize) -> u8 {
        Self::INPUTS.get(input).map_or(0, |input| head_linear_nbits::filler(attributes.format(), input.name))
    }

    fn body(variant: Variant) -> Body {
        let mut b = Builder::new::<RoutedProjectionNBits>(variant);
        let y = head_linear_nbits::product(&mut b, "x");
        let y = b.node("CastLike", &[&y, "x"], "all_heads");
        masked(&mut b, &y, "output");
        b.finish()
    }

    fn reference(p: &Problem, inputs: &Inputs<List<'_, Tensor<'_>>>) -> Vec<f64> {
        let Inputs { x, weight, scales, head_gates, bias, zero_points } = *inputs;
        let k = p.linear.width;
        let w = nbits::dequantised(p.format, k, &weight, &scales, zero_points.as_ref());
        reference(&p.linear, &x, &head_gates, bias.as_ref(), |head, row, i| w[(head * p.linear.block + row) * k + i])
    }

    fn rounding(attributes: &Attributes) -> f64 {
        nbits::rounding(attributes.int8_activations())
    }

    fn examples() -> Vec<Example<Attributes>> {
        let attributes =
            |bits, block_size, accuracy_level| Attributes { num_heads: 3, bits, block_size, accuracy_level };
        vec![
            Example::new(attributes(4, 32, 0), &[&[2, 5, 96], &[12, 3, 16], &[12, 3], &[2, 5, 3], &[12], &[12, 2]]),
            Example::new(attributes(8, 16, 0), &[&[1, 4, 48], &[12, 3, 16], &[12, 3], &[1, 4, 3], &[12], &[12, 3]]),
            Example::new(attributes(4, 16, 0), &[&[2, 9, 32], &[51, 2, 8], &[51, 2], &[2, 9, 3]]),
            Example::new(attributes(8, 32, 4), &[&[1, 1, 64], &[15, 2, 32], &[15, 2], &[1, 1, 3], &[15]]),
            Example::new(attributes(4, 128, 4), &[&[1, 7, 256], &[48, 2, 64], &[48, 2], &[1, 7, 3]]),
        ]
    }
}
