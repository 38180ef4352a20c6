//! Command line of moh-export.

mod quantize;

use clap::builder::PossibleValuesParser;
use clap::{ArgAction, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use moh_export::{
    Cache, ElementType, Layout, Options, Part, ReferenceFile, SideOptions, Sizes, Target, Weights, passes,
};
use moh_models::families;
use moh_models::presets::{self, Source};
use moh_models::{Checkpoint, Config};
use quantize::QuantizeArgs;
use std::path::{Path, PathBuf};

/// Export a Mixture-of-Head checkpoint to ONNX.
///
/// The model runs in any ONNX runtime; onnxruntime with libmoh_ops, and tract with moh-run, never compute a head that is off.
#[derive(Debug, Parser)]
#[command(name = "moh-export", version = moh_runtime::short_version(), long_version = moh_runtime::long_version())]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,

    #[command(flatten)]
    export: ExportArgs,
}

/// What else there is to do than export.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show heads, parameters and multiply-accumulates layer by layer, and what routing can save.
    Inspect(InspectArgs),
    /// Write a checkpoint of random weights, to measure a model before it is trained.
    Random(RandomArgs),
    /// Compare an exported model with its checkpoint, layer by layer: for models of any size.
    Verify(VerifyArgs),
    /// Print a script that completes this program's commands and options in a shell.
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Write this program's man pages.
    #[command(hide = true)]
    Man {
        /// The folder to write to.
        folder: PathBuf,
    },
}

/// What a checkpoint is, and where its configuration and weights are.
#[derive(Debug, clap::Args)]
pub(crate) struct SourceArgs {
    /// Model family [default: the config's key `family`].
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(families::NAMES))]
    pub(crate) family: Option<String>,

    /// Another configuration than the config.json beside the weights.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// The configuration of a published model [default without config.json: the one that the tensors fit].
    #[arg(long, value_name = "NAME", conflicts_with = "config", value_parser = PossibleValuesParser::new(presets::NAMES))]
    pub(crate) preset: Option<String>,

    /// Key of the weights in a .pth, .pt, .bin, .ckpt or .pkl file that holds several [default: a DiT's `ema`].
    #[arg(long, value_name = "KEY")]
    pub(crate) weights_key: Option<String>,

    /// Ignore tensors of that name that the model has no use for; * stands for any text. May be repeated.
    #[arg(long, value_name = "PATTERN")]
    pub(crate) ignore_unexpected: Vec<String>,
}

impl SourceArgs {
    /// Opens the checkpoint.
    pub(crate) fn open(&self, checkpoint: &Path, part: Option<Part>) -> Result<Checkpoint, moh_models::Error> {
        let source = Source::new(self.config.as_deref(), self.preset.as_deref());
        let mut checkpoint = presets::open(checkpoint, source, self.weights_key.as_deref(), &self.ignore_unexpected)?;
        if let Some(part) = part {
            checkpoint.configure("part", part.name());
        }
        Ok(checkpoint)
    }
}

/// Arguments of `inspect`.
#[derive(Debug, clap::Args)]
pub(crate) struct InspectArgs {
    /// A checkpoint, or only its config.json; none with --preset.
    #[arg(required_unless_present = "preset")]
    pub(crate) checkpoint: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    #[command(flatten)]
    pub(crate) part: PartArgs,
    /// New tokens of a sequence, or tokens of a diffusion model's image [default: 512, or as many as the model takes].
    #[arg(long, value_name = "N", value_parser = size::<1, MAX_TOKENS>)]
    pub(crate) tokens: Option<usize>,
    /// Cached tokens of a sequence: with --tokens 1 the cost of a decode step.
    #[arg(long, value_name = "N", default_value_t = 0,
        value_parser = size::<0, MAX_TOKENS>)]
    pub(crate) past: usize,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `random`.
#[derive(Debug, clap::Args)]
pub(crate) struct RandomArgs {
    /// A published model's name, or a config.json.
    #[arg(value_name = "PRESET|CONFIG")]
    pub(crate) model: PathBuf,
    /// The folder to write; it is made.
    #[arg(short, long, value_name = "FOLDER")]
    pub(crate) output: PathBuf,
    /// Model family [default: the config's key `family`].
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(families::NAMES))]
    pub(crate) family: Option<String>,
    #[command(flatten)]
    pub(crate) part: PartArgs,
    /// Element type.
    #[arg(long, value_enum, default_value = "f32")]
    pub(crate) dtype: Dtype,
    /// The same seed gives the same file.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Replace files that are there.
    #[arg(short, long)]
    pub(crate) force: bool,
    /// Print what was written as JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `verify`.
#[derive(Debug, clap::Args)]
pub(crate) struct VerifyArgs {
    /// The exported model.
    #[arg(value_name = "MODEL.onnx")]
    pub(crate) model: PathBuf,
    /// The checkpoint that it was exported from; none with --check.
    #[arg(required_unless_present = "check")]
    pub(crate) checkpoint: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    #[command(flatten)]
    pub(crate) part: PartArgs,
    /// Compare the checkpoint's files that an export with --weights link uses with the digests in the model, and run nothing.
    #[arg(long, conflicts_with = "checkpoint")]
    pub(crate) check: bool,
    /// Where copies of the layers are put, one at a time [default: the system's folder for temporary files].
    #[arg(long, value_name = "FOLDER")]
    pub(crate) scratch: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Larger sizes are mistakes.
const MAX_SIZE: usize = 1 << 24;

/// With more tokens, counts of multiply-accumulates would not fit into 64 bits.
const MAX_TOKENS: usize = 1 << 20;

/// A whole number from `MIN` to `MAX`.
fn size<const MIN: usize, const MAX: usize>(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (MIN..=MAX).contains(&n) => Ok(n),
        _ => Err(format!("expected a whole number from {MIN} to {MAX}")),
    }
}

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

/// Arguments of an export.
#[derive(Debug, clap::Args)]
struct ExportArgs {
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

    /// Where the model is to run: chooses --dtype, --opset, --layout, and how --quantize writes weights, where they are not given.
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
    #[arg(long, value_name = "N", value_parser = size::<1, MAX_SIZE>)]
    batch: Option<usize>,

    /// The same number of new tokens in every call.
    #[arg(long, value_name = "N", value_parser = size::<1, MAX_SIZE>)]
    sequence: Option<usize>,

    /// The same number of cached tokens in every call.
    #[arg(long, value_name = "N", value_parser = size::<0, MAX_SIZE>)]
    past: Option<usize>,

    /// ONNX operator-set version, 20 to 24 (20 with --ir-version 9 loads in onnxruntime 1.17) [default: 21].
    #[arg(long, value_name = "N", value_parser = version)]
    opset: Option<i64>,

    /// ONNX IR version [default: the one that came with the operator set].
    #[arg(long, value_name = "N", value_parser = version)]
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
    #[arg(long, value_name = "X", requires = "reference", value_parser = tolerance)]
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

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Dtype {
    F32,
    F16,
    Bf16,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum PartName {
    Encoder,
    Decoder,
}

/// Which part of a model is meant.
#[derive(Debug, clap::Args)]
pub(crate) struct PartArgs {
    /// Part of an encoder-decoder model, each a model of its own [default: the config's key `part`].
    #[arg(long, value_enum)]
    part: Option<PartName>,
}

impl PartArgs {
    /// The part, if one is named.
    pub(crate) fn part(&self) -> Option<Part> {
        self.part.map(|part| match part {
            PartName::Encoder => Part::Encoder,
            PartName::Decoder => Part::Decoder,
        })
    }

    /// Puts the part into a configuration.
    pub(crate) fn put(&self, config: &mut Config) {
        if let Some(part) = self.part() {
            config.set("part", part.name().into());
        }
    }
}

impl Dtype {
    /// The file's element type.
    pub(crate) fn element_type(self) -> ElementType {
        match self {
            Dtype::F32 => ElementType::F32,
            Dtype::F16 => ElementType::F16,
            Dtype::Bf16 => ElementType::BF16,
        }
    }
}

/// An export that was asked for.
pub(crate) struct Export {
    pub(crate) checkpoint: PathBuf,
    pub(crate) output: PathBuf,
    pub(crate) options: Options,
    pub(crate) quiet: bool,
    pub(crate) json: bool,
}

impl Args {
    /// Checkpoint, output and how to export; `None` where the command line names another command.
    pub(crate) fn export(self) -> Option<Export> {
        let args = self.export;
        let sizes = [("batch", args.batch), ("sequence", args.sequence), ("past", args.past)];
        let sizes = sizes.into_iter().filter_map(|(name, size)| Some((name.to_owned(), size?)));
        let base = args.target.map_or_else(Options::default, Target::options);
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
            quantize: args.quantize.options(args.target, args.sides.with_library.is_some()),
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
        let output = in_repository.or(args.output)?;
        Some(Export { checkpoint: args.checkpoint?, output, options, quiet: args.quiet, json: args.json })
    }
}
