//! SwitchHead (arXiv 2312.07987): every head is on, and each token chooses experts for its value and output projections.
//!
//! Names, shapes and the computation are those of the published code (RobertCsordas/switchhead, `SwitchHeadRope`). With the
//! sigmoid s of the scores of a head h, and S the `moe_k` experts e with the largest of them:
//!
//! - `v_h = sum_{e in S} s_e x V_{h,e}` for each source token, scored by `sel_v`;
//! - `out = sum_h sum_{e in S} s_e (A_h v_h) O_{h,e}` for each query token, scored by `sel_o`.
//!
//! Experts that are not chosen have gates of 0 in `RoutedProjection` and `RoutedCombine`, whose heads are here the experts of all heads.

use super::cache::{Heads, Sequences};
use super::rope::Rotation;
use crate::checkpoint::{Config, Loader};
use crate::heads::MAX_HEADS;
use crate::layers::HeadLinear;
use crate::ops::{Binary, Linear, Ops, Reduce, Result, Type, Unary};
use crate::router::{experts, load_linear, route};
use moh_operators::top_k_router::Kind;

/// How many experts a head has for each of the two projections, and how many a token uses.
#[derive(Debug, Clone, Copy)]
pub(super) struct Experts {
    num_experts: usize,
    top_k: usize,
}

impl Experts {
    /// The keys `num_experts` and `moe_k`.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for counts that make no router.
    pub(super) fn configured(config: &Config, num_heads: usize) -> Result<Experts> {
        let num_experts = config.size("num_experts", MAX_HEADS)?;
        if num_experts < 2 {
            return Err(config.rejects("num_experts", "at least 2: with one, SwitchHead has other tensors", "1"));
        }
        if num_heads * num_experts > MAX_HEADS {
            let expected = format!("at most {MAX_HEADS} experts in all {num_heads} heads");
            return Err(config.rejects("num_experts", expected, num_experts.to_string()));
        }
        let top_k = config.usize("moe_k")?;
        if !(1..=num_experts).contains(&top_k) {
            return Err(config.rejects("moe_k", format!("1 to {num_experts} experts"), top_k.to_string()));
        }
        Ok(Experts { num_experts, top_k })
    }
}

/// How many channels of a head are rotated: the first ones, a share `rotate_fraction` of them (0.5).
///
/// # Errors
/// [`crate::Error::Config`] for a share that leaves no pairs of channels.
pub(super) fn rotated(config: &Config, head_dim: usize) -> Result<usize> {
    let fraction = config.f64_or("rotate_fraction", 0.5)?;
    let rotated = (fraction * head_dim as f64) as usize;
    match (0.0..=1.0).contains(&fraction) && rotated >= 2 && rotated.is_multiple_of(2) {
        true => Ok(rotated),
        false => {
            let expected = format!("a share, up to 1, that is an even number of the {head_dim} channels of a head");
            Err(config.rejects("rotate_fraction", expected, fraction.to_string()))
        }
    }
}

/// A layer's matrices.
pub(super) struct SwitchHead {
    sizes: Heads,
    q: Linear,
    k: Linear,
    v: Chosen,
    o: Chosen,
}

/// A projection of which each head has several.
struct Chosen {
    experts: Experts,
    num_heads: usize,
    /// `sel_v` or `sel_o`.
    name: &'static str,
    scores: Linear,
    /// One matrix an expert, those of a head next to each other.
    matrices: HeadLinear,
}

impl SwitchHead {
    /// The tensors below `prefix`, for tokens of `width`.
    pub(super) fn load(l: &mut Loader<'_>, prefix: &str, sizes: Heads, experts: Experts, width: usize) -> SwitchHead {
        let Heads { num_heads, head_dim, .. } = sizes;
        let all = num_heads * experts.num_experts;
        let path = |name: &str| format!("{prefix}.{name}");
        let [q, k] = ["q", "k"].map(|name| load_linear(l, &path(name), num_heads * head_dim, width, false));
        let mut chosen = |name: &'static str, matrices: &str, shape: [usize; 3]| Chosen {
            experts,
            num_heads,
            name,
            scores: Linear { weight: l.weight(&path(name), &[all, width]), bias: None },
            matrices: HeadLinear { weight: l.weight(&path(matrices), &shape), bias: None, num_heads: all },
        };
        let v = chosen("sel_v", "v", [all, width, head_dim]);
        let o = chosen("sel_o", "o", [all, head_dim, width]);
        SwitchHead { sizes, q, k, v, o }
    }

    /// The output for tokens `x`, and the cache with their keys and values.
    pub(super) fn forward<O: Ops>(
        &self,
        ops: &mut O,
        x: &O::Value,
        past: &[O::Value; 2],
        rotation: &Rotation<O::Value>,
        sequences: &Sequences<O::Value>,
    ) -> Result<(O::Value, [O::Value; 2])> {
        let Heads { num_heads, head_dim, .. } = self.sizes;
        let (heads, dim, experts) = (num_heads as i64, head_dim as i64, self.v.experts.num_experts as i64);
        let turned = |ops: &mut O, linear: &Linear| {
            let y = ops.linear(x, linear)?;
            let y = ops.reshape(&y, &[0, 0, heads, dim])?;
            rotation.rotate(ops, &y)
        };
        let q = turned(ops, &self.q)?;
        let q = ops.reshape(&q, &[0, 0, heads * dim])?;
        let k = turned(ops, &self.k)?;

        let (gates, factors) = self.v.gates(ops, x)?;
        let v = self.v.matrices.project(ops, x, &gates)?;
        let v = ops.reshape(&v, &[0, 0, heads, experts, dim])?;
        let v = ops.mul(&v, &factors)?;
        let v = ops.reduce(Reduce::Sum, &v, &[3])?;
        let v = ops.reshape(&v, &[0, 0, heads, dim])?;

        let on = ops.filled(Type::F32, x, num_heads, 1.0)?;
        let (y, present) = sequences.attend(ops, self.sizes, &q, &on, past, [k, v])?;

        let (gates, factors) = self.o.gates(ops, x)?;
        let y = ops.reshape(&y, &[0, 0, heads, 1, dim])?;
        let y = ops.mul(&y, &factors)?;
        let y = ops.reshape(&y, &[0, 0, heads * experts * dim])?;
        Ok((self.o.matrices.combine(ops, &y, &gates)?, present))
    }
}

impl Chosen {
    /// The experts' gates, (batch, q_len, heads * experts) in float32, and the same as factors, (batch, q_len, heads, experts, 1) in the
    /// model's type.
    fn gates<O: Ops>(&self, ops: &mut O, x: &O::Value) -> Result<(O::Value, O::Value)> {
        let Experts { num_experts, top_k } = self.experts;
        let gates = ops.scoped(self.name, |ops| {
            let x = ops.cast(x, Type::F32)?;
            let scores = ops.linear(&x, &self.scores)?;
            let gates = ops.unary(Unary::Sigmoid, &scores)?;
            // TopKRouter chooses for each head, as if it were a token. Like the published code it compares sigmoids. They differ by 1 at
            // most, so that its softmax over the chosen ones, which only tells them from the others, never rounds to 0.
            let of_heads = ops.reshape(&gates, &[0, -1, num_experts as i64])?;
            let chosen = route(ops, Kind::Renormalized, &experts(num_experts, top_k), &of_heads)?;
            let chosen = ops.reshape(&chosen, &[0, -1, (self.num_heads * num_experts) as i64])?;
            let zero = ops.scalar(Type::F32, 0.0)?;
            let off = ops.binary(Binary::Equal, &chosen, &zero)?;
            let gates = ops.select(&off, &zero, &gates)?;
            ops.gates(gates, self.num_heads * top_k)
        })?;
        let factors = ops.cast(&gates, Type::Model)?;
        let factors = ops.reshape(&factors, &[0, 0, self.num_heads as i64, num_experts as i64, 1])?;
        Ok((gates, factors))
    }
}
