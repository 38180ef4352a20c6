//! Arguments of a conversion.

use super::seed;
#[cfg(feature = "text")]
use super::size;
use clap::Args;
use moh_export::convert::{Options, RouterKind, Shares};
use std::path::PathBuf;

/// Arguments of `convert`.
#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// A dense LLaMA: weights or a folder as for an export, with config.json beside them.
    pub(crate) checkpoint: PathBuf,

    /// The folder to write, which must not exist.
    #[arg(short, long, value_name = "FOLDER")]
    pub(crate) output: PathBuf,

    /// Share of the heads that every token uses: the first ones of each layer.
    #[arg(long, value_name = "X", allow_negative_numbers = true, default_value_t = Shares::default().shared)]
    shared: f64,

    /// Share of the heads that a token uses, the shared ones among them.
    #[arg(long, value_name = "X", allow_negative_numbers = true, default_value_t = Shares::default().active)]
    active: f64,

    /// What chooses the others: the norms of their queries, without weights (family moh-llama), or weights that are to be trained
    /// (moh-llm).
    #[arg(long, value_enum, default_value_t)]
    pub(crate) router: RouterKind,

    /// The same seed gives the same initial weights of the two-stage router [default: 0].
    #[arg(long, allow_negative_numbers = true, value_parser = seed)]
    pub(crate) seed: Option<u64>,

    /// Make hard links to the weight files in the place of copies: whoever changes one in place changes both models.
    #[arg(long)]
    link: bool,

    /// A text to compare both models on, before any training; needs tokenizer.json beside the weights.
    #[cfg(feature = "text")]
    #[arg(long, value_name = "FILE")]
    pub(crate) text: Option<PathBuf>,

    /// Tokens of the text that are used, from its beginning: 2 to 2048, and no more than the model has positions for.
    #[cfg(feature = "text")]
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 512, requires = "text",
        value_parser = size::<2, { 1 << 11 }>)]
    pub(crate) tokens: usize,

    /// Print the report as JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

impl ConvertArgs {
    /// How to convert, without a text.
    pub(crate) fn options(&self) -> Options {
        let shares = Shares { shared: self.shared, active: self.active };
        Options { shares, router: self.router, seed: self.seed.unwrap_or(0), link: self.link, ..Options::default() }
    }
}
