//! RoutedMLP's attributes and shapes.

use super::{Agreed, OutputDim, check_count, choice, count, show};
use crate::error::Error;
use crate::schema::{Attributes, ROUTED_MLP};

/// What happens between an expert's two matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// max(x, 0).
    Relu,
    /// x Phi(x).
    Gelu,
    /// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
    GeluTanh,
    /// x sigmoid(x).
    Silu,
    /// silu(gate) * other: the first matrix has both halves' columns.
    SwiGlu,
}

impl Activation {
    /// In the order of the attribute's values.
    pub const ALL: [Activation; 5] =
        [Activation::Relu, Activation::Gelu, Activation::GeluTanh, Activation::Silu, Activation::SwiGlu];

    /// Columns of the first matrix for each row of the second.
    pub fn columns(self) -> usize {
        if self == Activation::SwiGlu { 2 } else { 1 }
    }
}

/// A validated call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// Tokens of all sequences.
    pub tokens: usize,
    /// Experts.
    pub num_experts: usize,
    /// Width of x.
    pub width: usize,
    /// Rows of the second matrix.
    pub hidden: usize,
    /// Width of the output.
    pub out_width: usize,
    /// What happens between the matrices.
    pub activation: Activation,
}

impl Problem {
    /// Reads a validated call.
    ///
    /// # Errors
    /// As [`crate::Operator::output_shape`].
    pub fn new(attributes: &Attributes, inputs: &[Option<&[usize]>]) -> Result<Problem, Error> {
        let output = ROUTED_MLP.output_shape(attributes, inputs)?;
        let dims = |i: usize| inputs.get(i).copied().flatten().unwrap_or(&[0, 0, 0]);
        Ok(Problem {
            tokens: output[0] * output[1],
            num_experts: count(attributes, "num_experts")?,
            width: dims(0)[2],
            hidden: dims(2)[1],
            out_width: output[2],
            activation: activation(attributes)?,
        })
    }

    /// Of no tokens, read from the shape of one of the matrices alone: input 1 or 2. What that does not say is 1.
    ///
    /// # Errors
    /// As [`crate::Operator::output_shape`].
    pub fn of_weight(attributes: &Attributes, input: usize, weight: &[usize]) -> Result<Problem, Error> {
        let (experts, columns) = (count(attributes, "num_experts")?, activation(attributes)?.columns());
        let inner = weight.get(1).copied().unwrap_or(1).max(1);
        let (width, fc1, fc2) = match input {
            1 => (inner, weight, &[experts, (weight.get(2).copied().unwrap_or(1) / columns).max(1), 1][..]),
            _ => (1, &[experts, 1, inner.saturating_mul(columns)][..], weight),
        };
        Problem::new(attributes, &[Some(&[0, 0, width]), Some(fc1), Some(fc2), Some(&[0, 0, experts])])
    }
}

fn activation(attributes: &Attributes) -> Result<Activation, Error> {
    Ok(Activation::ALL[choice(attributes, "activation", Activation::ALL.len() as i64)? as usize])
}

/// See [`crate::Operator::infer`].
pub(crate) fn infer(attributes: &Attributes, inputs: &[Option<&[Option<usize>]>]) -> Result<Vec<OutputDim>, Error> {
    check_count(&ROUTED_MLP, inputs)?;
    let experts = count(attributes, "num_experts")?;
    let columns = activation(attributes)?.columns();
    let dims = |i: usize| inputs.get(i).copied().flatten().unwrap_or(&[]);
    let bad = |i: usize, expected: String| {
        Err(Error::Shape {
            operator: ROUTED_MLP.name,
            input: ROUTED_MLP.inputs[i].name,
            expected,
            found: show(dims(i)),
        })
    };
    let (mut width, mut hidden, mut out) = (Agreed::default(), Agreed::default(), Agreed::default());
    let (mut batch, mut q_len) = (Agreed::default(), Agreed::default());
    let all_experts = |e: Option<usize>| e.is_none_or(|e| e == experts);

    let x = dims(0);
    if !(x.len() == 3 && batch.accept(x[0]) && q_len.accept(x[1]) && x[2] != Some(0) && width.accept(x[2])) {
        return bad(0, "(batch, q_len, width)".to_owned());
    }
    let halved = |d: Option<usize>| match d {
        Some(d) if d == 0 || !d.is_multiple_of(columns) => None,
        d => Some(d.map(|d| d / columns)),
    };
    let fc1 = dims(1);
    let fits = fc1.len() == 3
        && all_experts(fc1[0])
        && width.accept(fc1[1])
        && halved(fc1[2]).is_some_and(|d| hidden.accept(d));
    if !fits {
        return bad(1, format!("({experts}, {}, {columns} * hidden)", width.show("width")));
    }
    let fc2 = dims(2);
    if !(fc2.len() == 3 && all_experts(fc2[0]) && hidden.accept(fc2[1]) && fc2[2] != Some(0) && out.accept(fc2[2])) {
        return bad(2, format!("({experts}, {}, out_width)", hidden.show("hidden")));
    }
    let gates = dims(3);
    if !(gates.len() == 3 && batch.accept(gates[0]) && q_len.accept(gates[1]) && all_experts(gates[2])) {
        return bad(3, format!("({}, {}, {experts})", batch.show("batch"), q_len.show("q_len")));
    }
    match (inputs.get(4).copied().flatten(), inputs.get(5).copied().flatten()) {
        (None, None) => {}
        (Some(b1), Some(b2)) => {
            let full = hidden.0.map(|hidden| hidden * columns);
            if !(b1.len() == 2 && all_experts(b1[0]) && Agreed(full).accept(b1[1])) {
                return bad(4, format!("({experts}, {})", Agreed(full).show("columns of fc1_weight")));
            }
            if !(b2.len() == 2 && all_experts(b2[0]) && out.accept(b2[1])) {
                return bad(5, format!("({experts}, {})", out.show("out_width")));
            }
        }
        _ => {
            return Err(Error::InputCount { operator: ROUTED_MLP.name, expected: "4 or 6".to_owned(), found: 5 });
        }
    }
    let out = out.0.map_or(OutputDim::Unknown, OutputDim::Size);
    Ok(vec![OutputDim::SameAs { input: 0, axis: 0 }, OutputDim::SameAs { input: 0, axis: 1 }, out])
}
