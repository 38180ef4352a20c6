//! RoutedMLP: a mixture of feed-forward experts.

mod body;
mod reference;

use crate::attributes::{attributes, choices};
use crate::error::Error;
use crate::inputs::{ElementType, List, Operand, Reader, inputs};
use crate::operator::{Body, Variant};
use crate::operator::{Definition, Example, Part};
use crate::shape::{Agreed, OutputDim, PartialShape, show};
use crate::tensor::Tensor;

pub(crate) use body::experts;
pub use reference::erf;
pub(crate) use reference::reference;

/// The operator.
#[derive(Debug, Clone, Copy)]
pub struct RoutedMlp;

choices! {
    /// The activation function between an expert's two matrices.
    pub enum Activation {
        /// max(x, 0).
        Relu,
        /// x * Phi(x); Phi is the normal distribution function.
        Gelu,
        /// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
        GeluTanh,
        /// x * sigmoid(x).
        Silu,
        /// silu(gate) * other. The first matrix has the columns of both halves.
        SwiGlu,
    }
}

impl Activation {
    /// Columns of the first matrix per row of the second: 2 for SwiGLU, else 1.
    pub fn columns(self) -> usize {
        if self == Activation::SwiGlu { 2 } else { 1 }
    }
}

attributes! {
    /// RoutedMLP's attributes.
    #[derive(Copy)]
    pub struct Attributes {
        /// Experts.
        num_experts: usize,
        /// 0: ReLU. 1: GELU (erf). 2: GELU (tanh). 3: SiLU. 4: SwiGLU, silu(gate) * other.
        activation: Activation,
    }
}

inputs! {
    /// RoutedMLP's inputs.
    pub struct Inputs {
        x: T, "(batch, q_len, width)", "The tokens.";
        fc1_weight: Weight, "(num_experts, width, hidden), or (num_experts, width, 2 * hidden) for SwiGLU",
            "First matrices, applied as x W; for SwiGLU the gate's columns come first.";
        fc2_weight: Weight, "(num_experts, hidden, out_width)", "Second matrices.";
        expert_gates: F32, "(batch, q_len, num_experts)", "Any finite number; 0 switches the expert off.";
        fc1_bias: T [optional], "(num_experts, columns of fc1_weight)", "Requires fc2_bias.";
        fc2_bias: T [optional], "(num_experts, out_width)", "Requires fc1_bias.";
    }
}

/// Sizes of a validated call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// Tokens of all sequences.
    pub tokens: usize,
    /// Experts.
    pub num_experts: usize,
    /// Width of x.
    pub width: usize,
    /// Width of the hidden layer: rows of the second matrix.
    pub hidden: usize,
    /// Width of the output.
    pub out_width: usize,
    /// The activation function between the matrices.
    pub activation: Activation,
}

/// Validates the input shapes of `operator` and returns the output's.
pub(crate) fn infer(
    operator: &'static str,
    attributes: &Attributes,
    shapes: &Inputs<List<'_, PartialShape<'_>>>,
) -> Result<Vec<OutputDim>, Error> {
    let Attributes { num_experts: experts, activation } = *attributes;
    let Inputs { x, fc1_weight: fc1, fc2_weight: fc2, expert_gates: gates, fc1_bias, fc2_bias } = *shapes;
    let columns = activation.columns();
    let bad = |input, expected: String, found| Err(Error::Shape { operator, input, expected, found: show(found) });
    let (mut width, mut hidden, mut out) = (Agreed::default(), Agreed::default(), Agreed::default());
    let (mut batch, mut q_len) = (Agreed::default(), Agreed::default());
    let all_experts = |e: Option<usize>| e.is_none_or(|e| e == experts);

    if !(x.len() == 3 && batch.accept(x[0]) && q_len.accept(x[1]) && x[2] != Some(0) && width.accept(x[2])) {
        return bad("x", "(batch, q_len, width)".to_owned(), x);
    }
    let halved = |d: Option<usize>| match d {
        Some(d) if d == 0 || !d.is_multiple_of(columns) => None,
        d => Some(d.map(|d| d / columns)),
    };
    let fits = fc1.len() == 3
        && all_experts(fc1[0])
        && width.accept(fc1[1])
        && halved(fc1[2]).is_some_and(|d| hidden.accept(d));
    if !fits {
        return bad("fc1_weight", format!("({experts}, {}, {columns} * hidden)", width.show("width")), fc1);
    }
    if !(fc2.len() == 3 && all_experts(fc2[0]) && hidden.accept(fc2[1]) && fc2[2] != Some(0) && out.accept(fc2[2])) {
        return bad("fc2_weight", format!("({experts}, {}, out_width)", hidden.show("hidden")), fc2);
    }
    if !(gates.len() == 3 && batch.accept(gates[0]) && q_len.accept(gates[1]) && all_experts(gates[2])) {
        return bad("expert_gates", format!("({}, {}, {experts})", batch.show("batch"), q_len.show("q_len")), gates);
    }
    match (fc1_bias, fc2_bias) {
        (None, None) => {}
        (Some(b1), Some(b2)) => {
            let full = hidden.0.map(|hidden| hidden * columns);
            if !(b1.len() == 2 && all_experts(b1[0]) && Agreed(full).accept(b1[1])) {
                return bad("fc1_bias", format!("({experts}, {})", Agreed(full).show("columns of fc1_weight")), b1);
            }
            if !(b2.len() == 2 && all_experts(b2[0]) && out.accept(b2[1])) {
                return bad("fc2_bias", format!("({experts}, {})", out.show("out_width")), b2);
            }
        }
        _ => {
            return Err(Error::InputCount { operator, expected: "4 or 6".to_owned(), found: 5 });
        }
    }
    let out = out.0.map_or(OutputDim::Unknown, OutputDim::Size);
    Ok(vec![OutputDim::SameAs { input: 0, axis: 0 }, OutputDim::SameAs { input: 0, axis: 1 }, out])
}

impl Definition for RoutedMlp {
    const NAME: &'static str = "RoutedMLP";
    const DOC: &'static str = "The sum of `gate * (act(x W1 + b1) W2 + b2)` over the experts whose gate is not 0. \
          The others are not computed and add exactly 0, even if inputs are NaN or infinite. The output of a token \
          without experts is 0.";
    const INPUTS: &'static [Operand] = Inputs::<List<'_, ()>>::OPERANDS;
    const OUTPUT: Operand = Operand {
        name: "output",
        ty: ElementType::T,
        optional: false,
        shape: "(batch, q_len, out_width)",
        doc: "The tokens.",
    };
    const PART: Part = Part::Mlp;

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
        infer(Self::NAME, attributes, shapes)
    }

    fn problem(attributes: &Attributes, shapes: &Inputs<List<'_, &[usize]>>) -> Result<Problem, Error> {
        let Attributes { num_experts, activation } = *attributes;
        let Inputs { x, fc2_weight: fc2, .. } = *shapes;
        let (tokens, width) = (x[0] * x[1], x[2]);
        Ok(Problem { tokens, num_experts, width, hidden: fc2[1], out_width: fc2[2], activation })
    }

    fn variant(attributes: &Attributes, shapes: &Inputs<List<'_, PartialShape<'_>>>) -> Variant {
        let kind = attributes.activation as i64;
        let optional_inputs = if shapes.fc2_bias.is_some() { 2 } else { 0 };
        Variant { optional_inputs, kind, ..Variant::default() }
    }

    fn zeros(attributes: &Attributes, shapes: &Inputs<List<'_, PartialShape<'_>>>, input: usize) -> Option<Vec<usize>> {
        let weight = if Self::INPUTS.get(input)?.name == "fc1_bias" { shapes.fc1_weight } else { shapes.fc2_weight };
        Some(vec![attributes.num_experts, weight.get(2).copied()??])
    }

    fn body(variant: Variant) -> Body {
        body::body(variant)
    }

    fn reference(p: &Problem, inputs: &Inputs<List<'_, Tensor<'_>>>) -> Vec<f64> {
        let Inputs { x, fc1_weight: fc1, fc2_weight: fc2, expert_gates: gates, fc1_bias, fc2_bias } = *inputs;
        let columns = p.hidden * p.activation.columns();
        let first = |e: usize, c: usize, j: usize| fc1.data.at((e * p.width + c) * columns + j);
        let second = |e: usize, j: usize, c: usize| fc2.data.at((e * p.hidden + j) * p.out_width + c);
        reference(p, &x, &gates, [fc1_bias, fc2_bias], first, second)
    }

    fn examples() -> Vec<Example<Attributes>> {
        let example = |activation: Activation, biases: &[&[usize]]| {
            let columns = 5 * activation.columns();
            let shapes: [&[usize]; 4] = [&[2, 3, 6], &[3, 6, columns], &[3, 5, 7], &[2, 3, 3]];
            Example::new(Attributes { num_experts: 3, activation }, &[&shapes, biases].concat())
        };
        let every = Activation::ALL.iter().map(|&activation| example(activation, &[]));
        every.chain([example(Activation::SwiGlu, &[&[3, 10], &[3, 7]])]).collect()
    }
}

impl RoutedMlp {
    /// The sizes that a matrix of this shape implies, as input 1 or 2, with 0 tokens. Sizes that it does not determine
    /// are 1.
    ///
    /// # Errors
    /// [`Error::Shape`] if the matrix does not fit the attributes.
    pub fn of_weight(attributes: &Attributes, input: usize, weight: &[usize]) -> Result<Problem, Error> {
        let Attributes { num_experts: experts, activation } = *attributes;
        let columns = activation.columns();
        let inner = weight.get(1).copied().unwrap_or(1).max(1);
        let (width, fc1, fc2) = match input {
            1 => (inner, weight, &[experts, (weight.get(2).copied().unwrap_or(1) / columns).max(1), 1][..]),
            _ => (1, &[experts, 1, inner.saturating_mul(columns)][..], weight),
        };
        let shapes = [Some(&[0, 0, width][..]), Some(fc1), Some(fc2), Some(&[0, 0, experts])];
        let typed = crate::Attributes::new::<RoutedMlp>(*attributes)?;
        Self::OPERATOR.output_shape(&typed, &shapes)?;
        let Ok(inputs) = Self::inputs(&List { inputs: &shapes, absent: &[][..] });
        Self::problem(attributes, &inputs)
    }
}
