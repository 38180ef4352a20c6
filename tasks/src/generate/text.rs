//! Tokens to text, piece by piece.

use crate::text::Tokenizer;
use std::borrow::Borrow;

/// Tokens of one character, or without a text, with some room.
const LONGEST: usize = 8;
/// What an incomplete character decodes to.
const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// Turns a stream of tokens into text as soon as it is certain: a character whose bytes are spread over several tokens
/// comes out whole.
#[derive(Clone)]
pub struct TextStream<T> {
    tokenizer: T,
    /// The tokens of the last piece that was certain, and those after them.
    pending: Vec<u32>,
    /// How many of the pending tokens are that piece's. All of them have to be there: where tokens are bytes, decoders make characters only of
    /// rows of bytes that are whole.
    settled: usize,
    /// The part of the pending tokens' text that is out.
    shown: String,
}

impl<T: Borrow<Tokenizer>> TextStream<T> {
    /// A stream whose text continues `context`, the prompt's tokens: decoders look at the token before to place spaces, and at all bytes of a
    /// character.
    ///
    /// # Errors
    /// The tokenizer's.
    pub fn new(tokenizer: T, context: &[u32]) -> Result<TextStream<T>, String> {
        let (mut pending, mut shown) = (Vec::new(), String::new());
        for tokens in 1..=LONGEST.min(context.len()) {
            pending = context[context.len() - tokens..].to_vec();
            shown = tokenizer.borrow().decode(&pending, true)?;
            if !shown.contains(REPLACEMENT) && !shown.is_empty() {
                break;
            }
        }
        Ok(TextStream { tokenizer, settled: pending.len(), pending, shown })
    }

    /// The text that is certain once `token` is known; often empty.
    ///
    /// # Errors
    /// The tokenizer's.
    pub fn push(&mut self, token: u32) -> Result<String, String> {
        self.pending.push(token);
        let (text, out) = self.decode()?;
        let certain = text.trim_end_matches(REPLACEMENT).len();
        let piece = text.get(out..certain).unwrap_or_default().to_owned();
        if certain == text.len() {
            let newest = self.tokenizer.borrow().decode(&self.pending[self.settled..], true)?;
            // After a token without a text, such as a special one, the next would count as a text's first word and lose its space.
            let goes_on = newest.is_empty() && self.pending.len() < LONGEST;
            self.shown = if goes_on { text } else { newest };
            self.pending.drain(..if goes_on { 0 } else { self.settled });
            self.settled = self.pending.len();
        } else if !piece.is_empty() {
            self.shown = text[..certain].to_owned();
        }
        Ok(piece)
    }

    /// What is left at the end: an incomplete character, as replacement characters. There is nothing left afterwards.
    ///
    /// # Errors
    /// The tokenizer's.
    pub fn rest(&mut self) -> Result<String, String> {
        let (text, out) = self.decode()?;
        let rest = text.get(out..).unwrap_or_default().to_owned();
        (self.settled, self.shown) = (self.pending.len(), text);
        Ok(rest)
    }

    /// The pending tokens' text, and how many bytes of it are out. An incomplete character may take those of the settled tokens with it: they are
    /// out, and not decoded any more.
    fn decode(&mut self) -> Result<(String, usize), String> {
        let tokenizer = self.tokenizer.borrow();
        let mut text = tokenizer.decode(&self.pending, true)?;
        // Of a context that ends within a character, what is shown for it changes.
        let whole = self.shown.trim_end_matches(REPLACEMENT).len();
        if self.settled > 0 && !text.starts_with(&self.shown[..whole]) {
            self.pending.drain(..self.settled);
            (self.settled, self.shown) = (0, String::new());
            text = tokenizer.decode(&self.pending, true)?;
        }
        let out = if text.starts_with(&self.shown) { self.shown.len() } else { whole };
        Ok((text, out))
    }

    /// As [`TextStream::rest`], at the end of the stream.
    ///
    /// # Errors
    /// The tokenizer's.
    pub fn finish(mut self) -> Result<String, String> {
        self.rest()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Byte-level tokens, as GPT-2 writes bytes: é is C3 A9, 😀 is F0 9F 98 80.
    fn tokenizer() -> Tokenizer {
        let vocab = r#"{"a": 0, "Ã": 1, "©": 2, "Ġb": 3, "ð": 4, "Ł": 5, "ĺ": 6, "Ģ": 7, "<s>": 8, "Ã©ð": 9}"#;
        let json = format!(
            r#"{{"version": "1.0", "added_tokens": [{{"id": 8, "content": "<s>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true}}], "normalizer": null, "pre_tokenizer": null,
            "post_processor": null, "truncation": null, "padding": null,
            "decoder": {{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}},
            "model": {{"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": {vocab}, "merges": []}}}}"#
        );
        Tokenizer::from_bytes(json).unwrap()
    }

    /// Bytes that are tokens, as Llama 2 writes characters that are none: é is C3 A9, 😀 is F0 9F 98 80.
    fn tokenizer_of_bytes() -> Tokenizer {
        let vocab = r#"{"<unk>": 0, "▁a": 1, "b": 2, "<0x0A>": 3, "<0xC3>": 4, "<0xA9>": 5, "<0xF0>": 6, "<0x9F>": 7, "<0x98>": 8,
            "<0x80>": 9}"#;
        let json = format!(
            r#"{{"version": "1.0", "added_tokens": [{{"id": 10, "content": "<s>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true}}], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
            "truncation": null, "padding": null, "decoder": {{"type": "Sequence", "decoders": [
            {{"type": "Replace", "pattern": {{"String": "▁"}}, "content": " "}}, {{"type": "ByteFallback"}}, {{"type": "Fuse"}},
            {{"type": "Strip", "content": " ", "start": 1, "stop": 0}}]}},
            "model": {{"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "vocab": {vocab}, "merges": []}}}}"#
        );
        Tokenizer::from_bytes(json).unwrap()
    }

    /// What every token adds, and what the end adds.
    fn pieces(context: &[u32], tokens: &[u32]) -> (Vec<String>, String) {
        pieces_of(&tokenizer(), context, tokens)
    }

    fn pieces_of(tokenizer: &Tokenizer, context: &[u32], tokens: &[u32]) -> (Vec<String>, String) {
        let mut stream = TextStream::new(tokenizer, context).unwrap();
        let pieces = tokens.iter().map(|&token| stream.push(token).unwrap()).collect();
        (pieces, stream.finish().unwrap())
    }

    fn owned(pieces: &[&str], end: &str) -> (Vec<String>, String) {
        (pieces.iter().map(|&piece| piece.to_owned()).collect(), end.to_owned())
    }

    #[test]
    fn characters_come_out_whole() {
        assert_eq!(pieces(&[], &[0, 1, 2, 3]), owned(&["a", "", "é", " b"], ""));
        assert_eq!(pieces(&[], &[4, 5, 6, 7, 0]), owned(&["", "", "", "😀", "a"], ""));
        assert_eq!(pieces(&[], &[0, 9, 5, 6, 7]), owned(&["a", "é", "", "", "😀"], ""));
    }

    #[test]
    fn an_invalid_character_is_replaced_once_it_is_certain() {
        assert_eq!(pieces(&[], &[1, 0, 2]), owned(&["", "\u{FFFD}a", ""], "\u{FFFD}"));
        assert_eq!(pieces(&[], &[0, 4, 5]), owned(&["a", "", ""], "\u{FFFD}"));
    }

    #[test]
    fn the_prompt_is_not_repeated_and_special_tokens_are_silent() {
        assert_eq!(pieces(&[0, 3], &[3, 8, 0]), owned(&[" b", "", "a"], ""));
        assert_eq!(pieces(&[8], &[0]), owned(&["a"], ""));
    }

    /// The first word of a text loses its space, and no other.
    #[test]
    fn words_after_special_tokens_keep_their_space() {
        let tokenizer = tokenizer_of_bytes();
        let pieces = |context: &[u32], tokens: &[u32]| pieces_of(&tokenizer, context, tokens);
        assert_eq!(pieces(&[], &[1, 10, 1, 10, 10, 1, 2]), owned(&["a", "", " a", "", "", " a", "b"], ""));
        assert_eq!(pieces(&[1, 10], &[1]), owned(&[" a"], ""));
        assert_eq!(pieces(&[10], &[1, 10, 2]), owned(&["a", "", "b"], ""));
        // As many as there may be.
        assert_eq!(pieces(&[1], &[10; 40]).0.concat(), "");
    }

    /// Of bytes in a row none is decoded where one is missing, the first included.
    #[test]
    fn bytes_that_are_tokens_become_characters() {
        let tokenizer = tokenizer_of_bytes();
        let pieces = |context: &[u32], tokens: &[u32]| pieces_of(&tokenizer, context, tokens);
        let (smile, e) = ([6, 7, 8, 9], [4, 5]);
        assert_eq!(pieces(&[1], &[e, e].concat()), owned(&["", "é", "", "é"], ""));
        assert_eq!(pieces(&[], &[&smile[..], &smile, &[3, 1]].concat()).0.concat(), "😀😀\n a");
        assert_eq!(pieces(&[2], &[&e[..], &[3, 3], &e, &smile, &[2]].concat()).0.concat(), "é\n\né😀b");
        // A prompt that ends in bytes, and in half a character.
        assert_eq!(pieces(&[1, 4, 5], &[4, 5, 1]), owned(&["", "é", " a"], ""));
        assert_eq!(pieces(&[1, 6, 7, 8, 9], &[3, 2]), owned(&["\n", "b"], ""));
        assert_eq!(pieces(&[1, 6, 7], &[8, 9, 2]), owned(&["", "😀", "b"], ""));
        // An end in half a character.
        assert_eq!(pieces(&[1], &[4, 5, 4]), owned(&["", "é", ""], "\u{FFFD}"));
        assert_eq!(pieces(&[1], &[4, 2]), owned(&["", "\u{FFFD}b"], ""));
        // A byte that begins no character takes neither those before it with it, which are out, nor what follows.
        assert_eq!(pieces(&[1], &[4, 5, 4, 2]), owned(&["", "é", "", "\u{FFFD}b"], ""));
        assert_eq!(pieces(&[1], &[3, 4, 1, 4, 5]), owned(&["\n", "", "\u{FFFD} a", "", "é"], ""));
        let smiles = pieces(&[1], &[&smile[..], &[4, 2], &smile].concat());
        assert_eq!((smiles.0.concat().as_str(), smiles.1.as_str()), ("😀\u{FFFD}b😀", ""));
        // As the tokenizer decodes everything at once.
        let tokens: Vec<u32> =
            (0..50).flat_map(|i: u32| [&smile[..], &e, &[3], &[1, 2]][(i * i % 7 % 4) as usize].to_vec()).collect();
        let (pieces, end) = pieces(&[], &tokens);
        assert_eq!(pieces.concat() + &end, tokenizer.decode(&tokens, true).unwrap());
    }

    #[test]
    fn pieces_make_up_the_whole_text() {
        let tokenizer = tokenizer();
        let tokens: Vec<u32> = (0..400).map(|i| (i * i + i / 7) % 10).collect();
        let (pieces, end) = pieces(&[], &tokens);
        assert_eq!(pieces.concat() + &end, tokenizer.decode(&tokens, true).unwrap());
    }
}
