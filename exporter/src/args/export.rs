//! Arguments of an export.

use super::quantize::QuantizeArgs;
use super::{Dtype, SourceArgs, size};
use clap::{ArgAction, ValueEnum};
use moh_export::{
    AttentionStyle, Cache, Layout, Options, Part, ReferenceFile, SideOptions, Sizes, Target, Weights, passes,
};
use std::path::PathBuf;

/// Larger sizes are mistakes.
const MAX_SIZE: usize = 1 << 24;

/// A version number; which ones there are is for the library to say.
fn version(text: &str) -> Result<i64, String> {
    text.parse().map_err(|_| "expected a whole number".to_owned())
}

/// A largest difference.
fn tolerance(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(x) if x > 0.0 && x < f32::INFINITY => Ok(x),
        _ => Err("expected a number above 0, such as 1e-3".to_owned()),
    }
}

/// What to export, and how.
#[derive(Debug, clap::Args)]
pub(super) struct ExportArgs {
    /// A .safetensors, .pth, .pt, .bin, .ckpt or .pkl file with config.json beside it, an .index.json, or a folder with one.
    #[arg(required = true)]
    checkpoint: Option<PathBuf>,

    /// The model to write; its folder is made, weights go to <OUTPUT>_data beside it. With --part both, the folder.
    #[arg(short, long, value_name = "MODEL.onnx", required_unless_present = "triton")]
    output: Option<PathBuf>,

    #[command(flatten)]
    sides: SideArgs,

    #[command(flatten)]
    source: SourceArgs,

    /// Part of an encoder-decoder model, each a model of its own; or both, as the three models that Optimum reads [default: the
    /// config's key `part`].
    #[arg(long, value_enum)]
    part: Option<ExportedPart>,

    /// Where the model is to run: chooses --dtype, --opset, --layout, --cache, --dense-layers, --norms, --convolutions, --head-layers, and how --quantize writes weights, where they are not given.
    #[arg(long = "for", value_enum, value_name = "TARGET")]
    target: Option<Target>,
    /// How a language model's key-value cache grows: `in-place` copies nothing where past and present share memory, as in moh-run
    /// and onnxruntime-genai [default: concat].
    #[arg(long, value_enum)]
    cache: Option<Cache>,

    /// Element type of weights and activations [default: the checkpoint's; f16 for bf16].
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,

    #[command(flatten)]
    quantize: QuantizeArgs,

    #[command(flatten)]
    passes: passes::Options,

    /// The same batch size in every call.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = size::<1, MAX_SIZE>)]
    batch: Option<usize>,

    /// The same number of new tokens in every call.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = size::<1, MAX_SIZE>)]
    sequence: Option<usize>,

    /// The same number of cached tokens in every call.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = size::<0, MAX_SIZE>)]
    past: Option<usize>,

    /// ONNX operator-set version, 20 to 24 (20 with --ir-version 9 loads in onnxruntime 1.17) [default: 21].
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = version)]
    opset: Option<i64>,

    /// ONNX IR version [default: the one that came with the operator set].
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = version)]
    ir_version: Option<i64>,

    /// Run the written model and compare it with our own implementation (not your PyTorch code), whatever its size.
    #[arg(long, overrides_with = "no_verify", action = ArgAction::SetTrue)]
    verify: bool,

    /// Leave that comparison out [default above 500 million parameters].
    #[arg(long, action = ArgAction::SetTrue)]
    no_verify: bool,

    /// Inputs and outputs of your own PyTorch run, under the model's names: run the written model on them and compare.
    #[arg(long, value_name = "FILE.safetensors")]
    reference: Option<PathBuf>,

    /// Largest difference from the reference, in units of an output's largest value or of 1 [default: 2e-4 in f32, 2e-2 in f16].
    #[arg(long, value_name = "X", allow_negative_numbers = true, requires = "reference", value_parser = tolerance)]
    reference_tolerance: Option<f32>,

    /// Where the weights go: a file of their own, or the model file itself, which holds up to 2 GB; or nowhere: link uses the
    /// checkpoint's safetensors files as they are.
    #[arg(long, value_enum, default_value_t)]
    weights: Weights,

    /// With --weights link: read the linked files, note the digests of their contents, and refuse NaN and infinity.
    #[arg(long)]
    check: bool,

    /// Replace the model and its files, but never another model's files.
    #[arg(short, long)]
    force: bool,

    /// Print errors only.
    #[arg(short, long)]
    quiet: bool,

    /// Print the report as JSON.
    #[arg(long, conflicts_with = "quiet")]
    json: bool,
}

/// Where the files of an export lie, and which ones there are.
#[derive(Debug, clap::Args)]
struct SideArgs {
    /// Where the model lies: beside config.json, or in the folder `onnx` below it, as transformers.js and Optimum like it
    /// [default: flat].
    #[arg(long, value_enum, conflicts_with = "triton")]
    layout: Option<Layout>,

    /// Instead of --output, a model of a Triton repository: FOLDER/config.pbtxt and FOLDER/1/model.onnx.
    #[arg(long, value_name = "REPOSITORY/NAME", conflicts_with = "output")]
    triton: Option<PathBuf>,

    /// Copy libmoh_ops beside the model and name it in genai_config.json; with --triton, the path on the server to name in
    /// config.pbtxt.
    #[arg(long, value_name = "FILE", conflicts_with = "bare")]
    with_library: Option<PathBuf>,

    /// Write the model and its weights only: no configuration, tokenizer, model card or files of serving stacks.
    #[arg(long)]
    bare: bool,
}

/// Which part of a model to export.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ExportedPart {
    Encoder,
    Decoder,
    /// Both.
    Both,
}

/// An export that was asked for.
pub(crate) struct Export {
    pub(crate) checkpoint: PathBuf,
    pub(crate) output: PathBuf,
    pub(crate) options: Options,
    pub(crate) quiet: bool,
    pub(crate) json: bool,
}

impl ExportArgs {
    /// Checkpoint, output and how to export; `None` where the command line names another command.
    ///
    /// # Errors
    /// Options that contradict each other.
    pub(super) fn asked_for(self) -> anyhow::Result<Option<Export>> {
        let args = self;
        let sizes = [("batch", args.batch), ("sequence", args.sequence), ("past", args.past)];
        let sizes = sizes.into_iter().filter_map(|(name, size)| Some((name.to_owned(), size?)));
        let base = args.target.map_or_else(Options::default, Target::options);
        let portable = args.passes.bodies.attention == AttentionStyle::Portable;
        let usual = args.target.and_then(|target| target.quantized(args.sides.with_library.is_some(), portable));
        let options = Options {
            family: args.source.family,
            config: args.source.config,
            preset: args.source.preset,
            weights_key: args.source.weights_key,
            ignore_unexpected: args.source.ignore_unexpected,
            part: match args.part {
                Some(ExportedPart::Encoder) => Some(Part::Encoder),
                Some(ExportedPart::Decoder) => Some(Part::Decoder),
                Some(ExportedPart::Both) | None => None,
            },
            cache: args.cache,
            dtype: args.dtype.map(Dtype::element_type).or(base.dtype),
            target: args.target,
            quantize: args.quantize.options(usual)?,
            passes: args.passes,
            sizes: Sizes::new(sizes),
            opset: args.opset.unwrap_or(base.opset),
            ir_version: args.ir_version,
            verify: if args.verify { Some(true) } else { args.no_verify.then_some(false) },
            reference: args.reference.map(|path| ReferenceFile { path, tolerance: args.reference_tolerance }),
            force: args.force,
            weights: args.weights,
            check_links: args.check,
            digests: args.json,
            progress: None,
            layout: if args.sides.triton.is_some() { Layout::Triton } else { args.sides.layout.unwrap_or(base.layout) },
            sides: SideOptions { bare: args.sides.bare, library: args.sides.with_library },
            both_parts: args.part == Some(ExportedPart::Both),
        };
        let in_repository = args.sides.triton.map(|folder| folder.join("model.onnx"));
        let paths = args.checkpoint.zip(in_repository.or(args.output));
        let (quiet, json) = (args.quiet, args.json);
        Ok(paths.map(|(checkpoint, output)| Export { checkpoint, output, options, quiet, json }))
    }
}
