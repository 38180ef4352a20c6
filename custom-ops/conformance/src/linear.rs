//! Cases of Linear and LinearActivation.

use crate::{Call, Random};
use moh_operators::routed_mlp::Activation;
use moh_operators::{Attributes, DType, Linear, LinearActivation, linear, linear_activation};

/// What is done with the sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// Nothing.
    Nothing,
    /// An activation function.
    Activation(Activation),
    /// A residual is added.
    Residual,
    /// They are multiplied by a gate of the same shape.
    Gate,
    /// They are multiplied by a gate that has a row for every so many of x's, which are all of one sequence, and a residual is added.
    SharedGate(usize),
    /// A number is added to all, they are multiplied by another, and a third is added.
    Numbers,
}

impl Then {
    /// Those that are no activation function, where x's rows are sequences of `len`.
    pub fn linear(len: usize) -> [Then; 5] {
        [Then::Nothing, Then::Residual, Then::Gate, Then::SharedGate(len), Then::Numbers]
    }

    /// Each of them, where x's rows are sequences of `len`.
    pub fn all(len: usize) -> Vec<Then> {
        let activations = Activation::ALL.iter().filter(|activation| activation.columns() == 1);
        let activations = activations.map(|&activation| Then::Activation(activation));
        Then::linear(len).into_iter().chain(activations).collect()
    }
}

impl Then {
    /// Whether there is a gate or a residual.
    pub(crate) fn has_operands(self) -> bool {
        !matches!(self, Then::Nothing | Then::Activation(_))
    }

    /// Whether there is a residual.
    pub(crate) fn has_residual(self) -> bool {
        matches!(self, Then::Residual | Then::SharedGate(_) | Then::Numbers)
    }

    /// x's dimensions before the last one, where the call has so many rows.
    pub(crate) fn leading(self, rows: usize) -> Vec<usize> {
        match self {
            Then::SharedGate(len) if len > 0 && rows.is_multiple_of(len) => vec![rows / len, len],
            _ => vec![rows],
        }
    }

    /// Adds the gate and the residual of sums (leading, columns) to a call.
    pub(crate) fn operands(self, call: &mut Call, leading: &[usize], columns: usize, random: &mut Random) {
        let mut rows = |call: &mut Call, leading: &[usize], scale: f32| {
            let shape = [leading, &[columns]].concat();
            let count = shape.iter().product();
            call.input(&shape, &(0..count).map(|_| random.signed() * scale).collect::<Vec<_>>());
        };
        match self {
            Then::Nothing | Then::Activation(_) => return,
            Then::Gate => rows(call, leading, 1.5),
            Then::SharedGate(_) => match *leading {
                [batch, _] => rows(call, &[batch, 1], 1.5),
                _ => rows(call, &[1], 1.5),
            },
            Then::Residual => call.input(&[1], &[1.0]),
            Then::Numbers => call.input(&[1], &[-1.25]),
        }
        match self {
            Then::Numbers => call.input(&[1], &[0.5]),
            // Nothing more.
            Then::Gate => {}
            _ => rows(call, leading, 1.0),
        }
    }
}

/// A case.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Rows of x.
    pub rows: usize,
    /// Length of a row.
    pub width: usize,
    /// Length of an output's row.
    pub out_width: usize,
    /// Whether there is a bias; with a gate or a residual it is 0 otherwise.
    pub bias: bool,
    /// What is done with the sums.
    pub then: Then,
    /// The element type T.
    pub dtype: DType,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Case {
    /// The call with random inputs, scaled for outputs near 1.
    pub fn call(&self) -> Call {
        let Case { rows, width, out_width, then, .. } = *self;
        let mut random = Random(self.seed);
        let mut numbers = |count: usize, scale: f32| (0..count).map(|_| random.signed() * scale).collect::<Vec<_>>();
        let attributes = match then {
            Then::Activation(activation) => {
                Attributes::new::<LinearActivation>(linear_activation::Attributes { activation })
            }
            _ => Attributes::new::<Linear>(linear::Attributes {}),
        };
        let mut call = Call::new(attributes.unwrap(), self.dtype);
        call.terms = width;
        let leading = then.leading(rows);
        let shape = |last: usize| [&leading[..], &[last]].concat();
        call.input(&shape(width), &numbers(rows * width, 1.0));
        call.input(&[width, out_width], &numbers(width * out_width, (3.0 / width as f32).sqrt()));
        match (self.bias, then) {
            (_, Then::Numbers) => call.input(&[1], &[0.75]),
            (true, _) => call.input(&[out_width], &numbers(out_width, 1.0)),
            (false, then) if then.has_operands() => call.input(&[1], &[0.0]),
            (false, _) => return call,
        }
        then.operands(&mut call, &leading, out_width, &mut random);
        call
    }
}
