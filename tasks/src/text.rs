//! Texts and their tokens.

use crate::error::{Error, Result};
use crate::generate::GenerationConfig;
use moh_runtime::guard;
use std::collections::HashMap;
use std::path::Path;

/// A tokenizer, whose library panics on some files that are malformed: here that is an error.
pub struct Tokenizer(tokenizers::Tokenizer);

impl Tokenizer {
    /// Reads a `tokenizer.json`. Texts are neither cut nor padded, as a training may have asked for when the file was saved: transformers leaves
    /// that out of generation, too.
    ///
    /// # Errors
    /// Why it is none.
    pub fn from_bytes(json: impl AsRef<[u8]>) -> std::result::Result<Tokenizer, String> {
        let mut tokenizer = flat(guard(|| tokenizers::Tokenizer::from_bytes(json)))?;
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|e| e.to_string())?;
        Ok(Tokenizer(tokenizer))
    }

    /// A text's tokens. `special`: with those that the tokenizer puts around texts.
    ///
    /// # Errors
    /// Why it has none.
    pub fn encode(&self, text: &str, special: bool) -> std::result::Result<Vec<u32>, String> {
        flat(guard(|| self.0.encode(text, special))).map(|encoding| encoding.get_ids().to_vec())
    }

    /// The text of tokens, without special ones where `skips_special`.
    ///
    /// # Errors
    /// Why they have none.
    pub fn decode(&self, ids: &[u32], skips_special: bool) -> std::result::Result<String, String> {
        flat(guard(|| self.0.decode(ids, skips_special)))
    }

    /// A token as its vocabulary spells it.
    pub fn token(&self, id: u32) -> Option<String> {
        self.0.id_to_token(id)
    }

    /// All tokens and their numbers.
    fn vocabulary(&self) -> HashMap<String, u32> {
        self.0.get_vocab(true)
    }
}

fn flat<T>(result: std::result::Result<tokenizers::Result<T>, String>) -> std::result::Result<T, String> {
    result?.map_err(|e| e.to_string())
}

/// The tokenizer in a model's folder.
///
/// # Errors
/// [`Error::Tokenizer`] where there is none, or it is not one, or it has tokens that the model, which knows `vocabulary` of them, does not.
pub fn load_tokenizer(folder: &Path, vocabulary: Option<usize>) -> Result<Tokenizer> {
    let path = folder.join("tokenizer.json");
    let bad = |problem: String| Error::Tokenizer { path: path.clone(), problem };
    let text = std::fs::read(&path).map_err(|e| {
        bad(format!(
            "the model's tokenizer must be beside it: copy it from the checkpoint, or give token numbers and --ids: {e}"
        ))
    })?;
    let tokenizer = Tokenizer::from_bytes(text).map_err(|e| bad(format!("not a tokenizer: {e}")))?;
    // Vocabularies may be padded to a round size, so the model may know more.
    let tokens = tokenizer.vocabulary();
    match (vocabulary, tokens.iter().max_by_key(|(_, id)| **id)) {
        (Some(vocabulary), Some((token, &id))) if id as usize >= vocabulary => Err(bad(format!(
            "not the model's tokenizer: its token {token:?} is number {id}, and the model knows {vocabulary}"
        ))),
        _ => Ok(tokenizer),
    }
}

/// Checks that the model knows the tokens; `vocabulary` is how many it knows.
///
/// # Errors
/// [`Error::Token`] naming the first one that it does not know.
pub fn check_ids(ids: &[i64], vocabulary: Option<usize>) -> Result<()> {
    let is_known = |&id: &i64| usize::try_from(id).is_ok_and(|id| vocabulary.is_none_or(|count| id < count));
    match ids.iter().find(|id| !is_known(id)) {
        Some(&id) => Err(Error::Token { id, vocabulary }),
        None => Ok(()),
    }
}

/// A text's tokens; for an empty text the one that begins texts. `special`: with the tokens that the tokenizer puts around texts.
///
/// # Errors
/// [`Error::Prompt`] where it cannot be tokenized, or is empty and the model has no token that begins texts.
pub fn encode(tokenizer: &Tokenizer, text: &str, special: bool, config: &GenerationConfig) -> Result<Vec<u32>> {
    let tokens = tokenizer.encode(text, special);
    or_begin(tokens.map_err(|e| Error::Prompt(format!("it cannot be tokenized: {e}")))?, config)
}

/// The tokens of a prompt, or where there are none the one that begins texts.
///
/// # Errors
/// [`Error::Prompt`] where the model has no such token.
pub fn or_begin<T: TryFrom<i64>>(ids: Vec<T>, config: &GenerationConfig) -> Result<Vec<T>> {
    let begin = config.begin.and_then(|id| T::try_from(id).ok());
    match (ids.is_empty(), begin) {
        (false, _) => Ok(ids),
        (true, Some(begin)) => Ok(vec![begin]),
        (true, None) => Err(Error::Prompt("it is empty, and the model has no token that begins a text".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Found by the fuzz target `tokenizer`: the library panics.
    #[test]
    fn a_tokenizer_whose_decoder_is_no_json_is_an_error() {
        let error = Tokenizer::from_bytes(r#"{"version": "1.0", "decoder": {"type": "ByteLevel", 1: 2}}"#).err();
        assert!(error.as_ref().is_some_and(|error| error.contains("key must be a string")), "{error:?}");
    }

    /// What a training asked for when the file was saved.
    #[test]
    fn texts_are_neither_cut_nor_padded() {
        let json = r#"{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
            "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
            "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0,
            "pad_token": "a"}, "decoder": null, "model": {"type": "BPE", "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": {"a": 0, "b": 1}, "merges": []}}"#;
        let tokenizer = Tokenizer::from_bytes(json).map_err(|e| assert_eq!(e, "")).ok();
        assert_eq!(tokenizer.map(|tokenizer| tokenizer.encode("bab", true)), Some(Ok(vec![1, 0, 1])));
    }
}
