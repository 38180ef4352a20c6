//! The router of Grouped Query Experts: every group of query heads that share a key/value head chooses among its own.

use super::{HeadSet, experts, load_linear, route};
use crate::checkpoint::Loader;
use crate::ops::{Linear, Ops, Result, Type};
use moh_operators::top_k_router::Kind;

/// Grouped Query Experts (arXiv 2606.20945): in each group the routed heads with the largest scores are on. Their gates are the softmax
/// over the selected scores, those of shared heads 1.
///
/// One TopKRouter routes all groups, as if each were a token.
#[derive(Debug, Clone)]
pub struct Grouped {
    heads: HeadSet,
    groups: usize,
    /// One score a routed head, group by group.
    scores: Linear,
}

impl Grouped {
    /// Takes `router.weight` (routed heads, width) below `prefix`. Every one of the `groups` has the same number of `heads`; its shared
    /// ones come first, and of the others at least one is chosen.
    pub fn load(loader: &mut Loader<'_>, prefix: &str, width: usize, heads: HeadSet, groups: usize) -> Grouped {
        let routed = heads.counts().num_routed_heads();
        let scores = load_linear(loader, &format!("{prefix}.router"), routed, width, false);
        Grouped { heads, groups, scores }
    }

    /// The heads of all groups.
    pub fn heads(&self) -> &HeadSet {
        &self.heads
    }

    /// The gates of the tokens `x`, (batch, q_len, width).
    ///
    /// # Errors
    /// What the interpreter's operations fail with.
    pub fn forward<O: Ops>(&self, ops: &mut O, x: &O::Value) -> Result<O::Value> {
        let counts = self.heads.counts();
        let of_group = |heads: usize| heads / self.groups;
        let (shared, routed) = (of_group(counts.num_shared_heads), of_group(counts.num_routed_heads()));
        let x = ops.cast(x, Type::F32)?;
        let scores = ops.linear(&x, &self.scores)?;
        let scores = ops.reshape(&scores, &[0, -1, routed as i64])?;
        let gates = route(ops, Kind::Renormalized, &experts(routed, of_group(counts.top_k)), &scores)?;
        let gates = match shared {
            0 => gates,
            _ => {
                let ones = ops.filled(Type::F32, &gates, shared, 1.0)?;
                ops.concat(&[&ones, &gates], -1)?
            }
        };
        let gates = ops.reshape(&gates, &[0, -1, counts.num_heads as i64])?;
        ops.gates(gates, counts.active())
    }
}
