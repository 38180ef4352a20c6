//! What translation needs to know of a model's configuration.

use crate::error::Result;
use crate::files::read_json;
use serde::Deserialize;
use std::path::Path;

/// fairseq's numbers of the tokens that end a text and that fill it up.
const END: i64 = 2;
const PADDING: i64 = 1;

/// A model's special tokens and its longest source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TranslationConfig {
    /// The token that the decoder begins with.
    pub start: i64,
    /// The token that ends texts.
    pub end: i64,
    /// The token that fills texts up.
    pub padding: i64,
    /// The longest source that the model was made for.
    pub max_source: Option<usize>,
    /// The longest translation.
    pub max_target: Option<usize>,
}

#[derive(Debug, Default, Deserialize)]
struct File {
    eos_token_id: Option<i64>,
    decoder_start_token_id: Option<i64>,
    padding_idx: Option<i64>,
    max_source_positions: Option<usize>,
    max_target_positions: Option<usize>,
}

impl TranslationConfig {
    /// Reads `eos_token_id` (2), `decoder_start_token_id` (the one that ends texts, as fairseq has it), `padding_idx` (1) and
    /// `max_source_positions` and `max_target_positions` from `config.json` in `folder`; a file that is not there says nothing.
    ///
    /// # Errors
    /// [`Error::Read`](crate::Error::Read) or [`Error::Malformed`](crate::Error::Malformed) for a file that is there.
    pub fn from_folder(folder: &Path) -> Result<TranslationConfig> {
        let file: File = read_json(&folder.join("config.json"))?;
        let end = file.eos_token_id.unwrap_or(END);
        Ok(TranslationConfig {
            start: file.decoder_start_token_id.unwrap_or(end),
            end,
            padding: file.padding_idx.unwrap_or(PADDING),
            max_source: file.max_source_positions,
            max_target: file.max_target_positions,
        })
    }
}
