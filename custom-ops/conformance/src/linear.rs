//! Cases of Linear.

use crate::{Call, Random};
use moh_operators::{Attributes, DType, Linear, linear};

/// A case.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Rows of x.
    pub rows: usize,
    /// Length of a row.
    pub width: usize,
    /// Length of an output's row.
    pub out_width: usize,
    /// Whether there is a bias.
    pub bias: bool,
    /// The element type T.
    pub dtype: DType,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Case {
    /// The call with random inputs, scaled for outputs near 1.
    pub fn call(&self) -> Call {
        let Case { rows, width, out_width, .. } = *self;
        let mut random = Random(self.seed);
        let mut numbers = |count: usize, scale: f32| (0..count).map(|_| random.signed() * scale).collect::<Vec<_>>();
        let mut call = Call::new(Attributes::new::<Linear>(linear::Attributes {}).unwrap(), self.dtype);
        call.terms = width;
        call.input(&[rows, width], &numbers(rows * width, 1.0));
        call.input(&[width, out_width], &numbers(width * out_width, (3.0 / width as f32).sqrt()));
        if self.bias {
            call.input(&[out_width], &numbers(out_width, 1.0));
        }
        call
    }
}
