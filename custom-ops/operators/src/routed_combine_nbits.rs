//! RoutedCombineNBits: RoutedCombine with a quantised weight.

use crate::error::Error;
use crate::head_linear::{Direction, masked};
use crate::head_linear_nbits::{self, Shapes};
use crate::inputs::{ElementType, List, Operand, Reader, inputs};
use crate::linear::{self, check_after};
use crate::nbits;
use crate::operator::{Body, Builder, Definition, Example, Part, Variant};
use crate::routed_combine::reference;
use crate::shape::{OutputDim, PartialShape};
use crate::tensor::Tensor;

pub use crate::head_linear_nbits::Attributes;

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
        gate: T [optional], "(batch or 1, q_len or 1, width) or (1)", "The sums are multiplied by it. Where batch is 1 instead, so is q_len.";
        residual: T [optional], "(batch, q_len, width) or (1)", "Added last.";
        zero_points: U8 [optional], "(width, ceil(num_heads * value_dim / block_size * bits / 8))",
            "The blocks' zero points, packed as the weight. Without them 8 for 4 bits, 128 for 8 bits.";
    }
}

/// Sizes of a validated call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// Those of the product.
    pub product: head_linear_nbits::Problem,
    /// Those of a dense layer of all heads, with the same gate and residual.
    pub all_heads: linear::Problem,
}

fn shapes<'a>(inputs: &Inputs<List<'_, PartialShape<'a>>>) -> Shapes<'a> {
    let Inputs { x, weight, scales, head_gates, bias, zero_points, .. } = *inputs;
    Shapes { x, weight, scales, head_gates, bias, zero_points }
}

impl Definition for RoutedCombineNBits {
    const NAME: &'static str = "RoutedCombineNBits";
    const DOC: &'static str = "RoutedCombine with a quantised weight `W = (q - zero_point) * scale`: the sum of \
          `x_h W_h^T` over the heads that are on, plus the bias once; times the gate, plus the residual. The block of x that belongs to a head whose gate \
          is 0 is not read and counts as 0, even if it is NaN or infinite. head_gates only select heads; they do not \
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
        let output = head_linear_nbits::infer(Self::NAME, Direction::Combination, attributes, &shapes(inputs))?;
        let width = inputs.weight.first().copied().flatten();
        check_after(Self::NAME, (inputs.x.get(..2).unwrap_or_default(), width), inputs.gate, inputs.residual)?;
        Ok(output)
    }

    fn problem(attributes: &Attributes, shapes: &Inputs<List<'_, &[usize]>>) -> Result<Problem, Error> {
        let product = head_linear_nbits::problem(Direction::Combination, attributes, shapes.x, shapes.weight);
        let p = &product.linear;
        let all_heads = linear::Problem::of_rows(p.tokens, p.num_heads * p.block, p.width);
        Ok(Problem { product, all_heads: all_heads.followed_by(shapes.gate, shapes.residual) })
    }

    fn variant(_: &Attributes, inputs: &Inputs<List<'_, PartialShape<'_>>>) -> Variant {
        Variant::taking(&[inputs.bias, inputs.gate, inputs.residual, inputs.zero_points])
    }

    fn zeros(attributes: &Attributes, shapes: &Inputs<List<'_, PartialShape<'_>>>, input: usize) -> Option<Vec<usize>> {
        head_linear_nbits::zeros(attributes.format(), shapes.weight, Self::INPUTS.get(input)?.name)
    }

    fn filler(attributes: &Attributes, input: usize) -> u8 {
        Self::INPUTS.get(input).map_or(0, |input| head_linear_nbits::filler(attributes.format(), input.name))
    }

    fn body(variant: Variant) -> Body {
        let mut b = Builder::new::<RoutedCombineNBits>(variant);
        let x = masked(&mut b, "x", "x_routed");
        let y = head_linear_nbits::product(&mut b, &x);
        b.node("CastLike", &[&y, "x"], "output");
        b.finish()
    }

    fn reference(p: &Problem, inputs: &Inputs<List<'_, Tensor<'_>>>) -> Vec<f64> {
        let Inputs { x, weight, scales, head_gates, bias, gate, residual, zero_points } = *inputs;
        let (format, linear) = (p.product.format, &p.product.linear);
        let k = linear.num_heads * linear.block;
        let w = nbits::dequantised(format, k, &weight, &scales, zero_points.as_ref());
        let of_head = |head, i, row: usize| w[row * k + head * linear.block + i];
        let sums = reference(linear, &x, &head_gates, bias.as_ref(), of_head);
        p.all_heads.after(sums.into_iter(), gate, residual).collect()
    }

    fn rounding(attributes: &Attributes) -> f64 {
        nbits::rounding(attributes.int8_activations())
    }

    fn examples() -> Vec<Example<Attributes>> {
        let attributes =
            |num_heads, bits, block_size, accuracy_level| Attributes { num_heads, bits, block_size, accuracy_level };
        vec![
            // Blocks of one head each.
            Example::new(
                attributes(3, 4, 32, 0),
                &[&[2, 5, 96], &[7, 3, 16], &[7, 3], &[2, 5, 3], &[7], &[2, 1, 7], &[2, 5, 7], &[7, 2]],
            ),
            Example::new(
                attributes(3, 8, 16, 0),
                &[&[1, 4, 96], &[33, 6, 16], &[33, 6], &[1, 4, 3], &[33], &[1], &[1, 4, 33], &[33, 6]],
            ),
            // Blocks of two heads, and of one and a half.
            Example::new(attributes(6, 4, 32, 0), &[&[2, 9, 96], &[20, 3, 16], &[20, 3], &[2, 9, 6]]),
            Example::new(attributes(4, 8, 32, 0), &[&[1, 3, 96], &[20, 3, 32], &[20, 3], &[1, 3, 4], &[20]]),
            Example::new(attributes(4, 4, 64, 4), &[&[1, 1, 128], &[20, 2, 32], &[20, 2], &[1, 1, 4], &[20]]),
            Example::new(
                attributes(3, 8, 32, 4),
                &[&[2, 3, 96], &[21, 3, 32], &[21, 3], &[2, 3, 3], &[21], &[2, 3, 21], &[1]],
            ),
            Example::new(attributes(3, 8, 32, 4), &[&[1, 7, 96], &[48, 3, 32], &[48, 3], &[1, 7, 3]]),
        ]
    }
}
