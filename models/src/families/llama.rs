//! LLaMA-like language models with a KV cache; one graph serves prefill and decode. Tensor names and configuration keys are
//! those of Hugging Face.
//!
//! - `llama`: every head on.
//! - `moh-llama`: routing by query norms, without weights. Keys of ours: `moh_shared_fraction` (0.5) and `moh_routed_fraction`
//!   (0.25), shares of all heads, rounded down, which the published code has as constants.
//! - `moh-llm`: the model that the MoH paper trains from scratch, with the two-stage router of MoH-ViT and MoH-DiT. Its weights
//!   were never published: `self_attn.wg`, `self_attn.wg_0` and `self_attn.wg_1` in every layer, and the keys `shared_head`
//!   and `routed_head` (a number, or one a layer), are named as in those.
//! - `gqe-llama`: Grouped Query Experts (arXiv 2606.20945), without published code. From the paper: each group of query heads that share
//!   a key/value head has a router, which chooses `group_top_k` of them for a token; the gates of the chosen ones sum to 1; keys and
//!   values stay dense; a shared head may always be on. Ours: the names `self_attn.router.weight` (routed heads, hidden), `group_top_k`
//!   and `group_shared_heads` (0; the first so many heads of each group, whose gates are 1), and that each head keeps its own block
//!   of `o_proj`. Where the weighted sum of a group's heads is projected, as summaries of the paper say, their blocks are equal.
//!
//! - `switchhead`: every head on, with experts for the value and output projections (arXiv 2312.07987), as the published attention
//!   module computes it. The blocks around it are a LLaMA's: the published code has only the attention.
//!
//! `moh-llama` and `moh-llm` take `shared_heads`, any set of heads a layer, with `top_k`; all of them experts ([`crate::mixture`]).

mod attention;
mod cache;
mod heads;
mod rope;
mod switchhead;

use super::{Family, Inputs, Layer, Port, PortDim, Sizes, Workload};
use crate::checkpoint::{Checkpoint, Loader, Weight};
use crate::heads::{HeadCounts, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_LENGTH, MAX_VOCABULARY, MAX_WIDTH};
use crate::mixture::{ExpertCounts, Mixture};
use crate::ops::{Linear, Ops, Result, Tap, Type};
use crate::router::load_linear;
use crate::sample::{Rng, Sample, SampleData};
use crate::warning::Warning;
use attention::RoutedHeads;
use cache::{Cache, Heads, Sequences};
use heads::head_sets;
use moh_operators::routed_mlp::Activation;
use rope::{Rope, Rotation};
use switchhead::{Experts, SwitchHead};

/// A LLaMA with its weights.
pub struct Llama {
    heads: Heads,
    vocab_size: usize,
    context: usize,
    norm_eps: f32,
    rope: Rope,
    cache: Cache,
    embed_tokens: Weight,
    blocks: Vec<Block>,
    norm: Weight,
    lm_head: Linear,
    /// Of a checkpoint with another output matrix than the configuration says.
    other_head: Option<Warning>,
}

struct Block {
    input_norm: Weight,
    attention: Attention,
    post_attention_norm: Weight,
    mlp: Mlp,
}

enum Attention {
    RoutedHeads(RoutedHeads),
    SwitchHead(SwitchHead),
}

enum Mlp {
    Dense { gate: Linear, up: Linear, down: Linear },
    Mixture(Mixture),
}

/// Name of the cache's dimension in inputs.
const PAST: PortDim = PortDim::Named("past");
const BATCH: PortDim = PortDim::Named("batch");
const SEQUENCE: PortDim = PortDim::Named("sequence");
/// Cached and new tokens. tract reads the name as the sum that it is.
const TOTAL: PortDim = PortDim::Named("past+sequence");

impl Family for Llama {
    fn load(name: &str, checkpoint: &Checkpoint) -> Result<Llama> {
        let config = checkpoint.config();
        let hidden_size = config.size("hidden_size", MAX_WIDTH)?;
        let num_heads = config.size("num_attention_heads", MAX_HEADS)?;
        let kv_num_heads = config.usize_or("num_key_value_heads", num_heads)?;
        if kv_num_heads == 0 || !num_heads.is_multiple_of(kv_num_heads) {
            let expected = format!("a divisor of num_attention_heads = {num_heads}");
            return Err(config.rejects("num_key_value_heads", expected, kv_num_heads.to_string()));
        }
        if !config.has("head_dim") && !hidden_size.is_multiple_of(num_heads) {
            let expected = format!("a divisor of hidden_size = {hidden_size}, as there is no head_dim");
            return Err(config.rejects("num_attention_heads", expected, num_heads.to_string()));
        }
        let head_dim = config.size_or("head_dim", hidden_size / num_heads, MAX_HEAD_DIM)?;
        let sizes = Heads { num_heads, kv_num_heads, head_dim };
        let (switch, rotated) = match name {
            "switchhead" if kv_num_heads != num_heads => {
                let expected =
                    format!("{num_heads}, as num_attention_heads: keys and values of SwitchHead are not shared");
                return Err(config.rejects("num_key_value_heads", expected, kv_num_heads.to_string()));
            }
            "switchhead" => (Some(Experts::configured(config, num_heads)?), switchhead::rotated(config, head_dim)?),
            _ if head_dim.is_multiple_of(2) => (None, head_dim),
            _ => return Err(config.rejects("head_dim", "an even number", head_dim.to_string())),
        };
        config.note_default("hidden_act", "silu");
        match config.str_opt("hidden_act")? {
            None | Some("silu" | "swish") => {}
            Some(other) => return Err(config.rejects("hidden_act", "silu", other)),
        }
        let layers = config.size("num_hidden_layers", MAX_LAYERS)?;
        let mlp_size = config.size("intermediate_size", MAX_WIDTH)?;
        let vocab_size = config.size("vocab_size", MAX_VOCABULARY)?;
        let (attention_bias, mlp_bias) = (config.bool_or("attention_bias", false)?, config.bool_or("mlp_bias", false)?);
        if attention_bias && switch.is_some() {
            return Err(config.rejects("attention_bias", "false: SwitchHead has no biases", "true"));
        }
        let tied = config.bool_or("tie_word_embeddings", false)?;
        let context = config.size_or("max_position_embeddings", 2048, MAX_LENGTH)?;
        let norm_eps = config.eps_or("rms_norm_eps", 1e-6)?;
        let rope = Rope::configured(config, (rotated, head_dim), context)?;
        let cache = Cache::configured(config)?;
        let sets = head_sets(config, name, (num_heads, kv_num_heads), layers)?;
        let experts = ExpertCounts::configured(config, layers)?;

        let mut loader = Loader::new(checkpoint);
        let l = &mut loader;
        let blocks = sets.into_iter().zip(experts).enumerate().map(|(i, (set, experts))| {
            let path = |name: &str| format!("model.layers.{i}.{name}");
            Block {
                input_norm: l.weight(&path("input_layernorm.weight"), &[hidden_size]),
                attention: match switch {
                    Some(experts) => {
                        Attention::SwitchHead(SwitchHead::load(l, &path("self_attn"), sizes, experts, hidden_size))
                    }
                    None => {
                        let (prefix, input) = (path("self_attn"), (hidden_size, attention_bias));
                        Attention::RoutedHeads(RoutedHeads::load(l, &prefix, name, (sizes, set), input))
                    }
                },
                post_attention_norm: l.weight(&path("post_attention_layernorm.weight"), &[hidden_size]),
                mlp: match experts {
                    Some(counts) => {
                        let sizes = (hidden_size, mlp_size);
                        Mlp::Mixture(Mixture::load(l, &path("mlp"), counts, sizes, Activation::SwiGlu))
                    }
                    None => Mlp::Dense {
                        gate: load_linear(l, &path("mlp.gate_proj"), mlp_size, hidden_size, mlp_bias),
                        up: load_linear(l, &path("mlp.up_proj"), mlp_size, hidden_size, mlp_bias),
                        down: load_linear(l, &path("mlp.down_proj"), hidden_size, mlp_size, mlp_bias),
                    },
                },
            }
        });
        let blocks = blocks.collect();
        let (embedding, head) = ("model.embed_tokens.weight", "lm_head.weight");
        // Of a matrix under two names, safetensors' `save_model` keeps the name that comes first.
        let kept = if tied && checkpoint.get(embedding).is_none() && checkpoint.get(head).is_some() {
            head
        } else {
            embedding
        };
        let embed_tokens = l.weight(kept, &[vocab_size, hidden_size]);
        let lm_head = match tied {
            true => embed_tokens.clone(),
            false => l.weight(head, &[vocab_size, hidden_size]),
        };
        let norm = l.weight("model.norm.weight", &[hidden_size]);
        // Old checkpoints store the rotary frequencies; they follow from the configuration.
        loader.finish(|name| name.ends_with(".rotary_emb.inv_freq") || (tied && name == head))?;
        let unused = checkpoint.get(head).filter(|_| tied && kept != head);
        let other_head = match unused {
            Some(head) if !head.equals(&embed_tokens)? => Some(Warning::Tied {
                file: head.file().to_owned(),
                tensor: head.name().to_owned(),
                used: embed_tokens.name().to_owned(),
                key: "tie_word_embeddings",
            }),
            _ => None,
        };
        Ok(Llama {
            heads: sizes,
            vocab_size,
            context,
            norm_eps,
            rope,
            cache,
            embed_tokens,
            blocks,
            norm,
            lm_head: Linear { weight: lm_head, bias: None },
            other_head,
        })
    }

    fn warning(&self) -> Option<&Warning> {
        self.other_head.as_ref()
    }

    fn layers(&self) -> Vec<Layer> {
        let layer = |(i, block): (usize, &Block)| Layer {
            path: format!("model.layers.{i}.self_attn"),
            heads: match &block.attention {
                Attention::RoutedHeads(attention) => attention.heads(),
                Attention::SwitchHead(_) => HeadCounts::dense(self.heads.num_heads),
            },
            kv_num_heads: self.heads.kv_num_heads,
            head_dim: self.heads.head_dim,
        };
        self.blocks.iter().enumerate().map(layer).collect()
    }

    fn inputs(&self) -> Vec<Port> {
        let mut ports = vec![
            Port::new("input_ids", Type::I64, &[BATCH, SEQUENCE]),
            Port::new("attention_mask", Type::I64, &[BATCH, self.cache.masked()]),
            Port::new("position_ids", Type::I64, &[BATCH, SEQUENCE]),
        ];
        ports.extend(self.cache_ports("past_key_values", PAST));
        ports
    }

    fn outputs(&self) -> Vec<Port> {
        let mut ports = vec![Port::new("logits", Type::Model, &[BATCH, SEQUENCE, PortDim::Fixed(self.vocab_size)])];
        ports.extend(self.cache_ports("present", self.cache.present()));
        ports
    }

    fn workload(&self) -> Workload {
        let tokens = self.context.min(512);
        let (batch, sequence, past) = (("batch", 1), ("sequence", tokens), ("past", 0));
        Workload { sizes: vec![batch, sequence, past, ("past+sequence", tokens), ("total", tokens)], tokens }
    }

    fn samples(&self, sizes: &Sizes) -> Vec<Vec<Sample>> {
        let (rng, batch) = (&mut Rng::new(2), sizes.or("batch", 2));
        // A left-padded prompt, then one token and three tokens on a filled cache.
        let calls = [(7, 0, 2), (1, 7, 2), (3, 4, 0)];
        let mut samples: Vec<Vec<Sample>> = calls
            .map(|(sequence, past, padding)| (sizes.or("sequence", sequence), sizes.or("past", past), padding))
            .map(|(sequence, past, padding)| {
                let call = Call { batch, sequence, tokens: past, capacity: past, left: 0, right: 0, room: 0 };
                self.sample(rng, Call { left: padding.min(sequence + past - 1), ..call })
            })
            .into();
        if self.cache == Cache::InPlace {
            // Room for more tokens than there are, and sequences of unequal length: padding on the left, or on the right.
            let sequence = sizes.or("sequence", 3);
            let capacity = sizes.or("past", sequence + 9);
            let tokens = capacity.saturating_sub(sequence) / 2;
            let call = Call { batch, sequence, tokens, capacity, left: 0, right: 0, room: 0 };
            samples.push(self.sample(rng, Call { left: call.tokens / 2, ..call }));
            samples.push(self.sample(rng, Call { right: call.tokens / 2, ..call }));
            // A prompt that is padded on the left, and a mask that makes room.
            samples.push(self.sample(rng, Call { tokens: 0, left: sequence - 1, room: 4, ..call }));
        }
        samples
    }

    fn forward<O: Ops>(&self, ops: &mut O, inputs: &Inputs<O::Value>) -> Result<Vec<O::Value>> {
        let rotation = ops.scoped("rotary", |ops| self.rope.rotation(ops, &inputs.get("position_ids")?))?;
        let sequences = ops.scoped("attention_mask", |ops| self.cache.sequences(ops, inputs))?;
        let mut x = ops.embedding(&self.embed_tokens, &inputs.get("input_ids")?)?;
        let mut cache = Vec::new();
        for (i, block) in self.blocks.iter().enumerate() {
            x = ops.scoped(&format!("model.layers.{i}"), |ops| {
                let past = |kind: &str| inputs.get(&format!("past_key_values.{i}.{kind}"));
                let normed = ops.rms_norm(&x, &block.input_norm, self.norm_eps)?;
                let (attended, present) = ops.scoped("self_attn", |ops| {
                    block.attention.forward(ops, &normed, &[past("key")?, past("value")?], &rotation, &sequences)
                })?;
                cache.extend(present);
                let x = ops.add(&x, &attended)?;
                let normed = ops.rms_norm(&x, &block.post_attention_norm, self.norm_eps)?;
                let fed = ops.scoped("mlp", |ops| block.mlp.forward(ops, &normed))?;
                let x = ops.add(&x, &fed)?;
                ops.tap(Tap::Output, &x)?;
                Ok(x)
            })?;
        }
        let x = ops.scoped("model.norm", |ops| {
            let x = ops.rms_norm(&x, &self.norm, self.norm_eps)?;
            ops.tap(Tap::Output, &x)?;
            Ok(x)
        })?;
        let logits = ops.scoped("lm_head", |ops| ops.linear(&x, &self.lm_head))?;
        let mut outputs = vec![logits];
        outputs.extend(cache);
        Ok(outputs)
    }
}

/// What a sample is of: `tokens` cached ones in caches with room for `capacity`, and how far the second row is padded.
#[derive(Debug, Clone, Copy)]
struct Call {
    batch: usize,
    sequence: usize,
    tokens: usize,
    capacity: usize,
    left: usize,
    right: usize,
    /// Zeros of the mask that make room in the cache.
    room: usize,
}

impl Attention {
    fn forward<O: Ops>(
        &self,
        ops: &mut O,
        x: &O::Value,
        past: &[O::Value; 2],
        rotation: &Rotation<O::Value>,
        sequences: &Sequences<O::Value>,
    ) -> Result<(O::Value, [O::Value; 2])> {
        ops.tap(Tap::AttentionInput, x)?;
        let (y, present) = match self {
            Attention::RoutedHeads(attention) => attention.forward(ops, x, past, rotation, sequences)?,
            Attention::SwitchHead(attention) => attention.forward(ops, x, past, rotation, sequences)?,
        };
        ops.tap(Tap::AttentionOutput, &y)?;
        Ok((y, present))
    }
}

impl Mlp {
    fn forward<O: Ops>(&self, ops: &mut O, x: &O::Value) -> Result<O::Value> {
        let y = match self {
            Mlp::Dense { gate, up, down } => {
                let gate = ops.linear(x, gate)?;
                let gate = ops.silu(&gate)?;
                let up = ops.linear(x, up)?;
                let h = ops.mul(&gate, &up)?;
                ops.linear(&h, down)?
            }
            Mlp::Mixture(mixture) => mixture.forward(ops, x)?,
        };
        ops.tap(Tap::Output, &y)?;
        Ok(y)
    }
}

impl Llama {
    fn cache_ports(&self, prefix: &str, length: PortDim) -> Vec<Port> {
        let dims = [BATCH, PortDim::Fixed(self.heads.kv_num_heads), length, PortDim::Fixed(self.heads.head_dim)];
        let port = |i: usize, kind: &str| Port::new(format!("{prefix}.{i}.{kind}"), Type::Model, &dims);
        (0..self.blocks.len()).flat_map(|i| [port(i, "key"), port(i, "value")]).collect()
    }

    fn sample(&self, rng: &mut Rng, call: Call) -> Vec<Sample> {
        let Call { batch, sequence, tokens, capacity, .. } = call;
        let of = |row: usize, padding: usize| if row == 1 { padding } else { 0 };
        let integers = |name: &str, width: usize, value: &dyn Fn(usize, usize) -> usize| Sample {
            name: name.to_owned(),
            shape: vec![batch, width],
            data: SampleData::I64((0..batch).flat_map(|row| (0..width).map(move |i| value(row, i) as i64)).collect()),
        };
        let (left, right) = (|row| of(row, call.left), |row| of(row, call.right));
        let position = |row: usize, i: usize| (tokens + i).checked_sub(left(row) + right(row)).unwrap_or(1);
        let total = tokens + sequence;
        let open = |row: usize, i: usize| usize::from(i >= left(row) && i + right(row) < total);
        let width = total + call.room;
        let mut samples = vec![
            rng.ids("input_ids", &[batch, sequence], self.vocab_size),
            integers("attention_mask", width, &open),
            integers("position_ids", sequence, &position),
        ];
        for i in 0..self.blocks.len() {
            for kind in ["key", "value"] {
                let shape = [batch, self.heads.kv_num_heads, capacity, self.heads.head_dim];
                samples.push(rng.normals(&format!("past_key_values.{i}.{kind}"), &shape));
            }
        }
        samples
    }
}
