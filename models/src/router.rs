//! Router logits to head gates: (batch, q_len, num_heads) in float32, 0 where a token does not use a head.

mod grouped;

use crate::checkpoint::{Loader, Weight};
pub use crate::heads::{HeadCounts, HeadSet, Parts};
use crate::ops::{Argument, Linear, Ops, Result, Type};
pub use grouped::Grouped;
use moh_operators::top_k_router::{Attributes, Inputs, Kind, TopKRouter};

/// The trained two-stage router of MoH (arXiv 2410.11842, equations 5 to 7).
///
/// The published code selects from the softmax over all routed heads, and makes the selected probabilities sum to top_k: a
/// softmax over the selected logits. (It bounds the divisor by 1.2e-7, which the largest of a softmax never falls below.)
#[derive(Debug, Clone)]
pub struct TwoStage {
    heads: HeadSet,
    /// Scores of the routed heads (present if `top_k > 0`), balance of the shared and the routed part (2 rows, present if there
    /// are both), scores of the shared heads (present if there are at least two), one below the other; `None` without any.
    scores: Option<Linear>,
}

impl TwoStage {
    /// Takes `wg`, `wg_0` and `wg_1` below `prefix` from the checkpoint, those that the head counts ask for. Their rows are the
    /// routed and the shared heads in ascending order.
    pub fn load(loader: &mut Loader<'_>, prefix: &str, width: usize, heads: HeadSet) -> TwoStage {
        let parts = Parts::of(heads.counts());
        let named = [("wg", parts.routed), ("wg_0", parts.balance), ("wg_1", parts.shared)];
        let present = named.into_iter().filter(|(_, rows)| *rows > 0);
        let matrices: Vec<Weight> =
            present.map(|(name, rows)| loader.weight(&format!("{prefix}.{name}.weight"), &[rows, width])).collect();
        let joined = (!matrices.is_empty()).then(|| Weight::stacked(format!("{prefix}.router.weight"), &matrices));
        TwoStage { heads, scores: joined.map(|weight| Linear { weight, bias: None }) }
    }

    /// The heads.
    pub fn heads(&self) -> &HeadSet {
        &self.heads
    }

    /// The gates of the tokens `x`, (batch, q_len, width).
    pub fn forward<O: Ops>(&self, ops: &mut O, x: &O::Value) -> Result<O::Value> {
        let counts = self.heads.counts();
        let gates = match &self.scores {
            None => ops.filled(Type::F32, x, counts.num_heads, 1.0)?,
            Some(scores) => {
                let x = ops.cast(x, Type::F32)?;
                let logits = ops.linear(&x, scores)?;
                match counts.top_k {
                    // Nothing to choose: standard operators are as fast with the library, and faster without.
                    0 => {
                        let gates = ops.softmax(&logits)?;
                        let active = ops.scalar(Type::F32, counts.num_shared_heads as f32)?;
                        ops.mul(&gates, &active)?
                    }
                    _ => route(ops, Kind::TwoStage, &self.heads, &logits)?,
                }
            }
        };
        ops.gates(gates, counts.active())
    }
}

/// The router of MoH-LLaMA, which has no weights: the routed heads with the largest query norms, gates 0 and 1.
#[derive(Debug, Clone)]
pub struct QueryNorm {
    /// The heads.
    pub heads: HeadSet,
}

impl QueryNorm {
    /// The gates for queries (batch, q_len, num_heads * head_dim) as projected, before the rotation.
    ///
    /// The published code selects by softmax(n / std(n)), which has the order of the norms n; their squares have it too.
    pub fn forward<O: Ops>(&self, ops: &mut O, query: &O::Value) -> Result<O::Value> {
        let counts = self.heads.counts();
        let gates = match counts.active() == counts.num_heads {
            true => ops.filled(Type::F32, query, counts.num_heads, 1.0)?,
            false => route(ops, Kind::QueryNorms, &self.heads, query)?,
        };
        ops.gates(gates, counts.active())
    }
}

/// How an attention layer's gates come about.
#[derive(Debug, Clone)]
pub enum Router {
    /// Every gate is 1.
    Dense(usize),
    /// Trained.
    TwoStage(TwoStage),
    /// Trained, for each group of heads.
    Grouped(Grouped),
}

impl Router {
    /// The head counts.
    pub fn heads(&self) -> HeadCounts {
        match self {
            Router::Dense(num_heads) => HeadCounts::dense(*num_heads),
            Router::TwoStage(router) => router.heads().counts(),
            Router::Grouped(router) => router.heads().counts(),
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
            Router::Grouped(router) => router.forward(ops, x),
        }
    }
}

/// A weight and bias below `prefix`.
pub fn load_linear(loader: &mut Loader<'_>, prefix: &str, out: usize, input: usize, bias: bool) -> Linear {
    let weight: Weight = loader.weight(&format!("{prefix}.weight"), &[out, input]);
    let bias = bias.then(|| loader.weight(&format!("{prefix}.bias"), &[out]));
    Linear { weight, bias }
}

/// The gates of `heads`, (batch, q_len, num_heads) in float32, for scores as [`Kind`] asks for: TopKRouter.
///
/// # Errors
/// What the interpreter fails with.
pub fn route<O: Ops>(ops: &mut O, kind: Kind, heads: &HeadSet, scores: &O::Value) -> Result<O::Value> {
    ops.operator::<TopKRouter>(attributes(kind, heads), &Inputs { scores: Argument::Value(scores) })
}

/// TopKRouter's attributes for these heads.
pub(crate) fn attributes(kind: Kind, heads: &HeadSet) -> Attributes {
    let counts = heads.counts();
    Attributes {
        kind,
        num_heads: counts.num_heads,
        top_k: counts.top_k as i64,
        shared_heads: heads.shared().iter().map(|&head| head as i64).collect(),
    }
}

/// What the gates of experts are made of.
pub(crate) fn gating(renormalize: bool) -> Kind {
    if renormalize { Kind::Renormalized } else { Kind::Probabilities }
}

/// Experts, of which none is shared.
pub(crate) fn experts(num_experts: usize, top_k: usize) -> HeadSet {
    HeadSet::first(HeadCounts { num_heads: num_experts, num_shared_heads: 0, top_k })
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
        let mut gates = route(ops, gating(self.renormalize), &experts(num_experts, self.top_k), &logits)?;
        if let Some(padding) = padding {
            let off = ops.scalar(Type::F32, 0.0)?;
            gates = ops.select(padding, &off, &gates)?;
        }
        ops.gates(gates, self.top_k)
    }
}
