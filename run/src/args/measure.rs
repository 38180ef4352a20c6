//! What is measured, and for how long.

use super::number::{real, whole};
use super::runtime::MOST_THREADS;
use super::{LibraryArgs, RuntimeArgs};
use clap::ValueEnum;
use std::path::PathBuf;

/// Larger sizes are mistakes; whether the inputs fit into memory is seen later.
const MOST: usize = 1_000_000;
/// More runs say no more.
const MOST_RUNS: usize = 1_000_000;

#[derive(Debug, clap::Args)]
pub(crate) struct SizeArgs {
    /// Batch size.
    #[arg(long, value_name = "N", default_value = "1", allow_negative_numbers = true, value_parser = whole(1, MOST))]
    pub(crate) batch: usize,
    /// Sequence length in tokens [default: 128, or the model's longest].
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole(1, MOST))]
    pub(crate) sequence: Option<usize>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ProfileArgs {
    /// The .onnx file, or the folder that holds model.onnx.
    pub(crate) model: PathBuf,
    #[command(flatten)]
    pub(crate) sizes: SizeArgs,
    /// Timed runs; the median is printed.
    #[arg(long, value_name = "N", default_value = "10", allow_negative_numbers = true,
        value_parser = whole(1, MOST_RUNS))]
    pub(crate) runs: usize,
    /// The number of nodes to print.
    #[arg(long, value_name = "N", default_value = "15", allow_negative_numbers = true, value_parser = whole(0, MOST))]
    pub(crate) top: usize,
    /// Keep the profile that onnxruntime writes, for a viewer of trace events such as Perfetto.
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Overwrite the trace's file.
    #[arg(long, requires = "trace")]
    pub(crate) force: bool,
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
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1", allow_negative_numbers = true,
        value_parser = whole(1, MOST))]
    pub(crate) batch: Vec<usize>,
    /// Sequence lengths in tokens [default: 128, or the model's longest].
    #[arg(long, value_name = "N,...", value_delimiter = ',', allow_negative_numbers = true,
        value_parser = whole(1, MOST))]
    pub(crate) sequence: Vec<usize>,
    /// Numbers of threads [default: one per processor].
    #[arg(long, value_name = "N,...", value_delimiter = ',', allow_negative_numbers = true,
        value_parser = whole(1, MOST_THREADS))]
    pub(crate) threads: Vec<usize>,
    /// Runtimes to compare [default: all that are available].
    #[arg(long, value_enum, value_name = "RUNTIME,...", value_delimiter = ',')]
    pub(crate) runtime: Vec<BenchRuntime>,
    /// Seconds per runtime and size.
    #[arg(long, default_value = "2", allow_negative_numbers = true, value_parser = real(0.0, 86_400.0))]
    pub(crate) seconds: f64,
    /// Minimum runs per runtime and size.
    #[arg(long, value_name = "N", default_value = "5", allow_negative_numbers = true,
        value_parser = whole(1, MOST_RUNS))]
    pub(crate) runs: usize,
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
