//! The tokens of a text.

use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use tokenizers::Tokenizer;

/// More bytes than a token has, on average, in any text.
const BYTES: usize = 64;

/// The first `count` tokens of a text, or all that it has, by the tokenizer in `folder`; those that the tokenizer puts around texts are
/// among them.
pub(crate) fn first(folder: &Path, text: &Path, count: usize) -> Result<Vec<i64>> {
    let file = folder.join("tokenizer.json");
    let bytes = std::fs::read(&file).with_context(|| {
        let needed = "--text needs the checkpoint's tokenizer as tokenizer.json, beside the weights";
        format!("{}: {needed}", file.display())
    })?;
    // As the file was saved in a training, it may cut and pad texts.
    let tokenizer = caught(|| {
        let mut tokenizer = Tokenizer::from_bytes(bytes)?;
        tokenizer.with_padding(None).with_truncation(None)?;
        Ok(tokenizer)
    });
    let tokenizer = tokenizer.map_err(|error| anyhow::anyhow!("{}: not a tokenizer: {error}", file.display()))?;
    let mut bytes = Vec::new();
    let read = File::open(text).and_then(|file| file.take((BYTES * count) as u64).read_to_end(&mut bytes));
    read.with_context(|| text.display().to_string())?;
    // The last character may have been cut.
    let known = match std::str::from_utf8(&bytes) {
        Ok(known) => known,
        Err(error) if error.error_len().is_none() => str::from_utf8(&bytes[..error.valid_up_to()])?,
        Err(error) => anyhow::bail!("{}: expected a text in UTF-8: {error}", text.display()),
    };
    let encoding = caught(|| tokenizer.encode(known, true));
    let encoding = encoding.map_err(|error| anyhow::anyhow!("{}: cannot be tokenized: {error}", text.display()))?;
    let ids: Vec<i64> = encoding.get_ids().iter().take(count).map(|&id| i64::from(id)).collect();
    ensure!(ids.len() > 1, "{}: expected at least 2 tokens, found {}", text.display(), ids.len());
    Ok(ids)
}

/// The library panics on some files that are malformed.
fn caught<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    moh_runtime::guard(work)?.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn tokens_around_a_text_are_its_first_and_last() {
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = r#"{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
            "decoder": null, "truncation": null, "padding": null,
            "post_processor": {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [9], "tokens": ["<s>"]}}},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                "vocab": {"a": 0, "b": 1, "é": 2}, "merges": []}}"#;
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer).unwrap();
        let text = folder.path().join("text");
        std::fs::write(&text, "abaé").unwrap();
        assert_eq!(first(folder.path(), &text, 99).unwrap(), [9, 0, 1, 0, 2]);
        assert_eq!(first(folder.path(), &text, 3).unwrap(), [9, 0, 1]);
        std::fs::write(&text, "").unwrap();
        assert!(
            first(folder.path(), &text, 3).unwrap_err().to_string().contains("expected at least 2 tokens, found 1")
        );
        let saved = tokenizer.replace(
            "\"truncation\": null, \"padding\": null",
            r#""truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
            "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 1,
                "pad_type_id": 0, "pad_token": "b"}"#,
        );
        std::fs::write(folder.path().join("tokenizer.json"), &saved).unwrap();
        std::fs::write(&text, "abaé").unwrap();
        assert!(saved.contains("Fixed"));
        assert_eq!(first(folder.path(), &text, 99).unwrap(), [9, 0, 1, 0, 2]);
    }
}
