//! Cases of LayerNorm.

use crate::{Call, Random};
use moh_operators::layer_norm::Attributes as LayerNormAttributes;
use moh_operators::{Attributes, DType, LayerNorm};

/// What modulates the rows of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Modulation {
    /// Nothing: the weight, and a bias or none.
    Nothing,
    /// A scale that has a row for each sequence.
    Scale,
    /// A scale and a shift that have a row for each sequence.
    PerSequence,
    /// A scale that has a row for each of x's, and a shift that has one for all.
    PerRow,
}

impl Modulation {
    /// Each of them.
    pub const ALL: [Modulation; 4] =
        [Modulation::Nothing, Modulation::Scale, Modulation::PerSequence, Modulation::PerRow];
}

/// A case.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Sequences, and the rows of each.
    pub rows: [usize; 2],
    /// Length of a row.
    pub width: usize,
    /// Whether there is a bias; with a modulation it is 0 otherwise.
    pub bias: bool,
    /// What modulates the rows.
    pub modulation: Modulation,
    /// The mean of x, whose standard deviation is near 1. (Of one number it is 0.)
    pub mean: f32,
    /// The element type T.
    pub dtype: DType,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// A case to start from.
pub const CASE: Case = Case {
    rows: [2, 5],
    width: 40,
    bias: true,
    modulation: Modulation::PerSequence,
    mean: 0.25,
    dtype: DType::F32,
    seed: 1,
};

impl Case {
    /// The call with random inputs.
    pub fn call(&self) -> Call {
        let Case { rows: [sequences, rows], width, bias, modulation, mean, dtype, seed } = *self;
        let mut random = Random(seed);
        let mut numbers = |count: usize, mean: f32, scale: f32| -> Vec<f32> {
            (0..count).map(|_| mean + random.signed() * scale).collect()
        };
        let attributes = Attributes::new::<LayerNorm>(LayerNormAttributes { epsilon: 1e-5 }).unwrap();
        let mut call = Call::new(attributes, dtype);
        // Neighbours are apart: the rounding of nearly equal numbers would be all that is left of them.
        let apart = |(i, x): (usize, f32)| x + if i % width % 2 == 0 { 1.0 } else { -1.0 };
        let x: Vec<f32> = numbers(sequences * rows * width, mean, 0.7).into_iter().enumerate().map(apart).collect();
        call.input(&[sequences, rows, width], &x);
        call.input(&[width], &numbers(width, 1.0, 0.5));
        match (bias, modulation) {
            (false, Modulation::Nothing) => return call,
            (true, _) => call.input(&[width], &numbers(width, 0.0, 1.0)),
            (false, _) => call.input(&[width], &vec![0.0; width]),
        }
        let per_sequence = [sequences, 1, width];
        let (scale, shift) = match modulation {
            Modulation::Nothing => return call,
            Modulation::Scale => (per_sequence, None),
            Modulation::PerSequence => (per_sequence, Some(per_sequence)),
            Modulation::PerRow => ([sequences, rows, width], Some([1, 1, width])),
        };
        call.input(&scale, &numbers(scale.iter().product(), 0.0, 0.7));
        if let Some(shift) = shift {
            call.input(&shift, &numbers(shift.iter().product(), 0.0, 1.0));
        }
        call
    }
}
