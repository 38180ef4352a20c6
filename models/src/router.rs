//! Router logits to head gates: (batch, q_len, num_heads) in float32, 0 where a token does not use a head.

use crate::checkpoint::{Loader, Weight};
use crate::error::Error;
pub use crate::heads::{HeadCounts, HeadSet};
use crate::ops::{Binary, Linear, Ops, Reduce, Result, Type};

/// The trained two-stage router of MoH (arXiv 2410.11842, equations 5 to 7), as the published code computes it.
#[derive(Debug, Clone)]
pub struct TwoStage {
    heads: HeadSet,
    /// Scores of the routed heads, (routed, width). Present if `top_k > 0`.
    routed: Option<Linear>,
    /// Balance of the shared and the routed part, (2, width). Present if there are both.
    balance: Option<Linear>,
    /// Scores of the shared heads, (shared, width). Present if there are at least two.
    shared: Option<Linear>,
}

/// f32 machine epsilon, by which the published code bounds the divisor of the renormalisation.
const EPSILON: f32 = f32::EPSILON;

impl TwoStage {
    /// Takes `wg`, `wg_0` and `wg_1` below `prefix` from the checkpoint, those that the head counts ask for. Their rows are the
    /// routed and the shared heads in ascending order.
    pub fn load(loader: &mut Loader<'_>, prefix: &str, width: usize, heads: HeadSet) -> TwoStage {
        let counts = heads.counts();
        let mut matrix = |present: bool, name: &str, rows: usize| {
            present.then(|| Linear {
                weight: loader.weight(&format!("{prefix}.{name}.weight"), &[rows, width]),
                bias: None,
            })
        };
        let shared = counts.num_shared_heads;
        TwoStage {
            routed: matrix(counts.top_k > 0, "wg", counts.num_routed_heads()),
            balance: matrix(counts.top_k > 0 && shared > 0, "wg_0", 2),
            shared: matrix(shared > 1, "wg_1", shared),
            heads,
        }
    }

    /// The heads.
    pub fn heads(&self) -> &HeadSet {
        &self.heads
    }

    /// The gates of the tokens `x`, (batch, q_len, width).
    pub fn forward<O: Ops>(&self, ops: &mut O, x: &O::Value) -> Result<O::Value> {
        let counts = self.heads.counts();
        let x = &ops.cast(x, Type::F32)?;
        let probabilities = |ops: &mut O, matrix: &Linear, factor: usize| {
            let logits = ops.linear(x, matrix)?;
            let p = ops.softmax(&logits)?;
            let factor = ops.scalar(Type::F32, factor as f32)?;
            ops.mul(&p, &factor)
        };
        let shared = match &self.shared {
            Some(matrix) => Some(probabilities(ops, matrix, counts.num_shared_heads)?),
            None if counts.num_shared_heads == 1 => Some(ops.filled(Type::F32, x, 1, 1.0)?),
            None => None,
        };
        let routed = match &self.routed {
            Some(matrix) => {
                let logits = ops.linear(x, matrix)?;
                Some(self.routed_gates(ops, &logits)?)
            }
            None => None,
        };
        let (shared, routed) = match (shared, routed) {
            (Some(shared), Some(routed)) => {
                let Some(balance) = &self.balance else { return Err(Error::Internal("a router without wg_0")) };
                let w = probabilities(ops, balance, 2)?;
                let (w_shared, w_routed) = (ops.slice(&w, -1, 0, 1)?, ops.slice(&w, -1, 1, 2)?);
                (Some(ops.mul(&shared, &w_shared)?), Some(ops.mul(&routed, &w_routed)?))
            }
            one => one,
        };
        let gates = self.heads.place(ops, shared, routed)?;
        ops.gates(gates, counts.active())
    }

    /// The selected probabilities, renormalised to sum to `top_k`.
    fn routed_gates<O: Ops>(&self, ops: &mut O, logits: &O::Value) -> Result<O::Value> {
        let p = ops.softmax(logits)?;
        let counts = self.heads.counts();
        let kept = match counts.top_k < counts.num_routed_heads() {
            true => {
                let mask = ops.top_k_mask(&p, counts.top_k)?;
                ops.mul(&p, &mask)?
            }
            false => p,
        };
        let sum = ops.reduce(Reduce::Sum, &kept, &[-1])?;
        let epsilon = ops.scalar(Type::F32, EPSILON)?;
        let sum = ops.binary(Binary::Max, &sum, &epsilon)?;
        let top_k = ops.scalar(Type::F32, counts.top_k as f32)?;
        let factor = ops.binary(Binary::Div, &top_k, &sum)?;
        ops.mul(&kept, &factor)
    }
}

/// The router of MoH-LLaMA, which has no weights: the routed heads with the largest query norms, gates 0 and 1.
#[derive(Debug, Clone)]
pub struct QueryNorm {
    /// The heads.
    pub heads: HeadSet,
}

impl QueryNorm {
    /// The gates for queries (batch, q_len, num_heads, head_dim) as projected, before the rotation.
    ///
    /// The published code selects by softmax(n / std(n)), which has the order of the norms n; their squares have it too.
    pub fn forward<O: Ops>(&self, ops: &mut O, query: &O::Value) -> Result<O::Value> {
        let HeadCounts { num_shared_heads: shared, top_k, .. } = self.heads.counts();
        let flat = ops.reshape(query, &[0, 0, -1])?;
        let routed = match self.heads.counts().num_routed_heads() {
            0 => None,
            rest if top_k == 0 => Some(ops.filled(Type::F32, &flat, rest, 0.0)?),
            rest if top_k == rest => Some(ops.filled(Type::F32, &flat, rest, 1.0)?),
            _ => {
                let query = self.heads.take_routed(ops, query, 2)?;
                let query = ops.cast(&query, Type::F32)?;
                let squares = ops.mul(&query, &query)?;
                let norms = ops.reduce(Reduce::Sum, &squares, &[-1])?;
                let norms = ops.reshape(&norms, &[0, 0, -1])?;
                Some(ops.top_k_mask(&norms, top_k)?)
            }
        };
        let ones = match shared {
            0 => None,
            _ => Some(ops.filled(Type::F32, &flat, shared, 1.0)?),
        };
        let gates = self.heads.place(ops, ones, routed)?;
        ops.gates(gates, self.heads.counts().active())
    }
}

/// How an attention layer's gates come about.
#[derive(Debug, Clone)]
pub enum Router {
    /// Every gate is 1.
    Dense(usize),
    /// Trained.
    TwoStage(TwoStage),
}

impl Router {
    /// The head counts.
    pub fn heads(&self) -> HeadCounts {
        match self {
            Router::Dense(num_heads) => HeadCounts::dense(*num_heads),
            Router::TwoStage(router) => router.heads().counts(),
        }
    }

    /// The gates of the tokens `x`, (batch, q_len, width).
    pub fn forward<O: Ops>(&self, ops: &mut O, x: &O::Value) -> Result<O::Value> {
        match self {
            Router::Dense(num_heads) => {
                let ones = ops.filled(Type::F32, x, *num_heads, 1.0)?;
                ops.gates(ones, *num_heads)
            }
            Router::TwoStage(router) => router.forward(ops, x),
        }
    }
}

/// A weight and bias below `prefix`.
pub fn load_linear(loader: &mut Loader<'_>, prefix: &str, out: usize, input: usize, bias: bool) -> Linear {
    let weight: Weight = loader.weight(&format!("{prefix}.weight"), &[out, input]);
    let bias = bias.then(|| loader.weight(&format!("{prefix}.bias"), &[out]));
    Linear { weight, bias }
}

/// The router of MoA (arXiv 2210.05144, section 3.1) and of its mixtures of feed-forward experts: the experts with the largest
/// probabilities, whose gates are these probabilities.
#[derive(Debug, Clone)]
pub struct ExpertRouter {
    /// (width, num_experts), as x W.
    pub gate: Weight,
    /// Experts that a token uses.
    pub top_k: usize,
    /// Whether the gates of the selected experts are made to sum to 1 (equation 9). The published code leaves them as they are.
    pub renormalize: bool,
}

impl ExpertRouter {
    /// The gates of the tokens `x`, (batch, q_len, width); a token where `padding` (batch, q_len, 1), of booleans, is true has
    /// no experts.
    ///
    /// # Errors
    /// What the interpreter's operations fail with.
    pub fn forward<O: Ops>(&self, ops: &mut O, x: &O::Value, padding: Option<&O::Value>) -> Result<O::Value> {
        let num_experts = self.gate.shape()[1];
        let x = ops.cast(x, Type::F32)?;
        let gate = ops.weight(&self.gate, Type::F32)?;
        let logits = ops.matmul(&x, &gate)?;
        let mut gates = ops.softmax(&logits)?;
        if self.top_k < num_experts {
            let mask = ops.top_k_mask(&gates, self.top_k)?;
            gates = ops.mul(&gates, &mask)?;
            if self.renormalize {
                let sum = ops.reduce(Reduce::Sum, &gates, &[-1])?;
                gates = ops.binary(Binary::Div, &gates, &sum)?;
            }
        }
        if let Some(padding) = padding {
            let off = ops.scalar(Type::F32, 0.0)?;
            gates = ops.select(padding, &off, &gates)?;
        }
        ops.gates(gates, self.top_k)
    }
}
