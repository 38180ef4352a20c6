//! What is translated, and how.

use super::number::{real, whole};
use super::{MOST_BATCH, MOST_TOKENS, RuntimeArgs};
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub(crate) struct TranslateArgs {
    /// The encoder and the decoder, as .onnx files or folders that hold model.onnx; or one folder that holds encoder.onnx and
    /// decoder.onnx. tokenizer.json and config.json are beside the decoder.
    #[arg(required = true, num_args = 1..=2)]
    pub(crate) model: Vec<PathBuf>,
    /// A text to translate [default: every line of standard input].
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) text: Vec<String>,
    /// Beam width; 1 is greedy search.
    #[arg(long, value_name = "N", default_value = "4", allow_negative_numbers = true,
        value_parser = whole(1, MOST_BATCH))]
    pub(crate) beams: usize,
    /// Length penalty: a hypothesis's log-probability is divided by its length to the power of P.
    #[arg(long, value_name = "P", default_value = "0.6", allow_negative_numbers = true,
        value_parser = real(-100.0, 100.0))]
    pub(crate) length_penalty: f64,
    /// The most tokens of a translation.
    #[arg(long, value_name = "N", default_value = "200", allow_negative_numbers = true,
        value_parser = whole(1, MOST_TOKENS))]
    pub(crate) max_tokens: usize,
    /// Read and print token ids instead of text; no tokenizer is needed.
    #[arg(long)]
    pub(crate) ids: bool,
    /// Print all hypotheses and their scores as JSON, at the end.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) runtime: RuntimeArgs,
}
