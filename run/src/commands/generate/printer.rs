//! Tokens to what is shown of them: numbers, or text up to a stop text.

use anyhow::{Context, Result, anyhow};
use moh_tasks::generate::{StopTexts, TextStream};
use moh_tasks::text::Tokenizer;

/// What is shown of one sequence, piece by piece.
pub(super) struct Printer<'a> {
    text: Option<TextStream<&'a Tokenizer>>,
    stop_tokens: &'a [i64],
    stop_texts: StopTexts,
    begun: bool,
    ended: bool,
}

impl<'a> Printer<'a> {
    /// A printer of text that continues `prompt`, or of numbers where there is no tokenizer.
    pub(super) fn new(
        tokenizer: Option<&'a Tokenizer>,
        prompt: &[i64],
        stop_tokens: &'a [i64],
        stop_texts: &[String],
    ) -> Result<Printer<'a>> {
        let prompt: Vec<u32> = prompt.iter().filter_map(|&id| u32::try_from(id).ok()).collect();
        let text =
            tokenizer.map(|tokenizer| TextStream::new(tokenizer, &prompt)).transpose().map_err(|e| anyhow!(e))?;
        let stop_texts = StopTexts::new(stop_texts.to_vec());
        Ok(Printer { text, stop_tokens, stop_texts, begun: false, ended: false })
    }

    /// Whether nothing more will be shown.
    pub(super) fn ended(&self) -> bool {
        self.ended
    }

    /// What can be shown once `token` is known.
    pub(super) fn push(&mut self, token: i64) -> Result<String> {
        if self.ended {
            return Ok(String::new());
        }
        let stops = self.stop_tokens.contains(&token);
        let Some(text) = &mut self.text else {
            let separator = if self.begun { " " } else { "" };
            (self.begun, self.ended) = (true, stops);
            return Ok(format!("{separator}{token}"));
        };
        if stops {
            return self.finish();
        }
        let token = u32::try_from(token).with_context(|| format!("token {token} is out of range"))?;
        let piece = text.push(token).map_err(|e| anyhow!(e))?;
        Ok(self.until_stop(&piece))
    }

    /// What was held back, at the end.
    pub(super) fn finish(&mut self) -> Result<String> {
        if self.ended {
            return Ok(String::new());
        }
        let rest = self.text.take().map_or(Ok(String::new()), TextStream::finish).map_err(|e| anyhow!(e))?;
        let shown = self.until_stop(&rest);
        self.ended = true;
        Ok(shown + &self.stop_texts.finish())
    }

    fn until_stop(&mut self, piece: &str) -> String {
        let shown = self.stop_texts.push(piece);
        self.ended = self.stop_texts.reached();
        shown
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn tokenizer() -> Tokenizer {
        let json = r#"{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
            "post_processor": null, "truncation": null, "padding": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": {"a": 0, "b": 1, "c": 2, "Ã": 3, "©": 4}, "merges": []}}"#;
        Tokenizer::from_bytes(json).unwrap()
    }

    /// What is shown after every token, and at the end.
    fn shown(tokens: &[i64], ids: bool, stop_tokens: &[i64], stop_texts: &[&str]) -> (Vec<String>, String) {
        let tokenizer = tokenizer();
        let stop_texts: Vec<String> = stop_texts.iter().map(|&stop| stop.to_owned()).collect();
        let tokenizer = (!ids).then_some(&tokenizer);
        let mut printer = Printer::new(tokenizer, &[], stop_tokens, &stop_texts).unwrap();
        let pieces = tokens.iter().map(|&token| printer.push(token).unwrap()).collect();
        let end = printer.finish().unwrap();
        assert!(printer.ended());
        (pieces, end)
    }

    fn owned(pieces: &[&str], end: &str) -> (Vec<String>, String) {
        (pieces.iter().map(|&piece| piece.to_owned()).collect(), end.to_owned())
    }

    #[test]
    fn text_ends_before_a_stop_text() {
        assert_eq!(shown(&[0, 1, 2, 0], false, &[], &[]), owned(&["a", "b", "c", "a"], ""));
        assert_eq!(shown(&[0, 1, 2, 0], false, &[], &["bc"]), owned(&["a", "", "", ""], ""));
        assert_eq!(shown(&[1, 1, 2, 0], false, &[], &["bc"]), owned(&["", "b", "", ""], ""));
        assert_eq!(shown(&[0, 1, 1, 1], false, &[], &["bc"]), owned(&["a", "", "b", "b"], "b"));
        assert_eq!(shown(&[0, 1, 2], false, &[], &["c", "bcx"]), owned(&["a", "", "b"], ""));
        assert_eq!(shown(&[3, 4, 0, 1], false, &[], &["éa"]), owned(&["", "", "", ""], ""));
    }

    /// The first word of a text loses the space before it, and a continuation begins with no first word.
    #[test]
    fn text_continues_the_prompt() {
        let json = r#"{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
            "post_processor": null, "truncation": null, "padding": null,
            "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": {"▁a": 0, "▁b": 1}, "merges": []}}"#;
        let tokenizer = Tokenizer::from_bytes(json).unwrap();
        let shown = |prompt: &[i64]| {
            let mut printer = Printer::new(Some(&tokenizer), prompt, &[], &[]).unwrap();
            printer.push(1).unwrap() + &printer.push(0).unwrap() + &printer.finish().unwrap()
        };
        assert_eq!(shown(&[0]), " b a");
        assert_eq!(shown(&[]), "b a");
    }

    #[test]
    fn stop_tokens_are_numbers_but_no_text() {
        assert_eq!(shown(&[0, 1, 2], false, &[1], &[]), owned(&["a", "", ""], ""));
        assert_eq!(shown(&[0, 1, 2], true, &[1], &[]), owned(&["0", " 1", ""], ""));
        assert_eq!(shown(&[0, 1], false, &[1], &["ab"]), owned(&["", "a"], ""));
    }
}
