//! The layers: attention whose heads are experts, feed-forward, and the norms around them.

use super::config::{Part, Settings};
use crate::checkpoint::{Loader, Weight};
use crate::error::Error;
use crate::layers::{Experts, HeadLinear};
use crate::ops::{Argument, Linear, Ops, Result, Tap};
use crate::router::{ExpertRouter, load_linear};
use moh_operators::{RoutedAttention, routed_attention};

/// What all layers of a call share.
pub(super) struct Call<'a, V> {
    pub(super) settings: &'a Settings,
    /// Whether tokens are padding, (batch, sequence, 1) booleans. `None`: none is.
    pub(super) padding: Option<&'a V>,
}

/// A LayerNorm.
pub(super) struct Norm {
    weight: Weight,
    bias: Weight,
    eps: f32,
}

impl Norm {
    pub(super) fn load(l: &mut Loader<'_>, settings: &Settings, path: &str) -> Norm {
        let mut get = |name: &str| l.weight(&format!("{path}.{name}"), &[settings.width]);
        Norm { weight: get("weight"), bias: get("bias"), eps: settings.norm_eps }
    }

    pub(super) fn forward<O: Ops>(&self, ops: &mut O, x: &O::Value) -> Result<O::Value> {
        ops.layer_norm(x, self.weight.shape()[0], Some((&self.weight, &self.bias)), self.eps)
    }
}

/// Keys and values of one head: (batch, length, head_dim), or (batch, 1, length, head_dim) as in a cache.
type KeyValue<V> = [V; 2];

/// What a decoder attends to besides itself.
pub(super) struct Source<'a, V> {
    /// The encoder's output that is not in the cache yet, (batch, length, width). `None`: all is in the cache.
    pub(super) states: Option<&'a V>,
    /// Added to the scores of all its tokens, those in the cache first.
    pub(super) bias: &'a V,
}

/// A decoder layer's keys and values. `None`: nothing is cached yet.
pub(super) struct Caches<V> {
    pub(super) target: Option<KeyValue<V>>,
    pub(super) source: Option<KeyValue<V>>,
}

struct ExpertAttention {
    router: ExpertRouter,
    query: HeadLinear,
    key: Linear,
    value: Linear,
    output: HeadLinear,
    head_dim: usize,
}

impl ExpertAttention {
    fn load(l: &mut Loader<'_>, settings: &Settings, path: &str, source_width: usize) -> ExpertAttention {
        let Settings { width, head_dim, num_expert, .. } = *settings;
        let router = ExpertRouter {
            gate: l.weight(&format!("{path}.q_proj.w_gate"), &[width, num_expert]),
            top_k: settings.top_k,
            renormalize: settings.renormalize,
        };
        let mut experts = |name: &str, input: usize, output: usize| HeadLinear {
            weight: l.weight(&format!("{path}.q_proj.{name}.w"), &[num_expert, input, output]),
            bias: None,
            num_heads: num_expert,
        };
        ExpertAttention {
            router,
            query: experts("experts", width, head_dim),
            output: experts("output_experts", head_dim, width),
            key: load_linear(l, &format!("{path}.k_proj"), head_dim, source_width, false),
            value: load_linear(l, &format!("{path}.v_proj"), head_dim, source_width, false),
            head_dim,
        }
    }

    fn key_value<O: Ops>(&self, ops: &mut O, source: &O::Value) -> Result<KeyValue<O::Value>> {
        Ok([ops.linear(source, &self.key)?, ops.linear(source, &self.value)?])
    }

    /// The cache, followed by the keys and values of `source`.
    fn append<O: Ops>(
        &self,
        ops: &mut O,
        cache: Option<&KeyValue<O::Value>>,
        source: &O::Value,
    ) -> Result<KeyValue<O::Value>> {
        let [key, value] = self.key_value(ops, source)?;
        let mut joined = |kind: usize, new: &O::Value| {
            // With the length copied rather than inferred, it may be 0.
            let new = ops.reshape(new, &[0, 0, 1, self.head_dim as i64])?;
            let new = ops.transpose(&new, &[0, 2, 1, 3])?;
            match cache {
                Some(cached) => ops.concat(&[&cached[kind], &new], 2),
                None => Ok(new),
            }
        };
        Ok([joined(0, &key)?, joined(1, &value)?])
    }

    /// Attention of the tokens `x`, (batch, sequence, width), to the keys.
    fn attend<O: Ops>(
        &self,
        ops: &mut O,
        call: &Call<'_, O::Value>,
        x: &O::Value,
        [key, value]: &KeyValue<O::Value>,
        bias: Option<&O::Value>,
        is_causal: bool,
    ) -> Result<O::Value> {
        ops.tap(Tap::AttentionInput, x)?;
        let gates = self.router.forward(ops, x, call.padding)?;
        let query = self.query.project(ops, x, &gates)?;
        let attributes = routed_attention::Attributes {
            num_heads: self.query.num_heads,
            kv_num_heads: 1,
            scale: (self.head_dim as f32).powf(-0.5),
            is_causal,
        };
        let inputs = routed_attention::Inputs {
            query: Argument::Value(&query),
            key: Argument::Value(key),
            value: Argument::Value(value),
            head_gates: Argument::Value(&gates),
            attn_bias: bias.map(Argument::Value),
        };
        let y = ops.operator::<RoutedAttention>(attributes, &inputs)?;
        let y = self.output.combine(ops, &y, &gates)?;
        ops.tap(Tap::AttentionOutput, &y)?;
        Ok(y)
    }
}

enum FeedForward {
    Dense { fc1: Linear, fc2: Linear },
    Mixture { router: ExpertRouter, experts: Experts },
}

impl FeedForward {
    fn load(l: &mut Loader<'_>, settings: &Settings, path: &str) -> FeedForward {
        let Settings { width, ffn_width, num_expert, .. } = *settings;
        let Some(top_k) = settings.mixture else {
            return FeedForward::Dense {
                fc1: load_linear(l, &format!("{path}.fc1"), ffn_width, width, true),
                fc2: load_linear(l, &format!("{path}.fc2"), width, ffn_width, true),
            };
        };
        let mut get = |name: &str, shape: &[usize]| l.weight(&format!("{path}.ffd.{name}"), shape);
        // The published experts are as wide inside as the model.
        let square = [num_expert, width, width];
        FeedForward::Mixture {
            router: ExpertRouter {
                gate: get("w_gate", &[width, num_expert]),
                top_k,
                renormalize: settings.renormalize,
            },
            experts: Experts {
                fc1: get("experts.w", &square),
                fc2: get("output_experts.w", &square),
                biases: None,
                activation: settings.activation,
            },
        }
    }

    /// Padding is fed forward like any token.
    fn forward<O: Ops>(&self, ops: &mut O, settings: &Settings, x: &O::Value) -> Result<O::Value> {
        let y = match self {
            FeedForward::Dense { fc1, fc2 } => {
                let h = ops.linear(x, fc1)?;
                let h = ops.unary(settings.unary(), &h)?;
                ops.linear(&h, fc2)?
            }
            FeedForward::Mixture { router, experts } => {
                let gates = router.forward(ops, x, None)?;
                experts.forward(ops, x, &gates)?
            }
        };
        ops.tap(Tap::Output, &y)?;
        Ok(y)
    }
}

/// One layer of an encoder or decoder.
pub(super) struct Block {
    self_attn: ExpertAttention,
    self_attn_norm: Norm,
    /// In decoders.
    encoder_attn: Option<(ExpertAttention, Norm)>,
    ffd: FeedForward,
    final_norm: Norm,
}

impl Block {
    pub(super) fn load(l: &mut Loader<'_>, settings: &Settings, path: &str) -> Block {
        let mut attention = |name: &str, source_width: usize| {
            let path = format!("{path}.{name}");
            (
                ExpertAttention::load(l, settings, &path, source_width),
                Norm::load(l, settings, &format!("{path}_layer_norm")),
            )
        };
        let (self_attn, self_attn_norm) = attention("self_attn", settings.width);
        let encoder_attn = (settings.part == Part::Decoder).then(|| attention("encoder_attn", settings.source_width));
        Block {
            self_attn,
            self_attn_norm,
            encoder_attn,
            ffd: FeedForward::load(l, settings, path),
            final_norm: Norm::load(l, settings, &format!("{path}.final_layer_norm")),
        }
    }

    pub(super) fn encode<O: Ops>(
        &self,
        ops: &mut O,
        call: &Call<'_, O::Value>,
        x: &O::Value,
        bias: &O::Value,
    ) -> Result<O::Value> {
        let x = residual(ops, call.settings, x, &self.self_attn_norm, |ops, x| {
            ops.scoped("self_attn", |ops| {
                let source = self.self_attn.key_value(ops, x)?;
                self.self_attn.attend(ops, call, x, &source, Some(bias), false)
            })
        })?;
        self.feed_forward(ops, call, &x)
    }

    /// The layer's output; the caches grow.
    pub(super) fn decode<O: Ops>(
        &self,
        ops: &mut O,
        call: &Call<'_, O::Value>,
        x: &O::Value,
        source: &Source<'_, O::Value>,
        caches: &mut Caches<O::Value>,
    ) -> Result<O::Value> {
        let mut x = residual(ops, call.settings, x, &self.self_attn_norm, |ops, x| {
            ops.scoped("self_attn", |ops| {
                let target = self.self_attn.append(ops, caches.target.as_ref(), x)?;
                let y = self.self_attn.attend(ops, call, x, &target, None, true)?;
                caches.target = Some(target);
                Ok(y)
            })
        })?;
        if let Some((encoder_attn, norm)) = &self.encoder_attn {
            x = residual(ops, call.settings, &x, norm, |ops, x| {
                ops.scoped("encoder_attn", |ops| {
                    let keys = match (source.states, caches.source.take()) {
                        (None, Some(cached)) => cached,
                        (Some(states), cached) => encoder_attn.append(ops, cached.as_ref(), states)?,
                        (None, None) => return Err(Error::Internal("a decoder without a source")),
                    };
                    let y = encoder_attn.attend(ops, call, x, &keys, Some(source.bias), false)?;
                    caches.source = Some(keys);
                    Ok(y)
                })
            })?;
        }
        self.feed_forward(ops, call, &x)
    }

    fn feed_forward<O: Ops>(&self, ops: &mut O, call: &Call<'_, O::Value>, x: &O::Value) -> Result<O::Value> {
        let x = residual(ops, call.settings, x, &self.final_norm, |ops, x| {
            ops.scoped("ffd", |ops| self.ffd.forward(ops, call.settings, x))
        })?;
        ops.tap(Tap::Output, &x)?;
        Ok(x)
    }
}

/// x + f(norm(x)) where the norm comes before, else norm(x + f(x)).
fn residual<O: Ops>(
    ops: &mut O,
    settings: &Settings,
    x: &O::Value,
    norm: &Norm,
    f: impl FnOnce(&mut O, &O::Value) -> Result<O::Value>,
) -> Result<O::Value> {
    if settings.normalize_before {
        let normed = norm.forward(ops, x)?;
        let y = f(ops, &normed)?;
        return ops.add(x, &y);
    }
    let y = f(ops, x)?;
    let x = ops.add(x, &y)?;
    norm.forward(ops, &x)
}
