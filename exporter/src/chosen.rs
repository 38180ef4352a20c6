//! What was chosen for a model that goes to a target, and whether the target can run it.

use crate::Options;
use crate::cache::{self, Cache};
use crate::error::Error;
use crate::graph::{ElementType, Graph};
use crate::memory::Memory;
use crate::passes::AttentionStyle;
use crate::place::Layout;
use crate::quantize::Quantize;
use crate::side_files::{Facts, Kind, fits_genai};
use crate::target::Target;
use serde::Serialize;
use std::fmt;

/// What 32-bit WebAssembly addresses.
const WEB_MEMORY: u64 = 1 << 32;

/// How a model was exported for a target, and the memory that it will need there.
#[derive(Debug, Clone, Serialize)]
pub struct Chosen {
    /// The target.
    pub target: Target,
    /// Element type of weights and activations.
    #[serde(serialize_with = "crate::text::shown")]
    pub dtype: ElementType,
    /// ONNX operator-set version.
    pub opset: i64,
    /// ONNX IR version.
    pub ir_version: i64,
    /// How the files are arranged.
    pub layout: Layout,
    /// How the cache of a language model grows.
    pub cache: Option<Cache>,
    /// How weights are quantised.
    pub quantization: Option<Quantize>,
    /// Options that differ from what is usual for the target.
    pub overridden: Vec<&'static str>,
    /// The memory that the model will need.
    pub memory: Memory,
}

impl Chosen {
    /// For the target of the options, if they name one; `graphs` are the models that `facts` are about.
    ///
    /// # Errors
    /// [`Error::Target`] for a model that it cannot run.
    pub(crate) fn new(facts: &Facts<'_>, graphs: &[&Graph], options: &Options) -> Result<Option<Chosen>, Error> {
        let Some(target) = options.target else { return Ok(None) };
        let (row, dtype, ir_version) = (target.row(), facts.dtype, facts.graph.ir_version);
        let memory = Memory::new(graphs, row, facts.context().map(|context| context as usize));
        check(target, facts, &memory)?;
        let quantization = options.quantize.clone();
        let portable = options.passes.bodies.attention == AttentionStyle::Portable;
        let (form, activations) = target.quantized(options.sides.library.is_some(), portable).unwrap_or_default();
        let differs = [
            ("--attention", portable),
            ("--dtype", dtype != row.dtype),
            ("--opset", options.opset != row.opset),
            ("--ir-version", options.ir_version.is_some()),
            ("--layout", options.layout != row.layout),
            ("--cache", options.cache.is_some_and(|cache| cache != row.cache)),
            ("--dense-layers", options.passes.dense.style.is_some_and(|style| style != row.dense)),
            ("--norms", options.passes.norms.style.is_some_and(|style| style != row.norms)),
            ("--convolutions", options.passes.convolutions.style.is_some_and(|style| style != row.convolutions)),
            ("--head-layers", options.passes.heads.style.is_some_and(|style| style != row.heads)),
            ("--form", quantization.as_ref().is_some_and(|how| how.form != form)),
            ("--activations", quantization.as_ref().is_some_and(|how| how.activations != activations)),
        ];
        let overridden = differs.into_iter().filter(|(_, differs)| *differs).map(|(option, _)| option).collect();
        let (opset, layout) = (options.opset, options.layout);
        let cache = cache::of_model(facts.model);
        Ok(Some(Chosen { target, dtype, opset, ir_version, layout, cache, quantization, overridden, memory }))
    }
}

/// Whether the target can run this model.
///
/// # Errors
/// [`Error::Target`].
fn check(target: Target, facts: &Facts<'_>, memory: &Memory) -> Result<(), Error> {
    if target == Target::Genai {
        if !matches!(facts.kind, Kind::LanguageModel { .. }) {
            let what = format!("a {}", facts.model.family());
            return Err(target.refuses(what, "it runs language models only", None));
        }
        if !fits_genai(facts) {
            let options = Some("--sequence and --past");
            return Err(target.refuses("fixed lengths", "its calls have other lengths each time", options));
        }
    }
    if target == Target::Web && memory.weights > WEB_MEMORY {
        let what = format!("{:.1} GB of weights", memory.weights as f64 / 1e9);
        return Err(target.refuses(what, "a page's WebAssembly has 4 GiB", None));
    }
    Ok(())
}

impl fmt::Display for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match self.layout {
            Layout::Flat => "model beside config.json",
            Layout::Onnx => "model in the folder onnx",
            Layout::Triton => "model of a Triton repository",
        };
        let Chosen { target, dtype, opset, ir_version, .. } = self;
        write!(f, "{target} ({}): {dtype}, opset {opset}, IR {ir_version}, {place}", target.row().what)?;
        if self.cache == Some(Cache::InPlace) {
            write!(f, ", cache in place")?;
        }
        if let Some(how) = &self.quantization {
            let bits = how.bits.count();
            let (form, activations) = (how.form.name(), how.activations.name());
            let most = if how.fit_blocks { "up to " } else { "" };
            write!(f, ", int{bits} weights in blocks of {most}{} as {form}, {activations} activations", how.block)?;
        }
        match self.overridden.as_slice() {
            [] => Ok(()),
            options => write!(f, "; as asked for: {}", options.join(", ")),
        }
    }
}
