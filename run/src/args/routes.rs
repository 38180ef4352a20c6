//! What routing is shown of.

use super::RuntimeArgs;
use super::number::{seed, whole};
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub(crate) struct RoutesArgs {
    /// The .onnx file, exported with --output-gates, or the folder that holds model.onnx.
    pub(crate) model: PathBuf,
    /// A PNG, JPEG or WebP file for a classifier, a text (`-`: standard input) for a language model, a class for a diffusion model.
    #[arg(allow_hyphen_values = true)]
    pub(crate) input: String,
    /// The SVG file to write [default: a table on standard output].
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Overwrite the output file.
    #[arg(long)]
    pub(crate) force: bool,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// The timestep at which a diffusion model is shown: 999 is pure noise, 0 the image [default: 500].
    #[arg(long, value_name = "T", allow_negative_numbers = true, value_parser = whole(0, 999))]
    pub(crate) timestep: Option<usize>,
    /// Seed of a diffusion model's noise [default: 0].
    #[arg(long, allow_negative_numbers = true, value_parser = seed)]
    pub(crate) seed: Option<u64>,
    #[command(flatten)]
    pub(crate) runtime: RuntimeArgs,
}
