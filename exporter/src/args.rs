//! Command line of moh-export.

mod convert;
mod export;
mod quantize;

use clap::builder::PossibleValuesParser;
use clap::{Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
pub(crate) use convert::ConvertArgs;
use export::{Export, ExportArgs};
use moh_export::{ElementType, Part};
use moh_models::families;
use moh_models::presets::{self, Source};
use moh_models::{Checkpoint, Config};
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
    /// Make a Mixture-of-Head model of a dense LLaMA, to be exported or trained on.
    Convert(ConvertArgs),
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
    /// An option that is there, of those that say how weights are read.
    pub(crate) fn of_weights(&self) -> Option<&'static str> {
        let options = [
            ("--config", self.config.is_some()),
            ("--preset", self.preset.is_some()),
            ("--weights-key", self.weights_key.is_some()),
            ("--ignore-unexpected", !self.ignore_unexpected.is_empty()),
        ];
        options.into_iter().find_map(|(name, is_there)| is_there.then_some(name))
    }

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
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = size::<1, MAX_TOKENS>)]
    pub(crate) tokens: Option<usize>,
    /// Cached tokens of a sequence: with --tokens 1 the cost of a decode step.
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 0,
        value_parser = size::<0, MAX_TOKENS>)]
    pub(crate) past: usize,
    /// Tokens of the sequence that a decoder translates [default: 512, or as many as the model takes].
    #[arg(long = "source", value_name = "N", allow_negative_numbers = true, value_parser = size::<1, MAX_TOKENS>)]
    pub(crate) source_tokens: Option<usize>,
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
    #[arg(long, allow_negative_numbers = true, default_value_t = 0, value_parser = seed)]
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
    /// The exported model, or the folder that holds model.onnx.
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

/// With more tokens, counts of multiply-accumulates would not fit into 64 bits.
const MAX_TOKENS: usize = 1 << 20;

/// A whole number from `MIN` to `MAX`.
fn size<const MIN: usize, const MAX: usize>(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (MIN..=MAX).contains(&n) => Ok(n),
        _ => Err(format!("expected a whole number from {MIN} to {MAX}")),
    }
}

/// What random numbers come from.
fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("expected a whole number from 0 to {}", u64::MAX))
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Dtype {
    #[value(aliases = ["float32", "fp32"])]
    F32,
    #[value(aliases = ["float16", "fp16", "half"])]
    F16,
    #[value(alias = "bfloat16")]
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

impl Args {
    /// Checkpoint, output and how to export; `None` where the command line names another command.
    ///
    /// # Errors
    /// Options that contradict each other.
    pub(crate) fn export(self) -> anyhow::Result<Option<Export>> {
        self.export.asked_for()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    /// Options of one name would read each other's values; clap sees it in debug builds only.
    #[test]
    fn no_two_options_have_a_name() {
        let mut commands = vec![Args::command()];
        while let Some(command) = commands.pop() {
            let mut names: Vec<&str> = command.get_arguments().map(|argument| argument.get_id().as_str()).collect();
            assert!(!names.is_empty() || command.has_subcommands(), "{}", command.get_name());
            names.sort_unstable();
            let found = names.windows(2).find(|pair| pair[0] == pair[1]);
            assert_eq!(found, None, "{}", command.get_name());
            commands.extend(command.get_subcommands().cloned());
        }
    }
}
