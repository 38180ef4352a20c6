//! What is measured, and for how long.

use super::{LibraryArgs, RuntimeArgs};
use clap::ValueEnum;
use std::num::NonZeroUsize;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub(crate) struct SizeArgs {
    /// Batch size.
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) batch: NonZeroUsize,
    /// Sequence length in tokens [default: 128, or the model's longest].
    #[arg(long, value_name = "N")]
    pub(crate) sequence: Option<NonZeroUsize>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ProfileArgs {
    /// The .onnx file, or the folder that holds model.onnx.
    pub(crate) model: PathBuf,
    #[command(flatten)]
    pub(crate) sizes: SizeArgs,
    /// Timed runs; the median is printed.
    #[arg(long, value_name = "N", default_value = "10")]
    pub(crate) runs: NonZeroUsize,
    /// The number of nodes to print.
    #[arg(long, value_name = "N", default_value = "15")]
    pub(crate) top: usize,
    /// Keep the profile that onnxruntime writes, for a viewer of trace events such as Perfetto.
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) runtime: RuntimeArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct BenchArgs {
    /// The .onnx file, or the folder that holds model.onnx.
    pub(crate) model: PathBuf,
    /// Batch sizes.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1")]
    pub(crate) batch: Vec<NonZeroUsize>,
    /// Sequence lengths in tokens [default: 128, or the model's longest].
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    pub(crate) sequence: Vec<NonZeroUsize>,
    /// Numbers of threads [default: one per processor].
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = super::runtime::threads)]
    pub(crate) threads: Vec<NonZeroUsize>,
    /// Runtimes to compare [default: all that are available].
    #[arg(long, value_enum, value_name = "RUNTIME,...", value_delimiter = ',')]
    pub(crate) runtime: Vec<BenchRuntime>,
    /// Seconds per runtime and size.
    #[arg(long, default_value = "2", value_parser = seconds)]
    pub(crate) seconds: f64,
    /// Minimum runs per runtime and size.
    #[arg(long, value_name = "N", default_value = "5")]
    pub(crate) runs: NonZeroUsize,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) library: LibraryArgs,
}

/// What can be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchRuntime {
    /// onnxruntime with the ai.moh kernels.
    Ort,
    /// onnxruntime without them: it runs the function bodies in the model, which compute every head.
    OrtBodies,
    /// tract.
    Tract,
}

impl BenchRuntime {
    /// As the command line has it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            BenchRuntime::Ort => "ort",
            BenchRuntime::OrtBodies => "ort-bodies",
            BenchRuntime::Tract => "tract",
        }
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|seconds| (0.0..=86_400.0).contains(seconds));
    number.ok_or_else(|| "expected a number of seconds".to_owned())
}
