//! The command line.

use clap::{Parser, Subcommand, ValueEnum};
use moh_runtime::{Options, RuntimeChoice};
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// Runs exported MoH and MoA models.
#[derive(Debug, Parser)]
#[command(name = "moh-run", version)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Runs a model once on tensors from a file.
    Infer(InferArgs),
    /// Continues a prompt with a language model, greedily.
    Generate(GenerateArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct InferArgs {
    /// The .onnx file, or the folder that holds model.onnx.
    pub(crate) model: PathBuf,
    /// A safetensors file with a tensor for every input of the model, under its name.
    #[arg(long, value_name = "FILE")]
    pub(crate) inputs: PathBuf,
    /// The safetensors file to write every output to.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Overwrite the output file.
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) runtime: RuntimeArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct GenerateArgs {
    /// The .onnx file, or the folder that holds model.onnx; tokenizer.json and config.json are beside it.
    pub(crate) model: PathBuf,
    /// The text to continue; `-` reads it from standard input.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) prompt: String,
    /// The most tokens to generate.
    #[arg(long, value_name = "N", default_value = "128")]
    pub(crate) max_tokens: NonZeroUsize,
    /// Go on after a token that ends the text.
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Print the tokens' numbers in place of their text.
    #[arg(long)]
    pub(crate) ids: bool,
    #[command(flatten)]
    pub(crate) runtime: RuntimeArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RuntimeArgs {
    /// Which runtime runs the model.
    #[arg(long, value_enum, default_value_t = RuntimeArg::Auto)]
    runtime: RuntimeArg,
    /// Threads to use [default: the runtime's choice].
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
    /// Do not load the ai.moh kernels: onnxruntime runs the bodies that the model carries.
    #[arg(long)]
    no_custom_ops: bool,
    /// The onnxruntime library [default: $ORT_DYLIB_PATH, or one that is found].
    #[arg(long, value_name = "FILE")]
    ort_library: Option<PathBuf>,
    /// The library of the ai.moh kernels [default: $MOH_OPS_LIBRARY, or the one beside this program].
    #[arg(long, value_name = "FILE", conflicts_with = "no_custom_ops")]
    ops_library: Option<PathBuf>,
    /// Print errors only.
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum RuntimeArg {
    /// onnxruntime if its library is found, else tract.
    Auto,
    /// onnxruntime.
    Ort,
    /// tract, which is built in.
    Tract,
}

impl RuntimeArgs {
    /// The library's options.
    pub(crate) fn options(&self) -> Options {
        Options {
            runtime: match self.runtime {
                RuntimeArg::Auto => RuntimeChoice::Auto,
                RuntimeArg::Ort => RuntimeChoice::Ort,
                RuntimeArg::Tract => RuntimeChoice::Tract,
            },
            threads: self.threads.map(NonZeroUsize::get),
            without_custom_ops: self.no_custom_ops,
            ort_library: self.ort_library.clone(),
            ops_library: self.ops_library.clone(),
            profile: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }
}
