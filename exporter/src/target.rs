//! What a model is exported for: defaults that suit the place where it is to run, and what cannot run there.

use crate::cache::{self, Cache};
use crate::error::Error;
use crate::graph::{ElementType, Graph};
use crate::memory::Memory;
use crate::place::Layout;
use crate::quantize::{Activations, Form, Quantize};
use crate::side_files::{Facts, Kind, fits_genai};
use crate::{AttentionType, DEFAULT_OPSET, Options};
use serde::Serialize;
use std::fmt;

/// Where a model is to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Target {
    /// onnxruntime on a CPU.
    OrtCpu,
    /// onnxruntime on an NVIDIA GPU.
    OrtCuda,
    /// tract, as in moh-run.
    Tract,
    /// onnxruntime-web and transformers.js.
    Web,
    /// onnxruntime-genai.
    Genai,
}

/// What is chosen for a target where no option says otherwise.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// The target.
    pub target: Target,
    /// Its name on the command line.
    pub name: &'static str,
    /// What it is.
    pub what: &'static str,
    /// Element type of weights and activations, whatever the checkpoint's.
    pub dtype: ElementType,
    /// ONNX operator-set version.
    pub opset: i64,
    /// How the files are arranged.
    pub layout: Layout,
    /// How a language model's cache grows.
    pub cache: Cache,
    /// How quantised dense layers are written where no library is given: see [`Target::form`].
    pub form: Form,
    /// What products with quantised weights are computed in.
    pub activations: Activations,
    /// Whether it keeps another copy of float16 weights, in float32.
    pub widens: bool,
    /// Whether it keeps its own copy of the scales of weights whose activations are quantised, and sums of blocks as large.
    pub packs: bool,
}

/// Defaults of every target.
pub const TARGETS: [Row; 5] = [
    Row {
        target: Target::OrtCpu,
        name: "ort-cpu",
        what: "onnxruntime on a CPU",
        dtype: ElementType::F32,
        opset: DEFAULT_OPSET,
        layout: Layout::Flat,
        cache: Cache::InPlace,
        form: Form::Moh,
        activations: Activations::Int8,
        widens: true,
        packs: true,
    },
    Row {
        target: Target::OrtCuda,
        name: "ort-cuda",
        what: "onnxruntime on an NVIDIA GPU",
        dtype: ElementType::F16,
        opset: DEFAULT_OPSET,
        layout: Layout::Flat,
        cache: Cache::InPlace,
        form: Form::Nbits,
        activations: Activations::Float,
        widens: false,
        packs: false,
    },
    Row {
        target: Target::Tract,
        name: "tract",
        what: "tract, as in moh-run",
        dtype: ElementType::F32,
        opset: DEFAULT_OPSET,
        layout: Layout::Flat,
        cache: Cache::InPlace,
        form: Form::Moh,
        activations: Activations::Int8,
        widens: false,
        packs: false,
    },
    Row {
        target: Target::Web,
        name: "web",
        what: "onnxruntime-web and transformers.js",
        dtype: ElementType::F16,
        opset: DEFAULT_OPSET,
        layout: Layout::Onnx,
        cache: Cache::Concat,
        form: Form::Nbits,
        activations: Activations::Float,
        widens: true,
        packs: false,
    },
    Row {
        target: Target::Genai,
        name: "genai",
        what: "onnxruntime-genai on a CPU",
        dtype: ElementType::F32,
        opset: DEFAULT_OPSET,
        layout: Layout::Flat,
        cache: Cache::InPlace,
        form: Form::Nbits,
        activations: Activations::Int8,
        widens: true,
        packs: true,
    },
];

/// What 32-bit WebAssembly addresses.
const WEB_MEMORY: u64 = 1 << 32;

impl Target {
    /// What is chosen for it.
    pub fn row(self) -> &'static Row {
        &TARGETS[self as usize]
    }

    /// How quantised dense layers are written for it, where libmoh_ops is perhaps put beside the model.
    pub fn form(self, library: bool) -> Form {
        if library && self == Target::Genai { Form::Moh } else { self.row().form }
    }

    /// The options that are chosen for it, but for those of quantisation.
    pub fn options(self) -> Options {
        let row = self.row();
        Options {
            target: Some(self),
            dtype: Some(row.dtype),
            opset: row.opset,
            layout: row.layout,
            ..Options::default()
        }
    }

    /// The table of `docs/export.md`.
    pub fn page() -> String {
        let line = |row: &Row| {
            let layout = if row.layout == Layout::Onnx { "`onnx`" } else { "`flat`" };
            let (form, activations) = (row.form.name(), row.activations.name());
            let cache = if row.cache == Cache::InPlace { "`in-place`" } else { "`concat`" };
            let Row { name, what, dtype, opset, .. } = row;
            format!("| `{name}` | {what} | {dtype} | {opset} | {layout} | {cache} | `{form}` | `{activations}` |\n")
        };
        let head = "| `--for` | | `--dtype` | `--opset` | `--layout` | `--cache` | `--form` | `--activations` |\n\
             |---|---|---|---|---|---|---|---|\n";
        head.to_owned() + &TARGETS.iter().map(line).collect::<String>()
    }

    fn refuses(self, what: impl fmt::Display, why: &'static str) -> Error {
        Error::Target { target: self, what: what.to_string(), why }
    }

    /// Whether it can run what the options ask for.
    ///
    /// # Errors
    /// [`Error::Target`].
    pub(crate) fn check(self, options: &Options, dtype: ElementType) -> Result<(), Error> {
        let no_bf16 = match self {
            Target::OrtCpu => Some("onnxruntime does not multiply bfloat16 on CPUs"),
            Target::Tract => Some("tract has no bfloat16"),
            Target::Web => Some("onnxruntime-web has no bfloat16"),
            Target::OrtCuda | Target::Genai => None,
        };
        if let (ElementType::BF16, Some(why)) = (dtype, no_bf16) {
            return Err(self.refuses("a model in bf16", why));
        }
        if options.passes.attention_type.attention_type == AttentionType::Bf16 {
            match self {
                Target::Tract => return Err(self.refuses("attention in bf16", "tract has no bfloat16")),
                Target::Web => return Err(self.refuses("attention in bf16", "browsers load no library of kernels")),
                Target::OrtCpu | Target::OrtCuda | Target::Genai => {}
            }
        }
        if options.quantize.as_ref().is_some_and(|how| how.form == Form::Moh) {
            let what = "quantised layers of the form moh";
            match self {
                Target::OrtCuda => return Err(self.refuses(what, "LinearNBits has no kernel for GPUs")),
                Target::Web => return Err(self.refuses(what, "browsers load no library of kernels")),
                Target::OrtCpu | Target::Tract | Target::Genai => {}
            }
        }
        if options.layout == Layout::Triton && !matches!(self, Target::OrtCpu | Target::OrtCuda) {
            return Err(self.refuses("a model of a Triton repository", "Triton runs it in onnxruntime itself"));
        }
        if self == Target::Genai && options.sides.bare {
            return Err(self.refuses("a bare model", "it needs genai_config.json and the tokenizer"));
        }
        Ok(())
    }

    /// Whether it can run this model.
    ///
    /// # Errors
    /// [`Error::Target`].
    pub(crate) fn check_model(self, facts: &Facts<'_>, memory: &Memory) -> Result<(), Error> {
        if self == Target::Genai {
            if !matches!(facts.kind, Kind::LanguageModel { .. }) {
                return Err(self.refuses(format_args!("a {}", facts.model.family()), "it runs language models only"));
            }
            if !fits_genai(facts) {
                return Err(self.refuses("fixed lengths", "its calls have other lengths each time"));
            }
        }
        if self == Target::Web && memory.weights > WEB_MEMORY {
            let what = format!("{:.1} GB of weights", memory.weights as f64 / 1e9);
            return Err(self.refuses(what, "a page's WebAssembly has 4 GiB"));
        }
        Ok(())
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row().name)
    }
}

/// How a model was exported for a target, and the memory that it will need there.
#[derive(Debug, Clone, Serialize)]
pub struct Chosen {
    /// The target.
    pub target: Target,
    /// Element type of weights and activations.
    #[serde(serialize_with = "crate::report::shown")]
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
        target.check_model(facts, &memory)?;
        let quantization = options.quantize.clone();
        let form = target.form(options.sides.library.is_some());
        let differs = [
            ("--dtype", dtype != row.dtype),
            ("--opset", options.opset != row.opset),
            ("--ir-version", options.ir_version.is_some()),
            ("--layout", options.layout != row.layout),
            ("--cache", options.cache.is_some_and(|cache| cache != row.cache)),
            ("--form", quantization.as_ref().is_some_and(|how| how.form != form)),
            ("--activations", quantization.as_ref().is_some_and(|how| how.activations != row.activations)),
        ];
        let overridden = differs.into_iter().filter(|(_, differs)| *differs).map(|(option, _)| option).collect();
        let (opset, layout) = (options.opset, options.layout);
        let cache = cache::of_model(facts.model);
        Ok(Some(Chosen { target, dtype, opset, ir_version, layout, cache, quantization, overridden, memory }))
    }
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
            write!(f, ", int{bits} weights in blocks of {} as {form}, {activations} activations", how.block)?;
        }
        match self.overridden.as_slice() {
            [] => Ok(()),
            options => write!(f, "; as asked for: {}", options.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use clap::ValueEnum;

    #[test]
    fn rows_are_in_the_order_of_the_targets() {
        for target in Target::value_variants() {
            assert_eq!(target.row().target, *target);
            assert_eq!(target.to_possible_value().unwrap().get_name(), target.row().name);
        }
    }

    #[test]
    fn the_documentation_has_the_table() {
        let page = include_str!("../../docs/export.md");
        assert!(page.contains(&Target::page()), "docs/export.md should have\n{}", Target::page());
    }
}
