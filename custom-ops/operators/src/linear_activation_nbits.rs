//! LinearActivationNBits: a dense layer with a quantised weight, and an activation function.

use crate::attributes::attributes;
use crate::error::Error;
use crate::head_linear_nbits::{filler, product, zeros};
use crate::inputs::{ElementType, List, Operand, Reader, inputs};
use crate::linear_activation::{check, of_kind};
use crate::linear_nbits::{self, Product, products};
use crate::nbits;
use crate::operator::{Body, Builder, Definition, Example, Part, Variant};
use crate::routed_mlp::Activation;
use crate::shape::{OutputDim, PartialShape};
use crate::tensor::Tensor;

/// The operator.
#[derive(Debug, Clone, Copy)]
pub struct LinearActivationNBits;

attributes! {
    /// LinearActivationNBits's attributes.
    #[derive(Copy)]
    pub struct Attributes {
        /// 0: ReLU. 1: GELU (erf). 2: GELU (tanh). 3: SiLU.
        activation: Activation,
        /// Bits of a weight: 4 or 8.
        bits: usize,
        /// Weights of the inner dimension that share a scale: 16, 32, 64, 128 or 256.
        block_size: usize,
        /// 0: x stays in floating point. 4: kernels may round x to 8-bit integers, with a scale of max(|x|) / 127 for each row and block, or x and W to bfloat16.
        accuracy_level: i64,
    }
}

impl Attributes {
    /// Those of the layer alone.
    fn linear(&self) -> linear_nbits::Attributes {
        let &Attributes { bits, block_size, accuracy_level, .. } = self;
        linear_nbits::Attributes { bits, block_size, accuracy_level }
    }
}

inputs! {
    /// LinearActivationNBits's inputs.
    pub struct Inputs {
        x: T, "(.., width)", "Rows, of any number of dimensions.";
        weight: U8, "(out_width, width / block_size, block_size * bits / 8)",
            "The matrix, quantised. Of 4 bits, the low half of a byte comes first.";
        scales: T, "(out_width, width / block_size)", "The blocks' scales.";
        bias: T [optional], "(out_width)", "Added to every row.";
        zero_points: U8 [optional], "(out_width, ceil(width / block_size * bits / 8))",
            "The blocks' zero points, packed as the weight. Without them 8 for 4 bits, 128 for 8 bits.";
    }
}

/// Sizes of a validated call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// Those of the dense layer.
    pub linear: linear_nbits::Problem,
    /// The activation function of its sums.
    pub activation: Activation,
}

impl Definition for LinearActivationNBits {
    const NAME: &'static str = "LinearActivationNBits";
    const DOC: &'static str = "A dense layer with a quantised weight `W = (q - zero_point) * scale`, and an activation function: \
          `act(x W^T + bias)` along the last dimension.";
    const INPUTS: &'static [Operand] = Inputs::<List<'_, ()>>::OPERANDS;
    const OUTPUT: Operand = Operand {
        name: "output",
        ty: ElementType::T,
        optional: false,
        shape: "(.., out_width)",
        doc: "The other dimensions are x's.",
    };
    const PART: Part = Part::Dense;
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
        check(Self::NAME, attributes.activation)?;
        nbits::check(Self::NAME, attributes.bits, attributes.block_size, attributes.accuracy_level)
    }

    fn infer(attributes: &Attributes, inputs: &Inputs<List<'_, PartialShape<'_>>>) -> Result<Vec<OutputDim>, Error> {
        let Inputs { x, weight, scales, bias, zero_points } = *inputs;
        let format = attributes.linear().format();
        Product { operator: Self::NAME, format, x, weight, scales, bias, zero_points }.infer()
    }

    fn problem(attributes: &Attributes, shapes: &Inputs<List<'_, &[usize]>>) -> Result<Problem, Error> {
        let linear = linear_nbits::Problem::new(&attributes.linear(), shapes.x, shapes.weight);
        Ok(Problem { linear, activation: attributes.activation })
    }

    fn variant(attributes: &Attributes, inputs: &Inputs<List<'_, PartialShape<'_>>>) -> Variant {
        Variant { kind: attributes.activation as i64, ..Variant::taking(&[inputs.bias, inputs.zero_points]) }
    }

    fn zeros(attributes: &Attributes, shapes: &Inputs<List<'_, PartialShape<'_>>>, input: usize) -> Option<Vec<usize>> {
        zeros(attributes.linear().format(), shapes.weight, Self::INPUTS.get(input)?.name)
    }

    fn filler(attributes: &Attributes, input: usize) -> u8 {
        Self::INPUTS.get(input).map_or(0, |input| filler(attributes.linear().format(), input.name))
    }

    fn body(variant: Variant) -> Body {
        let mut b = Builder::new::<LinearActivationNBits>(variant);
        let y = product(&mut b, "x");
        let y = b.activation(of_kind(variant), &y, "activated");
        b.node("CastLike", &[&y, "x"], Self::OUTPUT.name);
        b.finish()
    }

    fn reference(p: &Problem, inputs: &Inputs<List<'_, Tensor<'_>>>) -> Vec<f64> {
        let Inputs { x, weight, scales, bias, zero_points } = *inputs;
        let sums = products(&p.linear, [x, weight, scales], [bias, zero_points]);
        sums.map(|sum| p.activation.of(sum)).collect()
    }

    fn rounding(attributes: &Attributes) -> f64 {
        nbits::rounding(attributes.linear().int8_activations())
    }

    fn examples() -> Vec<Example<Attributes>> {
        let attributes =
            |activation, bits, block_size, accuracy_level| Attributes { activation, bits, block_size, accuracy_level };
        // Short rows of 4 bits, because a GELU of a sum far below 0 rounds to 0.
        let plain = [Activation::Relu, Activation::Gelu, Activation::GeluTanh, Activation::Silu];
        let each = plain.iter().map(|&activation| {
            Example::new(attributes(activation, 4, 16, 0), &[&[1, 4, 16], &[12, 1, 8], &[12, 1], &[12]])
        });
        let more = [
            Example::new(
                attributes(Activation::Silu, 4, 32, 0),
                &[&[2, 5, 96], &[13, 3, 16], &[13, 3], &[13], &[13, 2]],
            ),
            Example::new(attributes(Activation::Relu, 8, 16, 0), &[&[18, 32], &[51, 2, 16], &[51, 2]]),
            Example::new(attributes(Activation::Silu, 8, 32, 4), &[&[64], &[15, 2, 32], &[15, 2], &[15]]),
            Example::new(attributes(Activation::Silu, 4, 128, 4), &[&[1, 7, 1, 256], &[48, 2, 64], &[48, 2]]),
        ];
        each.chain(more).collect()
    }
}
