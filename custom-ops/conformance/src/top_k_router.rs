//! Test cases of TopKRouter and their data.

use crate::{Call, Random};
use moh_operators::top_k_router::{self, Heads, Kind};
use moh_operators::{Attributes, DType, TopKRouter};

/// Sizes and options of a TopKRouter call.
#[derive(Debug, Clone)]
pub struct Case {
    /// How gates are computed from scores.
    pub kind: Kind,
    /// Number of tokens, as two sequences if even, else as one.
    pub tokens: usize,
    /// Heads.
    pub heads: usize,
    /// Heads that every token uses, ascending.
    pub shared: Vec<usize>,
    /// Routed heads per token.
    pub top_k: usize,
    /// Width of a head in the queries of [`Kind::QueryNorms`].
    pub dim: usize,
    /// The element type T.
    pub dtype: DType,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// A small case.
pub fn plain() -> Case {
    let shared = vec![0, 1];
    Case { kind: Kind::TwoStage, tokens: 37, heads: 6, shared, top_k: 2, dim: 24, dtype: DType::F32, seed: 1 }
}

impl Case {
    /// The attributes.
    pub fn attributes(&self) -> Attributes {
        Attributes::new::<TopKRouter>(self.typed()).unwrap()
    }

    fn typed(&self) -> top_k_router::Attributes {
        top_k_router::Attributes {
            kind: self.kind,
            num_heads: self.heads,
            top_k: self.top_k as i64,
            shared_heads: self.shared.iter().map(|&head| head as i64).collect(),
        }
    }

    /// The shape of the scores.
    pub fn shape(&self) -> Vec<usize> {
        let width = match self.kind {
            Kind::QueryNorms => self.heads * self.dim,
            _ => Heads::read(&self.typed()).unwrap().columns(),
        };
        // An odd number of tokens cannot be split into two sequences.
        let batch = if self.tokens.is_multiple_of(2) { 2 } else { 1 };
        vec![batch, self.tokens / batch, width]
    }

    /// Random scores, among them many ties and zeros of both signs.
    pub fn numbers(&self) -> Vec<f32> {
        let mut random = Random(self.seed);
        let number = |random: &mut Random| match self.kind {
            // Squares of sixteenths add up without rounding: the order of norms does not depend on how they are summed.
            Kind::QueryNorms => (random.signed() * 16.0).round() / 16.0,
            _ => match random.bits() % 4 {
                0 => (random.signed() * 4.0).round() / 2.0,
                _ => random.signed() * 3.0,
            },
        };
        (0..self.shape().iter().product()).map(|_| number(&mut random)).collect()
    }

    /// The call with these scores.
    pub fn call_with(&self, numbers: &[f32]) -> Call {
        let mut call = Call::new(self.attributes(), self.dtype);
        call.input(&self.shape(), numbers);
        call
    }
}

/// Cases of every kind, with each combination of parts (routed, balance, shared).
pub fn kinds() -> Vec<Case> {
    let case = |kind, heads, shared: &[usize], top_k| Case { kind, heads, shared: shared.to_vec(), top_k, ..plain() };
    vec![
        case(Kind::TwoStage, 6, &[0, 1], 2),
        case(Kind::TwoStage, 6, &[0, 1, 2], 3),
        case(Kind::TwoStage, 6, &[0, 1, 2, 3, 4, 5], 0),
        case(Kind::TwoStage, 5, &[], 2),
        case(Kind::TwoStage, 5, &[], 5),
        case(Kind::TwoStage, 5, &[3], 1),
        case(Kind::TwoStage, 2, &[1], 1),
        case(Kind::TwoStage, 1, &[], 1),
        case(Kind::TwoStage, 24, &[0, 3, 4, 11, 23], 12),
        case(Kind::TwoStage, 80, &[7, 70], 40),
        case(Kind::Probabilities, 8, &[], 3),
        case(Kind::Probabilities, 8, &[], 8),
        case(Kind::Probabilities, 300, &[], 5),
        case(Kind::Renormalized, 8, &[], 1),
        case(Kind::Renormalized, 33, &[], 16),
        case(Kind::QueryNorms, 8, &[0, 1, 2, 3], 2),
        case(Kind::QueryNorms, 7, &[6], 6),
        case(Kind::QueryNorms, 7, &[], 3),
        case(Kind::QueryNorms, 4, &[1, 2], 0),
        case(Kind::QueryNorms, 4, &[0, 1, 2, 3], 0),
        case(Kind::QueryNorms, 70, &[2, 5], 20),
        case(Kind::QueryNorms, 70, &[2], 0),
    ]
}
