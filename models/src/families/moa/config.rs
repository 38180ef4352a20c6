//! What a MoA configuration says.

use crate::checkpoint::{Checkpoint, Config};
use crate::heads::{MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH};
use crate::ops::{Result, Unary};
use moh_operators::routed_mlp::Activation;

/// A part of an encoder-decoder model, each a graph of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Source tokens to hidden states, or to the logits of a masked language model.
    Encoder,
    /// Target tokens and the encoder's hidden states to logits.
    Decoder,
}

impl Part {
    /// The value of the configuration's key `part`.
    pub fn name(self) -> &'static str {
        match self {
            Part::Encoder => "encoder",
            Part::Decoder => "decoder",
        }
    }

    fn other(self) -> Part {
        match self {
            Part::Encoder => Part::Decoder,
            Part::Decoder => Part::Encoder,
        }
    }

    fn configured(checkpoint: &Checkpoint) -> Result<Part> {
        let config = checkpoint.config();
        // Behind a prefix that is to be removed, too.
        let holds = |part: Part| checkpoint.names().any(|name| name.split('.').any(|module| module == part.name()));
        match (config.str_opt("part")?, holds(Part::Encoder), holds(Part::Decoder)) {
            (Some("encoder"), ..) | (None, true, false) => Ok(Part::Encoder),
            (Some("decoder"), ..) | (None, false, true) => Ok(Part::Decoder),
            (found, ..) => {
                let expected = "encoder or decoder: each is a model of its own";
                Err(config.rejects("part", expected, found.unwrap_or("nothing")))
            }
        }
    }
}

/// Which calls a decoder's graph is for. One graph serves them all; Optimum has a graph for the first and one for the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Calls {
    All,
    /// The beginning of the target: no caches are given.
    First,
    /// What follows it: the source is in the caches.
    Later,
}

impl Calls {
    fn configured(config: &Config, part: Part) -> Result<Calls> {
        match (config.str_opt(DECODER_CALLS)?, part) {
            (None, _) | (_, Part::Encoder) => Ok(Calls::All),
            (Some("first"), _) => Ok(Calls::First),
            (Some("later"), _) => Ok(Calls::Later),
            (Some(_), _) => Err(config.invalid(DECODER_CALLS, "first or later")),
        }
    }
}

/// The key that says which calls a decoder's graph is for: `first` or `later`; without it, for all.
pub const DECODER_CALLS: &str = "decoder_calls";

/// The sizes and kinds of a part's modules.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) part: Part,
    pub(super) calls: Calls,
    pub(super) layers: usize,
    /// Channels.
    pub(super) width: usize,
    /// Channels of the encoder's output, which a decoder attends to.
    pub(super) source_width: usize,
    pub(super) head_dim: usize,
    pub(super) num_expert: usize,
    /// Experts that a token uses.
    pub(super) top_k: usize,
    /// Hidden units of a feed-forward layer that is no mixture.
    pub(super) ffn_width: usize,
    /// How many experts a token uses in feed-forward layers that are mixtures.
    pub(super) mixture: Option<usize>,
    pub(super) activation: Activation,
    /// Whether the gates of the selected experts are made to sum to 1.
    pub(super) renormalize: bool,
    pub(super) normalize_before: bool,
    /// Whether a norm follows the last layer.
    pub(super) final_norm: bool,
    pub(super) norm_eps: f32,
    /// The largest number of tokens that the model was made for.
    pub(super) max_positions: usize,
}

/// fairseq's keys are the same for both parts, with or without the part's name before them. Those of the other part count as
/// asked for.
pub(super) fn key(config: &Config, part: Part, name: &str) -> String {
    let [own, _] = [part, part.other()].map(|part| {
        let key = format!("{}_{name}", part.name());
        config.has(&key).then_some(key)
    });
    own.unwrap_or_else(|| name.to_owned())
}

/// Keys of fairseq that change what is computed and that this family does not know. Those with tensors of their own are found
/// by their tensors.
const UNSUPPORTED: &[&str] = &["cross_self_attention", "no_cross_attention", "adaptive_input", "tie_adaptive_weights"];

/// Keys that only one part reads, or one kind of layers, or a model with embeddings.
const ELSEWHERE: &[&str] = &[
    "decoder_embed_dim",
    "no_decoder_final_norm",
    "max_source_positions",
    "max_target_positions",
    "ffd_moe_k",
    "padding_idx",
    "no_token_positional_embeddings",
    "no_scale_embedding",
    "layernorm_embedding",
    "share_all_embeddings",
    "share_decoder_input_output_embed",
];

impl Settings {
    pub(super) fn read(checkpoint: &Checkpoint) -> Result<Settings> {
        let config = checkpoint.config();
        let part = Part::configured(checkpoint)?;
        for unsupported in UNSUPPORTED {
            if config.value(unsupported).is_some_and(|value| *value != false) {
                return Err(config.invalid(unsupported, "false"));
            }
        }
        config.refuse(&["adaptive_softmax_cutoff"], "null")?;
        let key = |name: &str| key(config, part, name);
        let width = config.size(&format!("{}_embed_dim", part.name()), MAX_WIDTH)?;
        for name in ["decoder_input_dim", "decoder_output_dim"] {
            let other = config.value(name).is_some_and(|value| *value != width);
            if part == Part::Decoder && other {
                return Err(config.invalid(name, format!("decoder_embed_dim = {width}")));
            }
        }
        // Of use to one part only, or in one kind of layers.
        config.know(ELSEWHERE);
        config.know(&[&key("ffn_embed_dim"), &key("learned_pos"), &key("vocab_size")]);
        let source_width = match part {
            Part::Encoder => width,
            Part::Decoder => config.size("encoder_embed_dim", MAX_WIDTH)?,
        };
        let num_expert = config.size("num_expert", MAX_HEADS)?;
        config.note_default("ffd_type", "normal");
        config.note_default("activation_fn", "relu");
        let mixture = match config.str_opt("ffd_type")? {
            None | Some("normal") => None,
            Some("moe") => Some(config.usize_or("ffd_moe_k", 4)?.clamp(1, num_expert)),
            Some(_) => return Err(config.invalid("ffd_type", "normal or moe")),
        };
        let activation = match config.str_opt("activation_fn")? {
            None | Some("relu") => Activation::Relu,
            Some("gelu") => Activation::Gelu,
            Some(_) => return Err(config.invalid("activation_fn", "relu or gelu")),
        };
        let normalize_before = config.bool_or(&key("normalize_before"), false)?;
        let bare = part == Part::Decoder && config.bool_or("no_decoder_final_norm", false)?;
        let positions = match part {
            Part::Encoder => "max_source_positions",
            Part::Decoder => "max_target_positions",
        };
        Ok(Settings {
            part,
            calls: Calls::configured(config, part)?,
            layers: config.size(&key("layers"), MAX_LAYERS)?,
            width,
            source_width,
            head_dim: config.size("head_dim", MAX_HEAD_DIM)?,
            num_expert,
            top_k: config.size(&key("attention_heads"), MAX_HEADS)?.min(num_expert),
            ffn_width: if mixture.is_some() { 0 } else { config.size(&key("ffn_embed_dim"), MAX_WIDTH)? },
            mixture,
            activation,
            renormalize: config.bool_or("renormalize_gates", false)?,
            normalize_before,
            final_norm: normalize_before && !bare,
            norm_eps: config.eps_or("layer_norm_eps", 1e-5)?,
            max_positions: config.size_or(positions, 1024, MAX_VOCABULARY)?,
        })
    }

    /// The activation between two linear layers.
    pub(super) fn unary(&self) -> Unary {
        match self.activation {
            Activation::Gelu => Unary::Gelu,
            _ => Unary::Relu,
        }
    }
}
