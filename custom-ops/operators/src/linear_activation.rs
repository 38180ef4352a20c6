//! LinearActivation: a dense layer and an activation function.

use crate::attributes::attributes;
use crate::error::Error;
use crate::inputs::{ElementType, List, Operand, Reader, inputs};
use crate::linear::{self, Product, products};
use crate::operator::{Body, Builder, Definition, Example, Part, Variant};
use crate::routed_mlp::Activation;
use crate::shape::{OutputDim, PartialShape};
use crate::tensor::Tensor;

/// The operator.
#[derive(Debug, Clone, Copy)]
pub struct LinearActivation;

attributes! {
    /// LinearActivation's attributes.
    #[derive(Copy)]
    pub struct Attributes {
        /// 0: ReLU. 1: GELU (erf). 2: GELU (tanh). 3: SiLU.
        activation: Activation,
    }
}

inputs! {
    /// LinearActivation's inputs.
    pub struct Inputs {
        x: T, "(.., width)", "Rows, of any number of dimensions.";
        weight: Weight, "(width, out_width)", "The matrix, as MatMul reads it.";
        bias: T [optional], "(out_width) or (1)", "Added to every row.";
    }
}

/// Sizes of a validated call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// Those of the dense layer.
    pub linear: linear::Problem,
    /// The activation function of its sums.
    pub activation: Activation,
}

/// Refuses the functions of two columns.
pub(crate) fn check(operator: &'static str, activation: Activation) -> Result<(), Error> {
    match activation.columns() {
        1 => Ok(()),
        _ => Err(Error::Attribute {
            operator,
            attribute: "activation",
            expected: "0 to 3".to_owned(),
            found: (activation as i64).to_string(),
        }),
    }
}

/// The function of a body whose variant has it as its kind.
pub(crate) fn of_kind(variant: Variant) -> Activation {
    let function = Activation::ALL.iter().find(|&&activation| activation as i64 == variant.kind);
    function.copied().unwrap_or(Activation::Relu)
}

impl Definition for LinearActivation {
    const NAME: &'static str = "LinearActivation";
    const DOC: &'static str = "A dense layer and an activation function, `act(x W + bias)` along the last dimension. Kernels may do with \
          the products what those of Linear may.";
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
    const MAY_BE_LEFT: bool = true;

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
        check(Self::NAME, attributes.activation)
    }

    fn infer(_: &Attributes, inputs: &Inputs<List<'_, PartialShape<'_>>>) -> Result<Vec<OutputDim>, Error> {
        let Inputs { x, weight, bias } = *inputs;
        Product { operator: Self::NAME, x, weight, bias }.infer()
    }

    fn problem(attributes: &Attributes, shapes: &Inputs<List<'_, &[usize]>>) -> Result<Problem, Error> {
        let linear = linear::Problem::new(shapes.x, shapes.weight, shapes.bias);
        Ok(Problem { linear, activation: attributes.activation })
    }

    fn variant(attributes: &Attributes, inputs: &Inputs<List<'_, PartialShape<'_>>>) -> Variant {
        let kind = attributes.activation as i64;
        Variant { optional_inputs: usize::from(inputs.bias.is_some()), kind, ..Variant::default() }
    }

    fn zeros(_: &Attributes, _: &Inputs<List<'_, PartialShape<'_>>>, _: usize) -> Option<Vec<usize>> {
        Some(vec![1])
    }

    fn body(variant: Variant) -> Body {
        let mut b = Builder::new::<LinearActivation>(variant);
        let mut h = b.node("MatMul", &["x", "weight"], "product");
        if variant.optional_inputs > 0 {
            h = b.node("Add", &[&h, "bias"], "sum");
        }
        b.activation(of_kind(variant), &h, Self::OUTPUT.name);
        b.finish()
    }

    fn reference(p: &Problem, inputs: &Inputs<List<'_, Tensor<'_>>>) -> Vec<f64> {
        let sums = products(&p.linear, [inputs.x, inputs.weight], inputs.bias);
        sums.map(|sum| p.activation.of(sum)).collect()
    }

    fn examples() -> Vec<Example<Attributes>> {
        let plain = [Activation::Relu, Activation::Gelu, Activation::GeluTanh, Activation::Silu];
        let each =
            plain.iter().map(|&activation| Example::new(Attributes { activation }, &[&[2, 5, 24], &[24, 13], &[13]]));
        let more: [&[&[usize]]; 3] =
            [&[&[70, 33], &[33, 70]], &[&[48], &[48, 16], &[1]], &[&[3, 1, 17, 40], &[40, 64], &[64]]];
        let more = more.map(|shapes| Example::new(Attributes { activation: Activation::Silu }, shapes));
        each.chain(more).collect()
    }
}
