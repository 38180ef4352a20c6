//! What a checkpoint would cost to run: heads, parameters and multiply-accumulates, layer by layer.

use crate::report::{runs, short};
use moh_models::Model;
use moh_models::checkpoint::DefaultValue;
use moh_models::count::Macs;
use moh_models::families::{PortDim, Tensors};
use serde::Serialize;
use std::fmt;

/// The lengths to count at.
#[derive(Debug, Clone, Copy)]
pub struct Lengths {
    /// New tokens of a sequence; `None`: the family's default.
    pub tokens: Option<usize>,
    /// Cached tokens of a sequence.
    pub past: usize,
}

/// One attention layer.
#[derive(Debug, Clone, Serialize)]
pub struct LayerCost {
    /// Module path.
    pub path: String,
    /// Heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub kv_num_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Heads that every token uses.
    pub num_shared_heads: usize,
    /// Further heads that a token uses.
    pub top_k: usize,
    /// Numbers in the module.
    pub parameters: usize,
    /// Multiply-accumulates with every head computed.
    pub macs_dense: u64,
    /// Multiply-accumulates without the heads that are off.
    pub macs_routed: u64,
}

/// A model's costs.
#[derive(Debug, Clone, Serialize)]
pub struct Inspection {
    /// The family.
    pub family: String,
    /// Sizes of the named dimensions that were counted at.
    pub sizes: Vec<(String, usize)>,
    /// The attention layers.
    pub layers: Vec<LayerCost>,
    /// Numbers in the whole model.
    pub parameters: usize,
    /// Multiply-accumulates of the whole model with every head computed.
    pub macs_dense: u64,
    /// Multiply-accumulates of the whole model without the heads that are off.
    pub macs_routed: u64,
    /// Bytes of KV cache for each token, in f32; 0 without a cache.
    pub cache_bytes_per_token: usize,
    /// Defaults that stand in for absent keys of the configuration, those of heads and routing first.
    pub defaults: Vec<DefaultValue>,
    /// What is probably not as it was meant.
    pub warnings: Vec<String>,
}

/// Below this share a model gains nothing that anyone would notice.
const NOTICEABLE: f64 = 0.03;

/// Counts `model`, whose tensors are `tensors`.
///
/// # Errors
/// Lengths that the model can't have.
pub fn inspect(model: &Model, tensors: &Tensors, lengths: Lengths) -> Result<Inspection, moh_models::Error> {
    let workload = model.workload();
    let mut sizes = workload.sizes;
    let tokens = lengths.tokens.or(sizes.iter().find(|(name, _)| *name == "sequence").map(|(_, n)| *n)).unwrap_or(1);
    let source = sizes.iter().find(|(name, _)| *name == "encoder_sequence").map_or(0, |(_, n)| *n);
    for (name, size) in &mut sizes {
        *size = match *name {
            // Where the target has a cache, the source is in its own.
            "encoder_sequence" if lengths.past > 0 => 0,
            "encoder_past" if lengths.past > 0 => source,
            "sequence" => tokens,
            "past" => lengths.past,
            "past+sequence" => lengths.past + tokens,
            _ => *size,
        };
    }
    let count = model.count(&sizes)?;
    let below = |path: &str| {
        let inside =
            tensors.iter().filter(|(name, _)| name.strip_prefix(path).is_some_and(|rest| rest.starts_with('.')));
        inside.map(|(_, shape)| shape.iter().product::<usize>()).sum()
    };
    let layers = model.layers().into_iter().map(|layer| {
        let Macs { dense, routed } = count.below(&layer.path);
        LayerCost {
            num_heads: layer.heads.num_heads,
            kv_num_heads: layer.kv_num_heads,
            head_dim: layer.head_dim,
            num_shared_heads: layer.heads.num_shared_heads,
            top_k: layer.heads.top_k,
            parameters: below(&layer.path),
            macs_dense: dense,
            macs_routed: routed,
            path: layer.path,
        }
    });
    let layers = layers.collect();
    let fixed = |dim: &PortDim| if let PortDim::Fixed(n) = dim { *n } else { 1 };
    let caches = model.inputs().into_iter().filter(|port| port.name.starts_with("past_key_values."));
    let Macs { dense, routed } = count.macs();
    Ok(Inspection {
        family: model.family().to_owned(),
        sizes: sizes.into_iter().map(|(name, size)| (name.to_owned(), size)).collect(),
        layers,
        parameters: tensors.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum(),
        macs_dense: dense,
        macs_routed: routed,
        cache_bytes_per_token: caches.map(|port| port.dims.iter().map(fixed).product::<usize>() * 4).sum(),
        defaults: model.defaults().to_vec(),
        warnings: model.warnings().iter().map(ToString::to_string).collect(),
    })
}

impl Inspection {
    /// The share of the dense work that routing saves.
    pub fn saved(&self) -> f64 {
        Macs { dense: self.macs_dense, routed: self.macs_routed }.saved()
    }
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes: Vec<String> = self.sizes.iter().map(|(name, size)| format!("{name} = {size}")).collect();
        writeln!(f, "{}, counted at {}", self.family, sizes.join(", "))?;
        let width = self.layers.iter().map(|layer| layer.path.len()).max().unwrap_or(0).max("attention layer".len());
        writeln!(
            f,
            "{:width$}  heads    kv  width  shared  top-k  parameters  MACs dense  MACs routed   saved",
            "attention layer"
        )?;
        let row = |f: &mut fmt::Formatter<'_>, name: &str, heads: [String; 5], parameters: usize, macs: Macs| {
            let [all, kv, dim, shared, top_k] = heads;
            let (parameters, dense, routed) =
                (short(parameters as f64), short(macs.dense as f64), short(macs.routed as f64));
            let saved = 100.0 * macs.saved();
            writeln!(
                f,
                "{name:width$}  {all:>5} {kv:>5}  {dim:>5}  {shared:>6}  {top_k:>5}  {parameters:>10}  {dense:>10}  {routed:>11}  {saved:>5.1} %"
            )
        };
        let (mut parameters, mut sum) = (0, Macs::default());
        for layer in &self.layers {
            let macs = Macs { dense: layer.macs_dense, routed: layer.macs_routed };
            let heads = [layer.num_heads, layer.kv_num_heads, layer.head_dim, layer.num_shared_heads, layer.top_k];
            row(f, &layer.path, heads.map(|n| n.to_string()), layer.parameters, macs)?;
            parameters += layer.parameters;
            sum += macs;
        }
        let none = || [(); 5].map(|()| String::new());
        let rest = Macs { dense: self.macs_dense - sum.dense, routed: self.macs_routed - sum.routed };
        row(f, "everything else", none(), self.parameters.saturating_sub(parameters), rest)?;
        let whole = Macs { dense: self.macs_dense, routed: self.macs_routed };
        row(f, "whole model", none(), self.parameters, whole)?;
        if self.cache_bytes_per_token > 0 {
            writeln!(f, "KV cache: {}B a token in f32", short(self.cache_bytes_per_token as f64))?;
        }
        if !self.defaults.is_empty() {
            let defaults: Vec<String> = self.defaults.iter().map(ToString::to_string).collect();
            writeln!(f, "defaults of absent keys: {}", defaults.join(", "))?;
        }
        let active: Vec<usize> = self.layers.iter().map(|layer| layer.num_shared_heads + layer.top_k).collect();
        write!(f, "active heads: {}; the largest saving possible is {:.1} %", runs(&active), 100.0 * self.saved())?;
        if self.saved() < NOTICEABLE {
            write!(
                f,
                "\nThis model can't gain from routing at these lengths: almost all of its work is not in the heads."
            )?;
        }
        Ok(())
    }
}
