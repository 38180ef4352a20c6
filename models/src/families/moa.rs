//! MoA, Mixture of Attention Heads (arXiv 2210.05144), as published on top of fairseq: encoders and decoders whose attention
//! heads are experts. All experts share one key and one value head; each has its own query and output matrix, and a token uses
//! `attention_heads` of the `num_expert` experts. Tensor names and configuration keys are fairseq's.
//!
//! A checkpoint with embeddings (or the key `vocab_size`) is a complete model, one without is a stack of layers that reads
//! `inputs_embeds`. The key `part` says which part of an encoder-decoder is meant:
//!
//! - an encoder reads tokens and `attention_mask` (0 is padding, anywhere) and gives `last_hidden_state`, or `logits` where it
//!   is a masked language model: it has tensors of fairseq's `masked_lm` head, or the key `task` is `masked_lm`;
//! - a decoder reads target tokens, the encoder's output and the caches, and gives `logits` (a stack: `last_hidden_state`) and
//!   the grown caches. Targets are padded on the right, if at all, with the token `padding_idx`.
//!
//! Keys, with `encoder_` or `decoder_` before those marked *, or without: `layers`*, `attention_heads`*, `ffn_embed_dim`*,
//! `normalize_before`* (false), `learned_pos`* (false: sinusoidal), `vocab_size`* (as the tensor has it); `encoder_embed_dim`,
//! `decoder_embed_dim`, `num_expert`, `head_dim`; `activation_fn` relu (default) or gelu; `ffd_type` normal (default) or moe, with
//! `ffd_moe_k` (4) active experts; `share_all_embeddings`, `share_decoder_input_output_embed`, `no_scale_embedding`,
//! `no_token_positional_embeddings`, `layernorm_embedding`, `no_decoder_final_norm` (false); `max_source_positions`,
//! `max_target_positions` (1024). Ours are `part`, `padding_idx` (1), `layer_norm_eps` (1e-5) and `renormalize_gates` (false: the
//! gates are probabilities among all experts, as published; true: among the selected ones, as in the paper's equation 9).
//!
//! One decoder graph serves every call. Keys and values of the source are those of `past_key_values.*.encoder`, followed by
//! those computed from `encoder_hidden_states`; `encoder_attention_mask` covers both. The first call gives the encoder's
//! output and empty caches; each later one gives back `present.*` and an `encoder_hidden_states` of length 0, so that the
//! source is projected once:
//!
//! | call | `encoder_hidden_states` | `past_key_values.*.encoder` | `encoder_attention_mask` |
//! |---|---|---|---|
//! | first | (batch, source, width) | (batch, 1, 0, head_dim) | (batch, source) |
//! | later | (batch, 0, width) | (batch, 1, source, head_dim) | (batch, source) |
//!
//! The key `decoder_calls`, which the exporter sets, makes a graph for one of them: `first` has no caches among its inputs,
//! `later` has neither `encoder_hidden_states` nor the source's `present`.

mod config;
mod embedding;
mod layers;
mod ports;

use super::{Family, Inputs, Layer, Port, Sizes, Workload};
use crate::checkpoint::{Checkpoint, Loader};
use crate::error::Error;
use crate::ops::{Binary, Ops, Result, Type};
use crate::router::HeadCounts;
use crate::sample::Sample;
use crate::warning::Warning;
use config::{Calls, Settings};
pub use config::{DECODER_CALLS, Part};
use embedding::{Embedding, Head};
use layers::{Block, Caches, Call, Norm, Source};

/// A part of a MoA model with its weights.
pub struct Moa {
    settings: Settings,
    /// Path of the module that holds the layers.
    root: String,
    /// `None` for a stack.
    embedding: Option<Embedding>,
    blocks: Vec<Block>,
    norm: Option<Norm>,
    /// What makes logits. `None`: the output is the last hidden state.
    head: Option<Head>,
}

/// Where fairseq's `masked_lm` keeps its encoder.
const SENTENCE_ENCODER: &str = "encoder.sentence_encoder";

/// Path of the module that holds the part's layers.
fn root(checkpoint: &Checkpoint, part: Part) -> &'static str {
    match part {
        Part::Decoder => "decoder",
        // Behind a prefix that is to be removed, too.
        Part::Encoder if checkpoint.names().any(|name| name.contains(SENTENCE_ENCODER)) => SENTENCE_ENCODER,
        Part::Encoder => "encoder",
    }
}

impl Family for Moa {
    fn load(_name: &str, checkpoint: &Checkpoint) -> Result<Moa> {
        let settings = Settings::read(checkpoint)?;
        let (part, root) = (settings.part, root(checkpoint, settings.part));
        let mut loader = Loader::new(checkpoint);
        let l = &mut loader;
        let embedding = Embedding::load(l, &settings, root)?;
        let blocks = (0..settings.layers).map(|i| Block::load(l, &settings, &format!("{root}.layers.{i}"))).collect();
        let norm = settings.final_norm.then(|| Norm::load(l, &settings, &format!("{root}.layer_norm")));
        let head = match &embedding {
            Some(embedding) => Head::load(l, &settings, root, embedding)?,
            None => None,
        };
        let mixtures = settings.mixture.is_some();
        loader.finish(|name| {
            let own = name.strip_prefix(root).and_then(|rest| rest.strip_prefix('.'));
            other_part(name, part) || Head::ignores(name) || own.is_some_and(|name| unused(name, mixtures))
        })?;
        Ok(Moa { settings, root: root.to_owned(), embedding, blocks, norm, head })
    }

    fn warning(&self) -> Option<&Warning> {
        self.head.as_ref()?.warning.as_ref()
    }

    fn layers(&self) -> Vec<Layer> {
        let settings = &self.settings;
        let heads = HeadCounts { num_heads: settings.num_expert, num_shared_heads: 0, top_k: settings.top_k };
        let modules: &[&str] = match settings.part {
            Part::Encoder => &["self_attn"],
            Part::Decoder => &["self_attn", "encoder_attn"],
        };
        let layer = |path: String| Layer { path, heads, kv_num_heads: 1, head_dim: settings.head_dim };
        let paths = (0..settings.layers).flat_map(|i| modules.iter().map(move |module| (i, module)));
        paths.map(|(i, module)| layer(format!("{}.layers.{i}.{module}", self.root))).collect()
    }

    fn inputs(&self) -> Vec<Port> {
        ports::inputs(self)
    }

    fn outputs(&self) -> Vec<Port> {
        ports::outputs(self)
    }

    fn workload(&self) -> Workload {
        ports::workload(self)
    }

    fn samples(&self, sizes: &Sizes) -> Vec<Vec<Sample>> {
        ports::samples(self, sizes)
    }

    fn forward<O: Ops>(&self, ops: &mut O, inputs: &Inputs<O::Value>) -> Result<Vec<O::Value>> {
        match self.settings.part {
            Part::Encoder => self.encode(ops, inputs),
            Part::Decoder => self.decode(ops, inputs),
        }
    }
}

/// Tensors of the part, named without its path, that a forward pass does not read: what fairseq computes anew, the noise of
/// training, the second names of the feed-forward layers, and segments, which nobody gives.
fn unused(name: &str, mixtures: bool) -> bool {
    let duplicate = |name: &str| name.split('.').rev().nth(2) == Some("ffd");
    matches!(
        name,
        "version" | "embed_positions._float_tensor" | "embed_positions.weights" | "segment_embeddings.weight"
    ) || name.ends_with(".w_noise")
        || (!mixtures && duplicate(name))
}

fn other_part(name: &str, part: Part) -> bool {
    match part {
        Part::Encoder => name.starts_with("decoder."),
        Part::Decoder => name.starts_with("encoder."),
    }
}

/// Whether tokens are padding: (batch, length) booleans.
fn padding<O: Ops>(ops: &mut O, mask: &O::Value) -> Result<O::Value> {
    let zero = ops.scalar(Type::I64, 0.0)?;
    ops.binary(Binary::Equal, mask, &zero)
}

/// `yes` where the condition holds, else `no`: of type `ty`.
fn choose<O: Ops>(ops: &mut O, condition: &O::Value, ty: Type, yes: f32, no: f32) -> Result<O::Value> {
    let (yes, no) = (ops.scalar(ty, yes)?, ops.scalar(ty, no)?);
    ops.select(condition, &yes, &no)
}

/// -inf at padded keys, else 0: (batch, 1, 1, length).
fn key_bias<O: Ops>(ops: &mut O, padding: &O::Value) -> Result<O::Value> {
    let bias = choose(ops, padding, Type::Model, f32::NEG_INFINITY, 0.0)?;
    ops.reshape(&bias, &[0, 1, 1, -1])
}

impl Moa {
    fn encode<O: Ops>(&self, ops: &mut O, inputs: &Inputs<O::Value>) -> Result<Vec<O::Value>> {
        let (padding, bias) = ops.scoped("attention_mask", |ops| {
            let padding = padding(ops, &inputs.get("attention_mask")?)?;
            Ok((padding.clone(), key_bias(ops, &padding)?))
        })?;
        let mut x = match &self.embedding {
            Some(embedding) => ops.scoped(&self.root, |ops| {
                let keep = choose(ops, &padding, Type::F32, 0.0, 1.0)?;
                let x = embedding.forward(ops, &inputs.get("input_ids")?, &keep, None)?;
                // fairseq begins with zeros at padded positions.
                let keep = ops.reshape(&keep, &[0, 0, 1])?;
                let keep = ops.cast(&keep, Type::Model)?;
                ops.mul(&x, &keep)
            })?,
            None => inputs.get("inputs_embeds")?,
        };
        let padding = ops.reshape(&padding, &[0, 0, 1])?;
        let call = Call { settings: &self.settings, padding: Some(&padding) };
        for (i, block) in self.blocks.iter().enumerate() {
            x = ops.scoped(&format!("{}.layers.{i}", self.root), |ops| block.encode(ops, &call, &x, &bias))?;
        }
        Ok(vec![self.finish(ops, x)?])
    }

    fn decode<O: Ops>(&self, ops: &mut O, inputs: &Inputs<O::Value>) -> Result<Vec<O::Value>> {
        let calls = self.settings.calls;
        let states = (calls != Calls::Later).then(|| inputs.get("encoder_hidden_states")).transpose()?;
        let bias = ops.scoped("encoder_attention_mask", |ops| {
            let padding = padding(ops, &inputs.get("encoder_attention_mask")?)?;
            key_bias(ops, &padding)
        })?;
        let (mut x, padding) = match &self.embedding {
            Some(embedding) => ops.scoped(&self.root, |ops| {
                let ids = inputs.get("input_ids")?;
                let padding_idx = ops.scalar(Type::I64, embedding.padding_idx as f32)?;
                let padding = ops.binary(Binary::Equal, &ids, &padding_idx)?;
                let keep = choose(ops, &padding, Type::F32, 0.0, 1.0)?;
                let cached = || inputs.get(&ports::past_name(0, "decoder", "key"));
                let cached = (calls != Calls::First).then(cached).transpose()?;
                let x = embedding.forward(ops, &ids, &keep, cached.as_ref())?;
                Ok((x, Some(ops.reshape(&padding, &[0, 0, 1])?)))
            })?,
            None => (inputs.get("inputs_embeds")?, None),
        };
        let call = Call { settings: &self.settings, padding: padding.as_ref() };
        let source = Source { states: states.as_ref(), bias: &bias };
        let mut present = Vec::with_capacity(4 * self.blocks.len());
        for (i, block) in self.blocks.iter().enumerate() {
            let past = |of: &str| {
                let of_kind = |kind: &str| inputs.get(&ports::past_name(i, of, kind));
                let both = || Ok::<_, Error>([of_kind("key")?, of_kind("value")?]);
                (calls != Calls::First).then(both).transpose()
            };
            let mut caches = Caches { target: past("decoder")?, source: past("encoder")? };
            let path = format!("{}.layers.{i}", self.root);
            x = ops.scoped(&path, |ops| block.decode(ops, &call, &x, &source, &mut caches))?;
            let source = caches.source.filter(|_| calls != Calls::Later);
            present.extend(caches.target.into_iter().chain(source).flatten());
        }
        let mut outputs = vec![self.finish(ops, x)?];
        outputs.append(&mut present);
        Ok(outputs)
    }

    /// What follows the layers.
    fn finish<O: Ops>(&self, ops: &mut O, x: O::Value) -> Result<O::Value> {
        let x = match &self.norm {
            Some(norm) => norm.forward(ops, &x)?,
            None => x,
        };
        match &self.head {
            Some(head) => head.forward(ops, &self.settings, &x),
            None => Ok(x),
        }
    }
}
