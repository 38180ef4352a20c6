//! Multiply-accumulates, of all heads and of those that are used.

use crate::shape::Shape;

/// Multiply-accumulates of the matrix products.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Macs {
    /// With every head computed, as the published code does.
    pub dense: u64,
    /// Without the heads that are off.
    pub routed: u64,
}

impl std::ops::AddAssign for Macs {
    fn add_assign(&mut self, other: Macs) {
        self.dense = self.dense.saturating_add(other.dense);
        self.routed = self.routed.saturating_add(other.routed);
    }
}

impl Macs {
    /// Work that does not depend on gates.
    pub(crate) fn all(macs: usize) -> Macs {
        Macs { dense: macs as u64, routed: macs as u64 }
    }

    /// `dense`, of which each of `heads` heads has an equal share, and the shares of the heads that the gates leave on.
    pub(crate) fn of_heads(dense: usize, heads: usize, gates: &Shape) -> Macs {
        let routed = dense / heads.max(1) * gates.active.unwrap_or(heads);
        Macs { dense: dense as u64, routed: routed as u64 }
    }

    /// The share of the dense work that routing saves.
    pub fn saved(&self) -> f64 {
        1.0 - self.routed as f64 / self.dense.max(1) as f64
    }
}
