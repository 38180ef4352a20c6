//! What a model is exported for: defaults that suit the place where it is to run, and options that it refuses.

use crate::cache::Cache;
use crate::error::Error;
use crate::graph::ElementType;
use crate::place::Layout;
use crate::quantize::{Activations, Form};
use crate::{AttentionType, DEFAULT_OPSET, DenseStyle, HeadStyle, Options};
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
    /// How dense layers in floating point are written.
    pub dense: DenseStyle,
    /// How layer normalisation is written.
    pub norms: DenseStyle,
    /// How depthwise convolutions are written.
    pub convolutions: DenseStyle,
    /// How projections into heads and out of them are written.
    pub heads: HeadStyle,
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
        dense: DenseStyle::Moh,
        norms: DenseStyle::Moh,
        convolutions: DenseStyle::Moh,
        heads: HeadStyle::Routed,
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
        dense: DenseStyle::Moh,
        norms: DenseStyle::Moh,
        convolutions: DenseStyle::Onnx,
        heads: HeadStyle::Dense,
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
        dense: DenseStyle::Onnx,
        norms: DenseStyle::Moh,
        convolutions: DenseStyle::Onnx,
        heads: HeadStyle::Routed,
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
        dense: DenseStyle::Onnx,
        norms: DenseStyle::Onnx,
        convolutions: DenseStyle::Onnx,
        heads: HeadStyle::Routed,
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
        dense: DenseStyle::Onnx,
        norms: DenseStyle::Onnx,
        convolutions: DenseStyle::Onnx,
        heads: HeadStyle::Routed,
        form: Form::Nbits,
        activations: Activations::Int8,
        widens: true,
        packs: true,
    },
];

impl Target {
    /// What is chosen for it.
    pub fn row(self) -> &'static Row {
        &TARGETS[self as usize]
    }

    /// How quantised dense layers are written for it, where libmoh_ops is perhaps put beside the model.
    pub fn form(self, library: bool) -> Form {
        if library && self == Target::Genai { Form::Moh } else { self.row().form }
    }

    /// How quantised layers are written for it, and what they are computed in. `None` where that would be in operators of ours and the model
    /// is to be portable: it is then as without a target.
    pub fn quantized(self, library: bool, portable: bool) -> Option<(Form, Activations)> {
        let form = self.form(library);
        (form != Form::Moh || !portable).then_some((form, self.row().activations))
    }

    /// The options that are chosen for it, but for those of quantisation and those that [`Options::target`] chooses.
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
            let style = |style| if style == DenseStyle::Moh { "`moh`" } else { "`onnx`" };
            let (dense, norms, convolutions) = (style(row.dense), style(row.norms), style(row.convolutions));
            let heads = if row.heads == HeadStyle::Dense { "`dense`" } else { "`routed`" };
            let Row { name, what, dtype, opset, .. } = row;
            format!(
                "| `{name}` | {what} | {dtype} | {opset} | {layout} | {cache} | {dense} | {norms} | {convolutions} | {heads} | `{form}` | `{activations}` |\n"
            )
        };
        let head = "| `--for` | | `--dtype` | `--opset` | `--layout` | `--cache` | `--dense-layers` | `--norms` | `--convolutions` | `--head-layers` | `--form` | `--activations` |\n\
             |---|---|---|---|---|---|---|---|---|---|---|---|\n";
        head.to_owned() + &TARGETS.iter().map(line).collect::<String>()
    }

    /// `options` are those that ask for `what`, if any do.
    pub(crate) fn refuses(self, what: impl fmt::Display, why: &'static str, options: Option<&'static str>) -> Error {
        Error::Target { target: self, what: what.to_string(), why, options }
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
            let option = if options.dtype.is_some() { "--dtype bf16" } else { "--weights link" };
            return Err(self.refuses("a model in bf16", why, Some(option)));
        }
        if options.passes.attention_type.attention_type == AttentionType::Bf16 {
            let refused = |why| Err(self.refuses("attention in bf16", why, Some("--attention-type bf16")));
            match self {
                Target::Tract => return refused("tract has no bfloat16"),
                Target::Web => return refused("browsers load no library of kernels"),
                Target::OrtCpu | Target::OrtCuda | Target::Genai => {}
            }
        }
        if options.quantize.as_ref().is_some_and(|how| how.form == Form::Moh) {
            let what = "quantised layers of the form moh";
            match self {
                Target::Web => {
                    return Err(self.refuses(what, "browsers load no library of kernels", Some("--form moh")));
                }
                Target::OrtCpu | Target::OrtCuda | Target::Tract | Target::Genai => {}
            }
        }
        if options.layout == Layout::Triton && !matches!(self, Target::OrtCpu | Target::OrtCuda) {
            let what = "a model of a Triton repository";
            return Err(self.refuses(what, "Triton runs it in onnxruntime itself", Some("--triton")));
        }
        if self == Target::Genai && options.sides.bare {
            let why = "it needs genai_config.json and the tokenizer";
            return Err(self.refuses("a bare model", why, Some("--bare")));
        }
        Ok(())
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row().name)
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

    /// genai runs our operators only where their library goes along.
    #[test]
    fn forms_need_their_library() {
        for target in Target::value_variants() {
            assert_eq!(target.form(false), target.row().form, "{target}");
        }
        assert_eq!(Target::Genai.form(true), Form::Moh);
        assert_eq!(Target::Tract.quantized(false, false), Some((Form::Moh, Activations::Int8)));
        assert_eq!(Target::Tract.quantized(false, true), None);
        assert_eq!(Target::Web.quantized(false, true), Target::Web.quantized(false, false));
        assert_ne!(Target::Genai.form(false), Form::Moh);
    }

    #[test]
    fn the_documentation_has_the_table() {
        let page = include_str!("../../docs/export.md");
        assert!(page.contains(&Target::page()), "docs/export.md should have\n{}", Target::page());
    }
}
