//! What a checkpoint would cost to run: heads, parameters and multiply-accumulates, layer by layer.

use crate::check_sizes;
use crate::error::Error;
use crate::measured::Measured;
use crate::text::{runs, short};
use moh_models::checkpoint::DefaultValue;
use moh_models::count::Macs;
use moh_models::families::{PortDim, Sizes, Tensors};
use moh_models::{Config, Model};
use moh_runtime::names;
use serde::Serialize;
use std::fmt;

/// The lengths to count at.
#[derive(Debug, Clone, Copy)]
pub struct Lengths {
    /// New tokens of a sequence; `None`: the family's default.
    pub tokens: Option<usize>,
    /// Cached tokens of a sequence.
    pub past: usize,
    /// Tokens of the sequence that a decoder translates; `None`: the family's default.
    pub source: Option<usize>,
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
    /// Tokens of a sequence or an image.
    pub tokens: usize,
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
    /// Whether the model gains.
    pub gain: Gain,
    /// Times of this model, if it is a published one that was measured.
    pub measured: Option<Measured>,
    /// Defaults that stand in for absent keys of the configuration, those of heads and routing first.
    pub defaults: Vec<DefaultValue>,
    /// What is probably not as it was meant.
    pub warnings: Vec<String>,
}

/// What the kernels can make of a model.
#[derive(Debug, Clone, Serialize)]
pub struct Gain {
    /// The share of the whole model's multiply-accumulates that routing saves.
    pub macs_saved_share: f64,
    /// What that means.
    pub routing: String,
    /// What else the kernels are good for.
    pub kernels: &'static str,
}

/// Below this share routing alone makes no difference that anyone would notice.
const NOTICEABLE: f64 = 0.03;

impl Gain {
    /// `active`: mean share of the heads that a token uses.
    fn new(whole: Macs, attention: Macs, active: f64) -> Gain {
        let share = whole.saved();
        let in_attention = 100.0 * attention.dense as f64 / whole.dense.max(1) as f64;
        let routing = match share {
            0.0 => "Routing saves nothing: tokens use every head.".to_owned(),
            _ if share < NOTICEABLE => format!(
                "Routing cannot help much at these lengths: it saves {:.1} % of the MACs, because attention is \
                 {in_attention:.0} % of them and tokens use {:.0} % of the heads.",
                100.0 * share,
                100.0 * active
            ),
            _ => format!("Routing saves {:.1} % of the MACs at these lengths.", 100.0 * share),
        };
        let kernels = "The library may be faster still than the file without it: attention then runs in fused kernels \
                       instead of function bodies of standard operators.";
        Gain { macs_saved_share: share, routing, kernels }
    }
}

/// The model with `tokens` tokens, where its configuration, `config`, fixes their number: a diffusion model for images of another size.
///
/// # Errors
/// [`Error::Tokens`] for a number that it can't have.
pub fn with_tokens(
    model: Model,
    tensors: Tensors,
    config: &Config,
    tokens: Option<usize>,
) -> Result<(Model, Tensors), Error> {
    let fixed = !model.dimensions().contains("sequence");
    let Some(tokens) = tokens.filter(|&tokens| fixed && tokens != model.workload().tokens) else {
        return Ok((model, tensors));
    };
    let family = model.family().to_owned();
    let Some((key, value)) = model.resized(tokens) else {
        let why = "its configuration fixes the size of images; give `inspect` a config.json for another one";
        return Err(Error::Tokens { family, expected: model.workload().tokens, found: tokens, why });
    };
    let mut config = config.clone();
    config.set(key, value.into());
    let (model, tensors) = Model::plan(&config, Some(&family))?;
    match model.workload().tokens {
        expected if expected == tokens => Ok((model, tensors)),
        expected => Err(Error::Tokens { family, expected, found: tokens, why: "its images are square" }),
    }
}

/// Counts `model`, whose tensors are `tensors`.
///
/// # Errors
/// Lengths that the model can't have.
pub fn inspect(model: &Model, tensors: &Tensors, lengths: Lengths) -> Result<Inspection, Error> {
    let asked = [("past", Some(lengths.past).filter(|&past| past > 0)), ("encoder_sequence", lengths.source)];
    let asked = asked.into_iter().filter_map(|(name, size)| Some((name.to_owned(), size?)));
    check_sizes(&Sizes::new(asked), std::slice::from_ref(model))?;
    let workload = model.workload();
    let mut sizes = workload.sizes;
    let tokens = lengths.tokens.unwrap_or(workload.tokens);
    let usual = sizes.iter().find(|(name, _)| *name == "encoder_sequence").map_or(0, |(_, n)| *n);
    let source = lengths.source.unwrap_or(usual);
    for (name, size) in &mut sizes {
        *size = match *name {
            // Where the target has a cache, the source is in its own.
            "encoder_sequence" => {
                if lengths.past > 0 {
                    0
                } else {
                    source
                }
            }
            "encoder_past" if lengths.past > 0 || *size > 0 => source,
            "encoder_past+encoder_sequence" => source,
            "sequence" => tokens,
            "past" => lengths.past,
            "past+sequence" | "total" => lengths.past + tokens,
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
    let layers: Vec<LayerCost> = layers.collect();
    let mut attention = Macs::default();
    for layer in &layers {
        attention += Macs { dense: layer.macs_dense, routed: layer.macs_routed };
    }
    let fixed = |dim: &PortDim| if let PortDim::Fixed(n) = dim { *n } else { 1 };
    let caches = model.inputs().into_iter().filter(|port| port.name.starts_with(names::PAST));
    let whole = count.macs();
    Ok(Inspection {
        family: model.family().to_owned(),
        sizes: sizes.into_iter().map(|(name, size)| (name.to_owned(), size)).collect(),
        tokens,
        layers,
        parameters: tensors.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum(),
        macs_dense: whole.dense,
        macs_routed: whole.routed,
        gain: Gain::new(whole, attention, model.active_share()),
        measured: None,
        cache_bytes_per_token: caches.map(|port| port.dims.iter().map(fixed).product::<usize>() * 4).sum(),
        defaults: model.defaults().to_vec(),
        warnings: model.warnings().iter().map(ToString::to_string).collect(),
    })
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut sizes: Vec<String> = self.sizes.iter().map(|(name, size)| format!("{name} = {size}")).collect();
        if !self.sizes.iter().any(|(name, _)| name == "sequence") {
            sizes.push(format!("{} tokens", self.tokens));
        }
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
        writeln!(f, "active heads: {}", runs(&active))?;
        write!(f, "Do I gain? {}\n{}", self.gain.routing, self.gain.kernels)?;
        self.measured.iter().try_for_each(|measured| write!(f, "\n{measured}"))
    }
}
