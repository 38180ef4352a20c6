//! The sizes of a ViT's stages.

use crate::checkpoint::Config;
use crate::heads::{HeadCounts, MAX_HEADS, MAX_LAYERS};
use crate::ops::Result;

/// The sizes of a stage.
#[derive(Debug, Clone)]
pub(super) struct Shape {
    /// Channels.
    pub(super) width: usize,
    pub(super) heads: HeadCounts,
    /// Tokens a side.
    pub(super) side: usize,
    /// Pooled tokens a side.
    pub(super) pooled: usize,
    /// Tokens a side at the resolution of pre-training.
    pub(super) pretrained: usize,
    /// Side of the local window; `None` for full attention.
    pub(super) window: Option<usize>,
    /// Hidden units of a gated MLP's half.
    pub(super) mlp_hidden: usize,
    /// Hidden units of the relative bias MLP.
    pub(super) bias_hidden: usize,
    pub(super) qkv_bias: bool,
    pub(super) pool_norm_eps: f32,
    pub(super) depth: usize,
}

impl Shape {
    pub(super) fn head_dim(&self) -> usize {
        self.width / self.heads.num_heads
    }
}

const STAGES: usize = 4;

/// More tokens a side of the first stage than any model has, and elements of all tables of relative biases: 16 GiB.
const MAX_SIDE: usize = 1 << 10;
const MAX_TABLES: usize = 1 << 32;

/// One of `window_size`'s values: null and absence mean 3 where there is a window at all.
fn window_size(config: &Config, stage: usize) -> Result<usize> {
    let window = match config.value("window_size") {
        None => 3,
        Some(value) => {
            let one = value.as_array().map_or(Some(value), |list| list.get(stage)).filter(|value| !value.is_null());
            match one.map(serde_json::Value::as_u64) {
                None => 3,
                Some(Some(window)) => window as usize,
                Some(None) => 0,
            }
        }
    };
    if window % 2 == 1 && window < 1 << 10 {
        return Ok(window);
    }
    Err(config.rejects(
        "window_size",
        "odd numbers, one a stage",
        config.value("window_size").map_or(String::new(), |v| v.to_string()),
    ))
}

/// The sizes of the stages, from the configuration.
pub(super) fn shapes(config: &Config, routed: bool, image_size: usize, patch: usize) -> Result<Vec<Shape>> {
    let pretrain_size = config.usize_or("pretrain_size", image_size)?;
    for (key, size) in [("img_size", image_size), ("pretrain_size", pretrain_size)] {
        if !size.is_multiple_of(8 * patch) || !(16 * patch..=MAX_SIDE * patch).contains(&size) {
            let expected = format!("a multiple of {} from {} to {}", 8 * patch, 16 * patch, MAX_SIDE * patch);
            return Err(config.rejects(key, expected, size.to_string()));
        }
    }
    let list = |key: &str| config.usize_or_list(key, STAGES);
    let (widths, heads, depths, ratios) =
        (list("embed_dims")?, list("num_heads")?, list("depths")?, list("sr_ratios")?);
    config.note_default("mlp_ratios", "[8, 8, 4, 4]");
    config.note_default("window_size", 3);
    let mlp_ratios = match config.has("mlp_ratios") {
        true => list("mlp_ratios")?,
        false => vec![8, 8, 4, 4],
    };
    let (shared, top_k) = match routed {
        true if !config.has("shared_heads") => (list("shared_head")?, list("routed_head")?),
        _ => (heads.clone(), vec![0; STAGES]),
    };
    let fixed = match config.has("fixed_pool_size") {
        true => Some(config.size("fixed_pool_size", MAX_SIDE)?),
        false => None,
    };
    let mut shapes = Vec::new();
    for i in 0..STAGES {
        let counts = HeadCounts { num_heads: heads[i], num_shared_heads: shared[i], top_k: top_k[i] };
        if !(1..=1 << 16).contains(&widths[i]) {
            return Err(config.rejects("embed_dims", "numbers from 1 to 65536", widths[i].to_string()));
        }
        if !(1..=MAX_HEADS).contains(&counts.num_heads) || !widths[i].is_multiple_of(counts.num_heads) {
            let expected = format!("a divisor of embed_dims in stage {}, {}, up to {MAX_HEADS}", i + 1, widths[i]);
            return Err(config.rejects("num_heads", expected, heads[i].to_string()));
        }
        if depths[i] > MAX_LAYERS / STAGES {
            return Err(config.rejects(
                "depths",
                format!("numbers up to {}", MAX_LAYERS / STAGES),
                depths[i].to_string(),
            ));
        }
        if !(1..=1 << 10).contains(&mlp_ratios[i]) {
            return Err(config.rejects("mlp_ratios", "numbers from 1 to 1024", mlp_ratios[i].to_string()));
        }
        counts.check().map_err(|found| {
            config.rejects("shared_head, routed_head", "counts that make a router", format!("stage {}: {found}", i + 1))
        })?;
        let side = image_size / (patch << i);
        let pooled = if ratios[i] == 1 { side } else { fixed.unwrap_or(side / ratios[i].max(1)) };
        if ratios[i] == 0 || pooled == 0 || pooled > side {
            let expected = format!("pooling of {side} x {side} tokens in stage {}", i + 1);
            return Err(config.rejects("sr_ratios", expected, format!("{} (pool size {pooled})", ratios[i])));
        }
        shapes.push(Shape {
            width: widths[i],
            heads: counts,
            side,
            pooled,
            pretrained: pretrain_size / (patch << i),
            window: if ratios[i] == 1 { None } else { Some(window_size(config, i)?) },
            mlp_hidden: 2 * (widths[i] * mlp_ratios[i]) / 3,
            bias_hidden: config.size_or("cpb_hidden", 512, 1 << 16)?,
            qkv_bias: config.bool_or("qkv_bias", true)?,
            pool_norm_eps: config.eps_or("attn_pool_norm_eps", 1e-5)?,
            depth: depths[i],
        });
    }
    let table = |shape: &Shape| shape.depth * shape.heads.num_heads * (shape.side * shape.pooled).pow(2);
    let elements: usize = shapes.iter().map(table).sum();
    if elements > MAX_TABLES {
        let expected = format!("images whose tables of relative biases have up to {MAX_TABLES} elements");
        return Err(config.rejects("img_size", expected, format!("{image_size}, which makes {elements}")));
    }
    Ok(shapes)
}
