//! Mixture-of-experts feed-forward layers, as MoH was combined with them (top 1 of 2 experts in the authors' rebuttal). Such
//! weights were never published, so the names are ours, after Hugging Face's: `gate.weight` (experts, width) scores the
//! experts; `experts.fc1` and `experts.fc2` with biases, or `experts.gate_up_proj` and `experts.down_proj` without, are
//! stacked, (experts, in, out).

use crate::checkpoint::{Config, Loader};
use crate::heads::MAX_HEADS;
use crate::layers::Experts;
use crate::ops::{Linear, Ops, Result, Type};
use crate::router::{experts, gating, route};
use moh_operators::routed_mlp::Activation;

/// How many experts a layer has and a token uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertCounts {
    /// All experts.
    pub num_experts: usize,
    /// Those that a token uses.
    pub top_k: usize,
    /// Whether the gates of the selected experts are made to sum to 1; else they are the softmax over all.
    pub renormalize: bool,
}

impl ExpertCounts {
    /// The keys `moe_num_experts` and `moe_top_k` (a number, or one a layer; 0 or 1 experts: none) and `moe_renormalize`.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for counts that make no router.
    pub fn configured(config: &Config, layers: usize) -> Result<Vec<Option<ExpertCounts>>> {
        if !config.has("moe_num_experts") {
            return Ok(vec![None; layers]);
        }
        let experts = config.usize_or_list("moe_num_experts", layers)?;
        config.note_default("moe_top_k", 1);
        let top_k = if config.has("moe_top_k") { config.usize_or_list("moe_top_k", layers)? } else { vec![1; layers] };
        let renormalize = config.bool_or("moe_renormalize", false)?;
        let count = |(num_experts, top_k): (usize, usize)| match num_experts {
            0 | 1 => Ok(None),
            _ if num_experts > MAX_HEADS => {
                Err(config.rejects("moe_num_experts", format!("at most {MAX_HEADS}"), num_experts.to_string()))
            }
            _ if top_k == 0 || top_k > num_experts => {
                Err(config.rejects("moe_top_k", format!("1 to {num_experts} experts"), top_k.to_string()))
            }
            _ => Ok(Some(ExpertCounts { num_experts, top_k, renormalize })),
        };
        experts.into_iter().zip(top_k).map(count).collect()
    }
}

/// A mixture of experts with its router.
#[derive(Debug, Clone)]
pub struct Mixture {
    counts: ExpertCounts,
    gate: Linear,
    experts: Experts,
}

impl Mixture {
    /// The tensors below `prefix`.
    pub fn load(
        l: &mut Loader<'_>,
        prefix: &str,
        counts: ExpertCounts,
        (width, hidden): (usize, usize),
        activation: Activation,
    ) -> Mixture {
        let n = counts.num_experts;
        let mut get = |name: &str, shape: &[usize]| l.weight(&format!("{prefix}.{name}"), shape);
        let gate = Linear { weight: get("gate.weight", &[n, width]), bias: None };
        let experts = match activation {
            Activation::SwiGlu => Experts {
                fc1: get("experts.gate_up_proj", &[n, width, 2 * hidden]),
                fc2: get("experts.down_proj", &[n, hidden, width]),
                biases: None,
                activation,
            },
            _ => Experts {
                fc1: get("experts.fc1.weight", &[n, width, hidden]),
                fc2: get("experts.fc2.weight", &[n, hidden, width]),
                biases: Some((get("experts.fc1.bias", &[n, hidden]), get("experts.fc2.bias", &[n, width]))),
                activation,
            },
        };
        Mixture { counts, gate, experts }
    }

    /// The mixture's output for tokens (batch, q_len, width).
    ///
    /// # Errors
    /// What the interpreter's operations fail with.
    pub fn forward<O: Ops>(&self, ops: &mut O, x: &O::Value) -> Result<O::Value> {
        let gates = self.gates(ops, x)?;
        self.experts.forward(ops, x, &gates)
    }

    fn gates<O: Ops>(&self, ops: &mut O, x: &O::Value) -> Result<O::Value> {
        let wide = ops.cast(x, Type::F32)?;
        let logits = ops.linear(&wide, &self.gate)?;
        let ExpertCounts { num_experts, top_k, renormalize } = self.counts;
        let gates = route(ops, gating(renormalize), &experts(num_experts, top_k), &logits)?;
        ops.gates(gates, top_k)
    }
}
