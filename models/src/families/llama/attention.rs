//! Attention over query heads that a token uses or not, which share key and value heads in groups.

use super::cache::{Heads, Sequences};
use super::rope::Rotation;
use crate::checkpoint::Loader;
use crate::heads::{HeadCounts, HeadSet};
use crate::layers::HeadLinear;
use crate::ops::{Linear, Ops, Result};
use crate::router::{Grouped, QueryNorm, Router, TwoStage, load_linear};

/// A layer's matrices and router.
pub(super) struct RoutedHeads {
    sizes: Heads,
    routing: Routing,
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: HeadLinear,
}

/// What the gates follow from.
enum Routing {
    /// The queries, all of which are needed for it.
    QueryNorm(QueryNorm),
    /// The attention's input.
    Input(Router),
}

impl RoutedHeads {
    /// The tensors of `family` below `prefix`, for tokens of `width`; `set` are the layer's heads.
    pub(super) fn load(
        l: &mut Loader<'_>,
        prefix: &str,
        family: &str,
        (sizes, set): (Heads, HeadSet),
        (width, bias): (usize, bool),
    ) -> RoutedHeads {
        let Heads { num_heads, kv_num_heads, head_dim } = sizes;
        let routing = match family {
            "gqe-llama" if set.counts().top_k > 0 => {
                Routing::Input(Router::Grouped(Grouped::load(l, prefix, width, set, kv_num_heads)))
            }
            "llama" | "gqe-llama" => Routing::Input(Router::Dense(num_heads)),
            "moh-llm" => Routing::Input(Router::TwoStage(TwoStage::load(l, prefix, width, set))),
            _ => Routing::QueryNorm(QueryNorm { heads: set }),
        };
        let (q_width, kv_width) = (num_heads * head_dim, kv_num_heads * head_dim);
        let path = |name: &str| format!("{prefix}.{name}");
        RoutedHeads {
            sizes,
            routing,
            q_proj: load_linear(l, &path("q_proj"), q_width, width, bias),
            k_proj: load_linear(l, &path("k_proj"), kv_width, width, bias),
            v_proj: load_linear(l, &path("v_proj"), kv_width, width, bias),
            o_proj: load_linear(l, &path("o_proj"), width, q_width, bias).over_heads(num_heads),
        }
    }

    pub(super) fn heads(&self) -> HeadCounts {
        match &self.routing {
            Routing::QueryNorm(router) => router.heads.counts(),
            Routing::Input(router) => router.heads(),
        }
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
        let Heads { num_heads, kv_num_heads, head_dim } = self.sizes;
        let (heads, kv_heads, dim) = (num_heads as i64, kv_num_heads as i64, head_dim as i64);
        let split = |ops: &mut O, linear: &Linear, heads: i64| {
            let y = ops.linear(x, linear)?;
            ops.reshape(&y, &[0, 0, heads, dim])
        };
        let (q, gates) = match &self.routing {
            Routing::QueryNorm(router) => {
                let q = ops.linear(x, &self.q_proj)?;
                let gates = router.forward(ops, &q)?;
                (ops.reshape(&q, &[0, 0, heads, dim])?, gates)
            }
            Routing::Input(router) => {
                let gates = router.forward(ops, x)?;
                let q = self.q_proj.clone().over_heads(num_heads).project(ops, x, &gates)?;
                (ops.reshape(&q, &[0, 0, heads, dim])?, gates)
            }
        };
        let q = rotation.rotate(ops, &q)?;
        let q = ops.reshape(&q, &[0, 0, heads * dim])?;
        let k = split(ops, &self.k_proj, kv_heads)?;
        let k = rotation.rotate(ops, &k)?;
        let v = split(ops, &self.v_proj, kv_heads)?;
        let (x, present) = sequences.attend(ops, self.sizes, &q, &gates, past, [k, v])?;
        Ok((self.o_proj.combine(ops, &x, &gates)?, present))
    }
}
