//! RoutedCombineNBits: RoutedCombine with a quantised weight.

use crate::error::Error;
use crate::head_linear::{Direction, masked};
use crate::head_linear_nbits::{self, Shapes};
use crate::inputs::{ElementType, List, Operand, Reader, inputs};
use crate::nbits;
use crate::operator::{Body, Builder, Definition, Example, Part, Variant};
use crate::routed_combine::reference;
use crate::shape::{OutputDim, PartialShape};
use crate::tensor::Tensor;

pub use crate::head_linear_nbits::{Attributes, Problem};

/// The operator.
#[derive(Debug, Clone, Copy)]
pub struct RoutedCombineNBits;

inputs! {
    /// RoutedCombineNBits's inputs.
    pub struct Inputs {
        x: T, "(batch, q_len, num_heads * value_dim)", "The heads' blocks, concatenated.";
        weight: U8, "(width, num_heads * value_dim / block_size, block_size * bits / 8)",
            "The heads' matrices, quantised. Of 4 bits, the low half of a byte comes first. A block may belong to several heads.";
        scales: T, "(width, num_heads * value_dim / block_size)", "The blocks' scales.";
        head_gates: F32, "(batch, q_len, num_heads)", "Any finite number; 0 switches the head off.";
        bias: T [optional], "(width)", "Added once per token.";
        zero_points: U8 [optional], "(width, ceil(num_heads * value_dim / block_size * bits / 8))",
            "The blocks' zero points, packed as the weight. Without them 8 for 4 bits, 128 for 8 bits.";
    }
}

fn shapes<'a>(inputs: &Inputs<List<'_, PartialShape<'a>>>) -> Shapes<'a> {
    let Inputs { x, weight, scales, head_gates, bias, zero_points } = *inputs;
    Shapes { x, weight, scales, head_gates, bias, zero_points }
}

impl Definition for RoutedCombineNBits {
    const NAME: &'static str = "RoutedCombineNBits";
    const DOC: &'static str = "RoutedCombine with a quantised weight `W = (q - zero_point) * scale`: the sum of \
          `x_h W_h^T` over the heads that are on, plus the bias once. The block of x that belongs to a head whose gate \
          is 0 is not read and counts as 0, even if it is NaN or infinite. The gates only select heads; they do not \
          scale the output.";
    const INPUTS: &'static [Operand] = Inputs::<List<'_, ()>>::OPERANDS;
    const OUTPUT: Operand = Operand {
        name: "output",
        ty: ElementType::T,
        optional: false,
        shape: "(batch, q_len, width)",
        doc: "The tokens.",
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
        head_linear_nbits::infer(Self::NAME, Direction::Combination, attributes, &shapes(inputs))
    }

    fn problem(attributes: &Attributes, shapes: &Inputs<List<'_, &[usize]>>) -> Result<Problem, Error> {
        Ok(head_linear_nbits::problem(Direction::Combination, attributes, shapes.x, shapes.weight))
    }

    fn variant(_: &Attributes, inputs: &Inputs<List<'_, PartialShape<'_>>>) -> Variant {
        head_linear_nbits::variant(inputs.bias, inputs.zero_points)
    }

    fn zeros(attributes: &Attributes, shapes: &Inputs<List<'_, PartialShape<'_>>>, input: usize) -> Option<Vec<usize>> {
        head_linear_nbits::zeros(attributes.format(), shapes.weight, Self::INPUTS.get(input)?.name)
    }

    fn filler(attributes: &Attributes, input: usize) -> u8 {
        let packed = Self::INPUTS.get(input).is_some_and(|input| input.name == "zero_points");
        if packed { attributes.format().zero_point_byte() } else { 0 }
    }

    fn body(variant: Variant) -> Body {
        let mut b = Builder::new::<RoutedCombineNBits>(variant);
        let x = masked(&mut b, "x", "x_routed");
        let y = head_linear_nbits::product(&mut b, &x, variant);
        b.node("CastLike", &[&y, "x"], "output");
        b.finish()
    }

    fn reference(p: &Problem, inputs: &Inputs<List<'_, Tensor<'_>>>) -> Vec<f64> {
        let Inputs { x, weight, scales, head_gates, bias, zero_points } = *inputs;
        let k = p.linear.num_heads * p.linear.block;
        let w = nbits::dequantised(p.format, k, &weight, &scales, zero_points.as_ref());
        reference(&p.linear, &x, &head_gates, bias.as_ref(), |head, i, row| w[row * k + head * p.linear.block + i])
    }

    fn rounding(attributes: &Attributes) -> f64 {
        nbits::rounding(attributes.int8_activations())
    }

    fn examples() -> Vec<Example<Attributes>> {
        let attributes =
            |num_heads, bits, block_size, accuracy_level| Attributes { num_heads, bits, block_size, accuracy_level };
        vec![
            // Blocks of one head each.
            Example::new(attributes(3, 4, 32, 0), &[&[2, 5, 96], &[7, 3, 16], &[7, 3], &[2, 5, 3], &[7], &[7, 2]]),
            Example::new(attributes(3, 8, 16, 0), &[&[1, 4, 96], &[33, 6, 16], &[33, 6], &[1, 4, 3], &[33], &[33, 6]]),
            // Blocks of two heads, and of one and a half.
            Example::new(attributes(6, 4, 32, 0), &[&[2, 9, 96], &[20, 3, 16], &[20, 3], &[2, 9, 6]]),
            Example::new(attributes(4, 8, 32, 0), &[&[1, 3, 96], &[20, 3, 32], &[20, 3], &[1, 3, 4], &[20]]),
            Example::new(attributes(4, 4, 64, 4), &[&[1, 1, 128], &[20, 2, 32], &[20, 2], &[1, 1, 4], &[20]]),
            Example::new(attributes(3, 8, 32, 4), &[&[1, 7, 96], &[48, 3, 32], &[48, 3], &[1, 7, 3]]),
        ]
    }
}
