//! Router logits to head gates: (batch, q_len, num_heads) in float32, 0 where a token does not use a head.

use crate::checkpoint::{Loader, Weight};
pub use crate::heads::{HeadCounts, HeadSet};
use crate::ops::{Binary, Linear, Ops, Reduce, Result, Type};

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
                let (shared, routed) = gate_parts(ops, &logits, counts)?;
                self.heads.place(ops, shared, routed)?
            }
        };
        ops.gates(gates, counts.active())
    }
}

/// Rows of the parts of the scores, in this order.
struct Parts {
    routed: usize,
    balance: usize,
    shared: usize,
}

impl Parts {
    fn of(counts: HeadCounts) -> Parts {
        let (shared, routes) = (counts.num_shared_heads, counts.top_k > 0);
        Parts {
            routed: if routes { counts.num_routed_heads() } else { 0 },
            balance: if routes && shared > 0 { 2 } else { 0 },
            shared: if shared > 1 { shared } else { 0 },
        }
    }

    fn all(&self) -> usize {
        self.routed + self.balance + self.shared
    }
}

/// The gates of the shared and of the routed heads, where there are any.
type GateParts<V> = (Option<V>, Option<V>);

/// The gates from the scores of all parts.
fn gate_parts<O: Ops>(ops: &mut O, logits: &O::Value, counts: HeadCounts) -> Result<GateParts<O::Value>> {
    let parts = Parts::of(counts);
    let part = |ops: &mut O, start: usize, width: usize| match width {
        0 => Ok(None),
        _ if width == parts.all() => Ok(Some(logits.clone())),
        _ => ops.slice(logits, -1, start, start + width).map(Some),
    };
    let routed = part(ops, 0, parts.routed)?;
    let balance = part(ops, parts.routed, parts.balance)?;
    let shared = part(ops, parts.routed + parts.balance, parts.shared)?;
    let shared = shared.map(|logits| ops.softmax(&logits)).transpose()?;
    let routed = match routed {
        Some(logits) if counts.top_k < counts.num_routed_heads() => Some(ops.softmax_top_k(&logits, counts.top_k)?),
        Some(logits) => Some(ops.softmax(&logits)?),
        None => None,
    };
    // Each part sums to its number of active heads; two parts are weighed by twice their share of the balance.
    let (of_shared, of_routed) = (counts.num_shared_heads as f32, counts.top_k as f32);
    let Some(balance) = balance else {
        let scaled = |ops: &mut O, gates: Option<O::Value>, factor: f32| {
            let Some(gates) = gates else { return Ok(None) };
            let factor = ops.scalar(Type::F32, factor)?;
            ops.mul(&gates, &factor).map(Some)
        };
        return Ok((scaled(ops, shared, of_shared)?, scaled(ops, routed, of_routed)?));
    };
    let weights = ops.softmax(&balance)?;
    let factors = ops.constant(Type::F32, &[2], &[2.0 * of_shared, 2.0 * of_routed])?;
    let weights = ops.mul(&weights, &factors)?;
    let (of_shared, of_routed) = (ops.slice(&weights, -1, 0, 1)?, ops.slice(&weights, -1, 1, 2)?);
    let shared = match shared {
        Some(shared) => ops.mul(&shared, &of_shared)?,
        // A single shared head takes all of its part.
        None => of_shared,
    };
    let routed = routed.map(|routed| ops.mul(&routed, &of_routed)).transpose()?;
    Ok((Some(shared), routed))
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
