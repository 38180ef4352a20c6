//! What side files say of a model.

use super::json;
use super::tokens::SpecialTokens;
use crate::error::Error;
use crate::graph::{Dim, ElementType, Graph, Value};
use crate::place::{Layout, Place};
use moh_models::{Checkpoint, Model};
use moh_runtime::names;
use serde_json::Value as Json;

/// What a model is to the stacks that serve it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Tokens to the logits of the next ones, with caches.
    LanguageModel { vocab_size: usize, layers: usize, num_heads: usize, kv_num_heads: usize, head_dim: usize },
    /// Images to the logits of classes.
    Classifier { channels: usize, size: usize, classes: usize },
    /// An image's noise, from which samplers make images.
    Diffusion,
    /// Source tokens to text, in three models.
    Translator,
    /// No stack knows it.
    Other,
}

/// A model and where it is written to.
pub(crate) struct Facts<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) model: &'a Model,
    /// As it is written.
    pub(crate) graph: &'a Graph,
    pub(crate) dtype: ElementType,
    pub(crate) kind: Kind,
    pub(crate) layout: Layout,
    pub(crate) place: &'a Place,
    /// Whether weights lie beside the model.
    pub(crate) external: bool,
    pub(crate) tokens: SpecialTokens,
    /// What the configuration of the whole model needs that a part of it does not say.
    pub(crate) translator: Vec<(&'static str, Json)>,
}

fn fixed(value: &Value, axis: usize) -> Option<usize> {
    match value.dims.get(axis)? {
        Dim::Fixed(n) => Some(*n),
        _ => None,
    }
}

/// What inputs and outputs tell.
fn kind(model: &Model, graph: &Graph) -> Option<Kind> {
    let input = |name: &str| graph.inputs.iter().find(|value| value.name == name);
    let output = |name: &str| graph.outputs.iter().find(|value| value.name == name);
    if let (Some(cache), Some(logits)) = (input("past_key_values.0.key"), output(names::LOGITS)) {
        let layers = model.layers();
        return Some(Kind::LanguageModel {
            vocab_size: fixed(logits, 2)?,
            layers: layers.len(),
            num_heads: layers.first()?.heads.num_heads,
            kv_num_heads: fixed(cache, 1)?,
            head_dim: fixed(cache, 3)?,
        });
    }
    if let (Some(pixels), Some(logits)) = (input("pixel_values"), output(names::LOGITS)) {
        return Some(Kind::Classifier {
            channels: fixed(pixels, 1)?,
            size: fixed(pixels, 2)?,
            classes: fixed(logits, 1)?,
        });
    }
    input("timestep").map(|_| Kind::Diffusion)
}

impl<'a> Facts<'a> {
    /// # Errors
    /// A file of the checkpoint that cannot be read or is no JSON.
    pub(crate) fn new(
        checkpoint: &'a Checkpoint,
        model: &'a Model,
        graph: &'a Graph,
        dtype: ElementType,
        (layout, place): (Layout, &'a Place),
        external: bool,
    ) -> Result<Facts<'a>, Error> {
        Ok(Facts {
            checkpoint,
            model,
            graph,
            dtype,
            kind: kind(model, graph).unwrap_or(Kind::Other),
            layout,
            place,
            external,
            tokens: SpecialTokens::read(checkpoint)?,
            translator: Vec::new(),
        })
    }

    /// The number of a key of the configuration, or the default that stood in for it.
    pub(super) fn number(&self, key: &str) -> Option<u64> {
        let default = || self.model.defaults().iter().find(|default| default.key == key)?.value.parse().ok();
        self.checkpoint.config().value(key).map_or_else(default, Json::as_u64)
    }

    /// The longest sequence of tokens.
    pub(crate) fn context(&self) -> Option<u64> {
        self.number(if self.kind == Kind::Translator { "max_target_positions" } else { "max_position_embeddings" })
    }

    /// The configuration and its text.
    pub(super) fn config(&self) -> Result<(serde_json::Map<String, Json>, String), Error> {
        let path = self.checkpoint.config().path();
        match self.checkpoint.preset() {
            None => Ok(json::read(path)?.unwrap_or_default()),
            Some(preset) => {
                let text = preset.config.to_owned();
                let values = serde_json::from_str(&text).map_err(|reason| moh_models::Error::Json {
                    file: path.to_owned(),
                    part: "configuration",
                    reason,
                })?;
                Ok((values, text))
            }
        }
    }

    /// A name for people: the preset's, or that of the checkpoint's folder.
    pub(super) fn name(&self) -> String {
        let folder = || {
            let folder = self.checkpoint.folder().canonicalize().ok()?;
            Some(folder.file_name()?.to_string_lossy().into_owned())
        };
        self.checkpoint.preset().map(|preset| preset.name.to_owned()).or_else(folder).unwrap_or("model".to_owned())
    }
}
