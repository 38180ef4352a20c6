//! Linear: a dense layer, and what is mostly done with its output.

use crate::attributes::attributes;
use crate::error::Error;
use crate::inputs::{ElementType, List, Operand, Reader, inputs};
use crate::operator::{Body, Builder, Definition, Example, Part, Variant};
use crate::shape::{Agreed, OutputDim, PartialShape, show};
use crate::tensor::Tensor;

/// The operator.
#[derive(Debug, Clone, Copy)]
pub struct Linear;

/// Number of the gate among the inputs.
const GATE: usize = 3;

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
        bias: T [optional], "(out_width) or (1)", "Added to every row.";
        gate: T [optional], "(.., out_width) or (1)",
            "The sums are multiplied by it. Its other dimensions are x's, or 1 from one of them on: a row for each sequence, say.";
        residual: T [optional], "(.., out_width) or (1)", "Added last. Its other dimensions are x's.";
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
    /// Rows of x in turn that share a row of the gate; 1 if there is none.
    pub rows_per_gate: usize,
    /// Whether the bias is one number for all.
    pub bias_is_number: bool,
    /// The same of the gate.
    pub gate_is_number: bool,
    /// The same of the residual.
    pub residual_is_number: bool,
}

/// The shapes of a product of rows with a matrix.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub(crate) operator: &'static str,
    pub(crate) x: PartialShape<'a>,
    pub(crate) weight: PartialShape<'a>,
    pub(crate) bias: Option<PartialShape<'a>>,
}

impl<'a> Product<'a> {
    fn bad<A>(&self, input: &'static str, expected: &str, found: PartialShape<'_>) -> Result<A, Error> {
        Err(Error::Shape { operator: self.operator, input, expected: expected.to_owned(), found: show(found) })
    }

    /// Validates the shapes. Returns the dimensions of x before the last one, and the length of an output's row.
    pub(crate) fn check(&self) -> Result<(PartialShape<'a>, Option<usize>), Error> {
        let Product { x, weight, bias, .. } = *self;
        let Some((&width, leading)) = x.split_last().filter(|(width, _)| **width != Some(0)) else {
            return self.bad("x", "(.., width)", x);
        };
        let out = match *weight {
            [k, out] if k != Some(0) && out != Some(0) && Agreed(width).accept(k) => out,
            _ => return self.bad("weight", &format!("({}, out_width)", Agreed(width).show("width")), weight),
        };
        if let Some(bias) = bias
            && !(bias.len() == 1 && (Agreed(out).accept(bias[0]) || is_one(bias)))
        {
            return self.bad("bias", &format!("({}) or (1)", Agreed(out).show("out_width")), bias);
        }
        Ok((leading, out))
    }

    /// The shape of the output.
    pub(crate) fn infer(&self) -> Result<Vec<OutputDim>, Error> {
        self.check().map(|(leading, out)| output(leading, out))
    }
}

/// The shape of the output for x's dimensions before the last one.
pub(crate) fn output(leading: PartialShape<'_>, out: Option<usize>) -> Vec<OutputDim> {
    let same = (0..leading.len()).map(|axis| OutputDim::SameAs { input: 0, axis });
    same.chain([out.map_or(OutputDim::Unknown, OutputDim::Size)]).collect()
}

/// Whether it is the shape of one number for all.
fn is_one(shape: PartialShape<'_>) -> bool {
    matches!(shape, [None | Some(1)])
}

/// How many of x's dimensions before the last one another operand has too: it has 1 instead of the others.
pub(crate) fn shared_dims(gate: PartialShape<'_>, leading: PartialShape<'_>, out: Option<usize>) -> Option<usize> {
    let (&columns, rows) = gate.split_last()?;
    let fits = |shared: usize| {
        let same = rows.iter().zip(leading).take(shared).all(|(&gate, &x)| Agreed(x).accept(gate));
        same && rows.iter().skip(shared).all(|gate| matches!(gate, None | Some(1)))
    };
    let alike = rows.len() == leading.len() && Agreed(out).accept(columns);
    (0..=leading.len()).rev().find(|&shared| alike && fits(shared))
}

/// Validates the gate and the residual of a layer's sums, whose dimensions are these and these columns.
pub(crate) fn check_after(
    operator: &'static str,
    (leading, out): (PartialShape<'_>, Option<usize>),
    gate: Option<PartialShape<'_>>,
    residual: Option<PartialShape<'_>>,
) -> Result<(), Error> {
    let dims = leading.iter().map(|dim| dim.map_or("?".to_owned(), |dim| dim.to_string()));
    let dims: Vec<String> = dims.chain([Agreed(out).show("out_width")]).collect();
    let expected = format!("({}) or (1)", dims.join(", "));
    let bad = |input, expected, found| Err(Error::Shape { operator, input, expected, found: show(found) });
    if let Some(gate) = gate
        && !is_one(gate)
        && shared_dims(gate, leading, out).is_none()
    {
        return bad("gate", format!("{expected}, where dimensions from one on may be 1"), gate);
    }
    if let Some(residual) = residual
        && !is_one(residual)
        && shared_dims(residual, leading, out) != Some(leading.len())
    {
        return bad("residual", expected, residual);
    }
    Ok(())
}

impl Problem {
    /// A layer without bias, gate and residual.
    pub fn of_rows(rows: usize, width: usize, out_width: usize) -> Problem {
        Problem {
            rows,
            width,
            out_width,
            rows_per_gate: 1,
            bias_is_number: false,
            gate_is_number: false,
            residual_is_number: false,
        }
    }

    /// A layer without gate and residual.
    pub(crate) fn new(x: &[usize], weight: &[usize], bias: Option<&[usize]>) -> Problem {
        let (&width, leading) = x.split_last().unwrap_or((&0, &[]));
        let out_width = weight.get(1).copied().unwrap_or(0);
        let layer = Problem::of_rows(leading.iter().product(), width, out_width);
        Problem { bias_is_number: bias.is_some_and(|bias| bias == [1]), ..layer }
    }

    /// The same layer with a gate and a residual of these shapes.
    pub(crate) fn followed_by(self, gate: Option<&[usize]>, residual: Option<&[usize]>) -> Problem {
        let gates = gate.map_or(self.rows, |gate| gate.iter().rev().skip(1).product());
        let rows_per_gate = self.rows.checked_div(gates).unwrap_or(1).max(1);
        let is_number = |operand: Option<&[usize]>| operand.is_some_and(|shape| shape == [1]);
        let [gate_is_number, residual_is_number] = [gate, residual].map(is_number);
        Problem { rows_per_gate, gate_is_number, residual_is_number, ..self }
    }

    /// What becomes of the sums: multiplied by the gate, and the residual added.
    pub(crate) fn after(
        &self,
        sums: impl Iterator<Item = f64>,
        gate: Option<Tensor<'_>>,
        residual: Option<Tensor<'_>>,
    ) -> impl Iterator<Item = f64> {
        let &Problem { out_width, rows_per_gate, .. } = self;
        let at = move |tensor: Tensor<'_>, row: usize, n: usize| {
            tensor.data.at(if tensor.data.len() == 1 { 0 } else { row * out_width + n })
        };
        sums.enumerate().map(move |(i, sum)| {
            let (row, n) = (i / out_width, i % out_width);
            let gated = sum * gate.map_or(1.0, |gate| at(gate, row / rows_per_gate, n));
            gated + residual.map_or(0.0, |residual| at(residual, row, n))
        })
    }
}

/// The products in f64, with the bias: (rows, out_width).
pub(crate) fn products(
    &Problem { rows, width, out_width, .. }: &Problem,
    [x, weight]: [Tensor<'_>; 2],
    bias: Option<Tensor<'_>>,
) -> impl Iterator<Item = f64> {
    (0..rows * out_width).map(move |i| {
        let (row, n) = (i / out_width, i % out_width);
        let products = (0..width).map(|i| x.data.at(row * width + i) * weight.data.at(i * out_width + n));
        products.sum::<f64>() + bias.map_or(0.0, |bias| bias.data.at(if bias.data.len() == 1 { 0 } else { n }))
    })
}

impl Definition for Linear {
    const NAME: &'static str = "Linear";
    const DOC: &'static str = "A dense layer, `(x W + bias) * gate + residual` along the last dimension. Kernels may add the products up in any order, \
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
        let Inputs { x, weight, bias, gate, residual } = *inputs;
        let product = Product { operator: Self::NAME, x, weight, bias };
        let (leading, out) = product.check()?;
        check_after(Self::NAME, (leading, out), gate, residual)?;
        product.infer()
    }

    fn problem(_: &Attributes, shapes: &Inputs<List<'_, &[usize]>>) -> Result<Problem, Error> {
        let Inputs { x, weight, bias, gate, residual } = *shapes;
        Ok(Problem::new(x, weight, bias).followed_by(gate, residual))
    }

    fn variant(_: &Attributes, inputs: &Inputs<List<'_, PartialShape<'_>>>) -> Variant {
        Variant::taking(&[inputs.bias, inputs.gate, inputs.residual])
    }

    /// One number, which runtimes drop together with the operation.
    fn zeros(_: &Attributes, _: &Inputs<List<'_, PartialShape<'_>>>, _: usize) -> Option<Vec<usize>> {
        Some(vec![1])
    }

    fn filler(_: &Attributes, input: usize) -> u8 {
        u8::from(input == GATE)
    }

    fn body(variant: Variant) -> Body {
        let mut b = Builder::new::<Linear>(variant);
        let steps = [("Add", "bias", "sum"), ("Mul", "gate", "gated"), ("Add", "residual", "output")];
        let steps = &steps[..variant.optional_inputs.min(steps.len())];
        let name = |done: usize, name| if done == steps.len() { Linear::OUTPUT.name } else { name };
        let mut last = b.node("MatMul", &["x", "weight"], name(0, "product"));
        for (i, (op_type, input, output)) in steps.iter().enumerate() {
            last = b.node(op_type, &[&last, input], name(i + 1, output));
        }
        b.finish()
    }

    fn reference(p: &Problem, inputs: &Inputs<List<'_, Tensor<'_>>>) -> Vec<f64> {
        let Inputs { x, weight, bias, gate, residual } = *inputs;
        p.after(products(p, [x, weight], bias), gate, residual).collect()
    }

    fn examples() -> Vec<Example<Attributes>> {
        vec![
            Example::new(Attributes {}, &[&[2, 5, 24], &[24, 13], &[13]]),
            Example::new(Attributes {}, &[&[70, 33], &[33, 70]]),
            Example::new(Attributes {}, &[&[3, 1, 17, 40], &[40, 64], &[64]]),
            Example::new(Attributes {}, &[&[48], &[48, 16]]),
            Example::new(Attributes {}, &[&[3, 7, 24], &[24, 13], &[13], &[3, 7, 13]]),
            Example::new(Attributes {}, &[&[2, 9, 40], &[40, 17], &[1], &[1], &[2, 9, 17]]),
            Example::new(Attributes {}, &[&[2, 5, 24], &[24, 21], &[21], &[2, 1, 21], &[2, 5, 21]]),
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
        Product { operator: Self::NAME, x: &known, weight: &shape, bias: None }.check()?;
        Ok(Problem::new(&[0, width], weight, None))
    }
}
