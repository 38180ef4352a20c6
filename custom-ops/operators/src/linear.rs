//! Linear: a dense layer.

use crate::attributes::attributes;
use crate::error::Error;
use crate::inputs::{ElementType, List, Operand, Reader, inputs};
use crate::operator::{Body, Builder, Definition, Example, Part, Variant};
use crate::shape::{Agreed, OutputDim, PartialShape, show};
use crate::tensor::Tensor;

/// The operator.
#[derive(Debug, Clone, Copy)]
pub struct Linear;

attributes! {
    /// Linear has no attributes.
    #[derive(Copy)]
    pub struct Attributes {}
}

inputs! {
    /// Linear's inputs.
    pub struct Inputs {
        x: T, "(.., width)", "Rows, of any number of dimensions.";
        weight: Weight, "(width, out_width)", "The matrix, as MatMul reads it.";
        bias: T [optional], "(out_width)", "Added to every row.";
    }
}

/// Sizes of a validated call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// Rows of x.
    pub rows: usize,
    /// Length of a row.
    pub width: usize,
    /// Length of an output's row.
    pub out_width: usize,
}

impl Definition for Linear {
    const NAME: &'static str = "Linear";
    const DOC: &'static str = "A dense layer, `x W + bias` along the last dimension. Kernels may add the products up in any order, \
          and split numbers into the terms of a narrower type as long as the result's error is that of x's type.";
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

    fn infer(_: &Attributes, inputs: &Inputs<List<'_, PartialShape<'_>>>) -> Result<Vec<OutputDim>, Error> {
        let Inputs { x, weight, bias } = *inputs;
        let bad = |input, expected: &str, found| {
            Err(Error::Shape { operator: Self::NAME, input, expected: expected.to_owned(), found: show(found) })
        };
        let Some((&width, leading)) = x.split_last().filter(|(width, _)| **width != Some(0)) else {
            return bad("x", "(.., width)", x);
        };
        let out = match *weight {
            [k, out] if k != Some(0) && out != Some(0) && Agreed(width).accept(k) => out,
            _ => return bad("weight", &format!("({}, out_width)", Agreed(width).show("width")), weight),
        };
        if let Some(bias) = bias
            && !(bias.len() == 1 && Agreed(out).accept(bias[0]))
        {
            return bad("bias", &format!("({})", Agreed(out).show("out_width")), bias);
        }
        let same = (0..leading.len()).map(|axis| OutputDim::SameAs { input: 0, axis });
        Ok(same.chain([out.map_or(OutputDim::Unknown, OutputDim::Size)]).collect())
    }

    fn problem(_: &Attributes, shapes: &Inputs<List<'_, &[usize]>>) -> Result<Problem, Error> {
        let (width, leading) = shapes.x.split_last().unwrap_or((&0, &[]));
        let out_width = shapes.weight.get(1).copied().unwrap_or(0);
        Ok(Problem { rows: leading.iter().product(), width: *width, out_width })
    }

    fn variant(_: &Attributes, inputs: &Inputs<List<'_, PartialShape<'_>>>) -> Variant {
        Variant { optional_inputs: usize::from(inputs.bias.is_some()), ..Variant::default() }
    }

    fn zeros(_: &Attributes, shapes: &Inputs<List<'_, PartialShape<'_>>>, _: usize) -> Option<Vec<usize>> {
        Some(vec![(*shapes.weight.get(1)?)?])
    }

    fn body(variant: Variant) -> Body {
        let mut b = Builder::new::<Linear>(variant);
        match variant.optional_inputs {
            0 => b.node("MatMul", &["x", "weight"], "output"),
            _ => {
                let product = b.node("MatMul", &["x", "weight"], "product");
                b.node("Add", &[&product, "bias"], "output")
            }
        };
        b.finish()
    }

    fn reference(p: &Problem, inputs: &Inputs<List<'_, Tensor<'_>>>) -> Vec<f64> {
        let Inputs { x, weight, bias } = *inputs;
        let mut output = Vec::with_capacity(p.rows * p.out_width);
        for row in 0..p.rows {
            output.extend((0..p.out_width).map(|n| {
                let products = (0..p.width).map(|i| x.data.at(row * p.width + i) * weight.data.at(i * p.out_width + n));
                products.sum::<f64>() + bias.map_or(0.0, |bias| bias.data.at(n))
            }));
        }
        output
    }

    fn examples() -> Vec<Example<Attributes>> {
        vec![
            Example::new(Attributes {}, &[&[2, 5, 24], &[24, 13], &[13]]),
            Example::new(Attributes {}, &[&[70, 33], &[33, 70]]),
            Example::new(Attributes {}, &[&[3, 1, 17, 40], &[40, 64], &[64]]),
            Example::new(Attributes {}, &[&[48], &[48, 16]]),
        ]
    }
}

impl Linear {
    /// The sizes that a weight of this shape implies, with 0 rows.
    ///
    /// # Errors
    /// [`Error::Shape`] if it is no matrix.
    pub fn of_weight(weight: &[usize]) -> Result<Problem, Error> {
        let width = weight.first().copied().unwrap_or(0).max(1);
        let known = [Some(0), Some(width)];
        let shape: Vec<Option<usize>> = weight.iter().map(|&dim| Some(dim)).collect();
        Linear::infer(&Attributes {}, &Inputs { x: &known, weight: &shape, bias: None })?;
        Linear::problem(&Attributes {}, &Inputs { x: &[0, width], weight, bias: None })
    }
}
