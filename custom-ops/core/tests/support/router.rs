//! Cases of TopKRouter, and their data.

use crate::call::Call;
use crate::data::Random;
use moh_kernels::schema::{TOP_K_ROUTER as OPERATOR, Value};
use moh_kernels::shape::top_k_router::{Heads, Kind};
use moh_kernels::{Attributes, DType};

#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) kind: Kind,
    pub(crate) tokens: usize,
    pub(crate) heads: usize,
    pub(crate) shared: Vec<usize>,
    pub(crate) top_k: usize,
    /// Of the queries of [`Kind::QueryNorms`].
    pub(crate) dim: usize,
    pub(crate) dtype: DType,
    pub(crate) seed: u64,
}

pub(crate) fn plain() -> Case {
    let shared = vec![0, 1];
    Case { kind: Kind::TwoStage, tokens: 37, heads: 6, shared, top_k: 2, dim: 24, dtype: DType::F32, seed: 1 }
}

pub(crate) fn attributes(kind: i64, heads: i64, top_k: i64, shared: &[i64]) -> Attributes {
    let value = |name: &str| match name {
        "kind" => Value::Int(kind),
        "num_heads" => Value::Int(heads),
        "top_k" => Value::Int(top_k),
        _ => Value::Ints(shared.to_vec()),
    };
    Attributes::read(&OPERATOR, |def| Some(value(def.name))).unwrap()
}

impl Case {
    pub(crate) fn attributes(&self) -> Attributes {
        let shared: Vec<i64> = self.shared.iter().map(|&head| head as i64).collect();
        attributes(self.kind as i64, self.heads as i64, self.top_k as i64, &shared)
    }

    pub(crate) fn shape(&self) -> Vec<usize> {
        let width = match self.kind {
            Kind::QueryNorms => self.heads * self.dim,
            _ => Heads::read(&self.attributes()).unwrap().columns(),
        };
        // One sequence where the tokens do not make two.
        let batch = if self.tokens.is_multiple_of(2) { 2 } else { 1 };
        vec![batch, self.tokens / batch, width]
    }

    /// Random numbers; among scores, many equal ones, zeros of both signs too.
    pub(crate) fn numbers(&self) -> Vec<f32> {
        let mut random = Random(self.seed);
        let number = |random: &mut Random| match self.kind {
            Kind::QueryNorms => random.signed(),
            _ => match random.bits() % 4 {
                0 => (random.signed() * 4.0).round() / 2.0,
                _ => random.signed() * 3.0,
            },
        };
        (0..self.shape().iter().product()).map(|_| number(&mut random)).collect()
    }

    pub(crate) fn call_with(&self, numbers: &[f32]) -> Call {
        let mut call = Call { attributes: self.attributes(), dtype: self.dtype, inputs: Vec::new() };
        call.input(&self.shape(), numbers);
        call
    }
}

/// Every kind, with as many different parts as there are.
pub(crate) fn kinds() -> Vec<Case> {
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
    ]
}
