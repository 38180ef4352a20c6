//! What is before and after the layers of a complete model: embeddings, positions, and what makes logits.

use super::SENTENCE_ENCODER;
use super::config::{Part, Settings, key};
use super::layers::Norm;
use crate::checkpoint::{Checkpoint, Loader, Weight};
use crate::heads::MAX_VOCABULARY;
use crate::ops::{Binary, Linear, Ops, Reduce, Result, Type, Unary};
use crate::router::load_linear;
use crate::warning::Warning;

/// Tokens and their positions to vectors.
pub(super) struct Embedding {
    pub(super) tokens: Weight,
    /// The token that is padding; positions count from the number after it.
    pub(super) padding_idx: usize,
    scale: Option<f32>,
    positions: Positions,
    norm: Option<Norm>,
}

enum Positions {
    None,
    /// The angles' frequencies: sin(position * f), then cos(position * f); zeros at padding.
    Sinusoidal(Vec<f32>),
    /// A row each; that of `padding_idx` is for padding.
    Learned(Weight),
}

fn shares_all(checkpoint: &Checkpoint) -> Result<bool> {
    checkpoint.config().bool_or("share_all_embeddings", false)
}

/// Whether a decoder's embedding is what makes its logits, too.
fn shares_own(checkpoint: &Checkpoint) -> Result<bool> {
    checkpoint.config().bool_or("share_decoder_input_output_embed", false)
}

impl Embedding {
    /// The embedding below `root`; `None` for a stack, which has neither the tensor nor the key `vocab_size`.
    pub(super) fn load(l: &mut Loader<'_>, settings: &Settings, root: &str) -> Result<Option<Embedding>> {
        let (checkpoint, part, width) = (l.checkpoint(), settings.part, settings.width);
        let config = checkpoint.config();
        let rows = |name: &str| checkpoint.get(name).and_then(|weight| weight.shape().first()).copied();
        let mut name = format!("{root}.embed_tokens.weight");
        if rows(&name).is_none() {
            // Formats that store a shared tensor once keep one of its names.
            let names = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", PROJECTED];
            let shared = names.into_iter().find(|name| rows(name).is_some());
            let is_shared = shares_all(checkpoint)? || (part == Part::Decoder && shares_own(checkpoint)?);
            name = shared.filter(|_| is_shared).map_or(name, str::to_owned);
        }
        let vocab_key = key(config, part, "vocab_size");
        let vocab_size = match (config.has(&vocab_key), rows(&name)) {
            (true, _) => config.size(&vocab_key, MAX_VOCABULARY)?,
            (false, Some(rows)) => rows,
            (false, None) => return Ok(None),
        };
        let tokens = l.weight(&name, &[vocab_size, width]);
        let padding_idx = config.usize_or("padding_idx", 1)?;
        if padding_idx >= vocab_size {
            let expected = format!("one of {vocab_size} tokens");
            return Err(config.rejects("padding_idx", expected, padding_idx.to_string()));
        }
        let positions = if config.bool_or("no_token_positional_embeddings", false)? {
            Positions::None
        } else if config.bool_or(&key(config, part, "learned_pos"), false)? {
            let name = format!("{root}.embed_positions.weight");
            let rows = rows(&name).unwrap_or(settings.max_positions + padding_idx + 1);
            Positions::Learned(l.weight(&name, &[rows, width]))
        } else {
            if width < 4 || !width.is_multiple_of(2) {
                let expected = "an even number from 4 on, for sinusoidal positions";
                return Err(config.invalid(&format!("{}_embed_dim", part.name()), expected));
            }
            Positions::Sinusoidal(frequencies(width))
        };
        // fairseq's sentence encoders do not scale, and have no such option.
        let scaled = !config.bool_or("no_scale_embedding", root == SENTENCE_ENCODER)?;
        let normed = config.bool_or("layernorm_embedding", false)?;
        Ok(Some(Embedding {
            tokens,
            padding_idx,
            scale: scaled.then(|| (width as f32).sqrt()),
            positions,
            norm: normed.then(|| Norm::load(l, settings, &format!("{root}.layernorm_embedding"))),
        }))
    }

    pub(super) fn vocab_size(&self) -> usize {
        self.tokens.shape()[0]
    }

    /// The longest sequence, if there is one.
    pub(super) fn max_positions(&self) -> Option<usize> {
        match &self.positions {
            Positions::Learned(table) => Some(table.shape()[0].saturating_sub(self.padding_idx + 1)),
            _ => None,
        }
    }

    /// Vectors (batch, sequence, width) of `ids` (batch, sequence), where `keep` is 0.0 at padding and 1.0 elsewhere. The tokens
    /// follow those of `cache` (batch, 1, length, head_dim), if any.
    pub(super) fn forward<O: Ops>(
        &self,
        ops: &mut O,
        ids: &O::Value,
        keep: &O::Value,
        cache: Option<&O::Value>,
    ) -> Result<O::Value> {
        let mut x = ops.embedding(&self.tokens, ids)?;
        if let Some(scale) = self.scale {
            let scale = ops.scalar(Type::Model, scale)?;
            x = ops.mul(&x, &scale)?;
        }
        x = ops.scoped("embed_positions", |ops| self.add_positions(ops, x, keep, cache))?;
        match &self.norm {
            Some(norm) => norm.forward(ops, &x),
            None => Ok(x),
        }
    }

    fn add_positions<O: Ops>(
        &self,
        ops: &mut O,
        x: O::Value,
        keep: &O::Value,
        cache: Option<&O::Value>,
    ) -> Result<O::Value> {
        if matches!(self.positions, Positions::None) {
            return Ok(x);
        }
        // Padding is not counted; all of this is exact in float32 up to 2^24 tokens.
        let mut positions = ops.cumulative_sum(keep, 1)?;
        if let Some(cache) = cache {
            let cached = cached_length(ops, cache, keep)?;
            positions = ops.add(&positions, &cached)?;
        }
        let positions = ops.mul(&positions, keep)?;
        let first = ops.scalar(Type::F32, self.padding_idx as f32)?;
        let positions = ops.add(&positions, &first)?;
        let vectors = match &self.positions {
            Positions::None => return Ok(x),
            Positions::Learned(table) => {
                let positions = ops.cast(&positions, Type::I64)?;
                ops.embedding(table, &positions)?
            }
            Positions::Sinusoidal(frequencies) => {
                let positions = ops.reshape(&positions, &[0, 0, 1])?;
                let frequencies = ops.constant(Type::F32, &[frequencies.len()], frequencies)?;
                let angles = ops.mul(&positions, &frequencies)?;
                let (sin, cos) = (ops.unary(Unary::Sin, &angles)?, ops.unary(Unary::Cos, &angles)?);
                let vectors = ops.concat(&[&sin, &cos], -1)?;
                let keep = ops.reshape(keep, &[0, 0, 1])?;
                let vectors = ops.mul(&vectors, &keep)?;
                ops.cast(&vectors, Type::Model)?
            }
        };
        ops.add(&x, &vectors)
    }
}

/// The length of a cache (batch, 1, length, head_dim) as float32 (batch, 1); `like` is (batch, sequence).
fn cached_length<O: Ops>(ops: &mut O, cache: &O::Value, like: &O::Value) -> Result<O::Value> {
    // Runtimes disagree on sums over nothing: one more is counted, and taken off again.
    let counted = ops.filled(Type::F32, cache, 1, 1.0)?;
    let extra = ops.filled(Type::F32, like, 1, 1.0)?;
    let extra = ops.reshape(&extra, &[0, 1, 1, 1])?;
    let counted = ops.concat(&[&counted, &extra], 2)?;
    let sum = ops.reduce(Reduce::Sum, &counted, &[2])?;
    let sum = ops.reshape(&sum, &[0, 1])?;
    let one = ops.scalar(Type::F32, 1.0)?;
    ops.binary(Binary::Sub, &sum, &one)
}

/// fairseq's, which reach 1/10000 exactly; in float32, because angles are sensitive to their last digits.
fn frequencies(width: usize) -> Vec<f32> {
    let half = width / 2;
    let step = -(10_000f64.ln() / (half - 1) as f64) as f32;
    (0..half).map(|i| (i as f32 * step).exp()).collect()
}

/// The layer that makes logits, and what a masked language model has before it.
pub(super) struct Head {
    transform: Option<(Linear, Norm)>,
    projection: Linear,
    /// Of a matrix that the configuration does not use, and that is another one.
    pub(super) warning: Option<Warning>,
}

/// What makes a decoder's logits.
const PROJECTED: &str = "decoder.output_projection.weight";

/// Tensors of fairseq's `masked_lm` head.
const TRANSFORM: &str = "encoder.lm_head_transform_weight";
const TRANSFORM_NORM: &str = "encoder.layer_norm";
const BIAS: &str = "encoder.lm_output_learned_bias";
const PROJECTION: &str = "encoder.embed_out.weight";

impl Head {
    /// The head of a complete model; `None` for an encoder that is no language model.
    pub(super) fn load(
        l: &mut Loader<'_>,
        settings: &Settings,
        root: &str,
        embedding: &Embedding,
    ) -> Result<Option<Head>> {
        match settings.part {
            Part::Encoder => Head::masked_lm(l, settings, root, embedding),
            Part::Decoder => Ok(Some(Head::output_projection(l, settings, embedding)?)),
        }
    }

    fn masked_lm(l: &mut Loader<'_>, settings: &Settings, root: &str, embedding: &Embedding) -> Result<Option<Head>> {
        let (checkpoint, width, vocab_size) = (l.checkpoint(), settings.width, embedding.vocab_size());
        let holds = |name: &str| checkpoint.get(name).is_some();
        let transformed = holds(&format!("{TRANSFORM}.weight"));
        let task = checkpoint.config().value("task").is_some_and(|task| task == "masked_lm");
        if !(task || transformed || holds(BIAS) || holds(PROJECTION)) {
            return Ok(None);
        }
        if transformed && settings.final_norm && format!("{root}.layer_norm") == TRANSFORM_NORM {
            let expected = format!("false, as {TRANSFORM_NORM} is the norm of the head");
            return Err(checkpoint.config().rejects(
                &key(checkpoint.config(), Part::Encoder, "normalize_before"),
                expected,
                "true",
            ));
        }
        let weight = match holds(PROJECTION) {
            true => l.weight(PROJECTION, &[vocab_size, width]),
            false => embedding.tokens.clone(),
        };
        Ok(Some(Head {
            transform: transformed
                .then(|| (load_linear(l, TRANSFORM, width, width, true), Norm::load(l, settings, TRANSFORM_NORM))),
            projection: Linear { weight, bias: l.optional(BIAS, &[vocab_size]) },
            warning: None,
        }))
    }

    fn output_projection(l: &mut Loader<'_>, settings: &Settings, embedding: &Embedding) -> Result<Head> {
        let checkpoint = l.checkpoint();
        let own = shares_own(checkpoint)?;
        let key = if own { "share_decoder_input_output_embed" } else { "share_all_embeddings" };
        let is_shared = own || shares_all(checkpoint)?;
        let shape = [embedding.vocab_size(), settings.width];
        // A state dict holds a shared matrix under every name.
        let held = if is_shared { l.optional(PROJECTED, &shape) } else { Some(l.weight(PROJECTED, &shape)) };
        let other = match checkpoint.get(PROJECTED) {
            Some(held) if is_shared && held.shape() == shape && !held.equals(&embedding.tokens)? => Some(held),
            _ => None,
        };
        // Shapes, by which a preset is found, do not tell whether a matrix is shared: its numbers do.
        let is_used = !is_shared || (other.is_some() && checkpoint.preset().is_some());
        let warning = other.filter(|_| !is_used).map(|other| Warning::Tied {
            file: other.file().to_owned(),
            tensor: other.name().to_owned(),
            used: embedding.tokens.name().to_owned(),
            key,
        });
        let weight = held.filter(|_| is_used).unwrap_or_else(|| embedding.tokens.clone());
        Ok(Head { transform: None, projection: Linear { weight, bias: None }, warning })
    }

    /// Whether `masked_lm` has the tensor for other things than logits of tokens.
    pub(super) fn ignores(name: &str) -> bool {
        ["encoder.masked_lm_pooler.", "encoder.sentence_projection_layer."]
            .iter()
            .any(|prefix| name.starts_with(prefix))
    }

    pub(super) fn forward<O: Ops>(&self, ops: &mut O, settings: &Settings, x: &O::Value) -> Result<O::Value> {
        let Some((linear, norm)) = &self.transform else { return ops.linear(x, &self.projection) };
        let x = ops.scoped(TRANSFORM, |ops| {
            let x = ops.linear(x, linear)?;
            let x = ops.unary(settings.unary(), &x)?;
            norm.forward(ops, &x)
        })?;
        ops.linear(&x, &self.projection)
    }
}
