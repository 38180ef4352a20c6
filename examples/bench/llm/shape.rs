//! The sizes of a LLaMA, as its config.json has them.

use anyhow::{Context, Result, ensure};
use serde_json::Value as Json;
use std::path::Path;

/// A LLaMA's sizes.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Shape {
    pub(super) layers: usize,
    pub(super) hidden: usize,
    pub(super) mlp: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) vocabulary: usize,
    /// The longest sequence.
    pub(super) context: usize,
    pub(super) theta: f64,
    pub(super) epsilon: f32,
}

impl Shape {
    /// Reads the config.json of `model`: beside it, or in the folder above.
    pub(super) fn of(model: &Path) -> Result<Shape> {
        let folder = model.parent().unwrap_or(Path::new(""));
        let beside = [folder.join("config.json"), folder.join("../config.json")];
        let file = beside.iter().find(|file| file.is_file());
        let file = file.with_context(|| format!("{}: there is no config.json beside it", model.display()))?;
        let config: Json = serde_json::from_slice(&std::fs::read(file)?).with_context(|| file.display().to_string())?;
        Shape::read(&config).with_context(|| file.display().to_string())
    }

    fn read(config: &Json) -> Result<Shape> {
        let size = |key: &str| {
            config.get(key).and_then(Json::as_u64).map(|n| n as usize).with_context(|| format!("no size {key}"))
        };
        let number = |key: &str, default: f64| config.get(key).and_then(Json::as_f64).unwrap_or(default);
        let (hidden, heads) = (size("hidden_size")?, size("num_attention_heads")?);
        let shape = Shape {
            layers: size("num_hidden_layers")?,
            hidden,
            mlp: size("intermediate_size")?,
            heads,
            kv_heads: size("num_key_value_heads").unwrap_or(heads),
            head_dim: size("head_dim").unwrap_or(hidden / heads),
            vocabulary: size("vocab_size")?,
            context: size("max_position_embeddings").unwrap_or(2048),
            theta: number("rope_theta", 10000.0),
            epsilon: number("rms_norm_eps", 1e-6) as f32,
        };
        ensure!(shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads), "num_key_value_heads");
        Ok(shape)
    }

    /// A name that differs between shapes.
    pub(super) fn name(&self) -> String {
        let Shape { layers, hidden, mlp, heads, kv_heads, head_dim, vocabulary, .. } = self;
        format!("llama-{layers}x{hidden}-{mlp}-{heads}-{kv_heads}-{head_dim}-{vocabulary}")
    }
}
