//! How probable tokens were, as the APIs tell it.

use super::unsupported;
use crate::problem::Problem;
use moh_tasks::generate::{Score, TextStream};
use moh_tasks::text::Tokenizer;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;
use utoipa::ToSchema;

/// Most probable tokens of each place that may be asked for.
const MOST: u64 = 20;
/// What stands for the logarithm of 0, which JSON has no number for.
const LEAST: f32 = -9999.0;

/// Completions' `logprobs`: the number of most probable tokens, if it is asked for.
///
/// # Errors
/// A [`Problem`] for anything but null, false or 0 to 20.
pub(super) fn of_completion(asked: Option<&Value>) -> Result<Option<usize>, Problem> {
    match asked {
        None | Some(Value::Null | Value::Bool(false)) => Ok(None),
        Some(value) => top("logprobs", value).map(Some),
    }
}

/// Chats' `logprobs` and `top_logprobs`, as [`of_completion`].
///
/// # Errors
/// A [`Problem`] for anything but null, true or false, and null or 0 to 20.
pub(super) fn of_chat(asked: Option<bool>, most_probable: Option<&Value>) -> Result<Option<usize>, Problem> {
    let most_probable = match most_probable {
        None | Some(Value::Null) => None,
        Some(value) => Some(top("top_logprobs", value)?),
    };
    match (asked.unwrap_or(false), most_probable) {
        (false, Some(1..)) => Err(unsupported("top_logprobs", "logprobs: true beside it")),
        (false, _) => Ok(None),
        (true, top) => Ok(Some(top.unwrap_or(0))),
    }
}

fn top(field: &str, value: &Value) -> Result<usize, Problem> {
    match value.as_u64().filter(|&top| top <= MOST) {
        Some(top) => Ok(top as usize),
        None => Err(Problem::invalid(format!("{field}: expected 0 to {MOST}, found {value}"))),
    }
}

/// Tokens of a completion and how probable they were, four lists of the same length.
#[derive(Debug, Default, Serialize, ToSchema)]
#[schema(as = CompletionLogprobs)]
pub(super) struct OfCompletion {
    tokens: Vec<String>,
    /// Natural logarithms; null for a prompt's first token, which follows nothing.
    token_logprobs: Vec<Option<f64>>,
    /// The most probable tokens of each place and the text's own, with their logprobs. Of tokens with the same text it has the most probable.
    top_logprobs: Vec<Option<BTreeMap<String, f64>>>,
    /// Where each begins in the text, in characters.
    text_offset: Vec<usize>,
}

/// Tokens of a chat and how probable they were.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ChatLogprobs)]
pub(super) struct OfChat {
    content: Vec<ChatToken>,
}

#[derive(Debug, Serialize, ToSchema)]
struct ChatToken {
    #[serde(flatten)]
    token: Likely,
    /// The most probable tokens, the most probable first.
    top_logprobs: Vec<Likely>,
}

#[derive(Debug, Serialize, ToSchema)]
struct Likely {
    token: String,
    /// Natural logarithm.
    logprob: f64,
    /// The text in UTF-8; null for a part of a character.
    bytes: Option<Vec<u8>>,
}

/// Turns the scores of a text's tokens, one after another, into what the APIs tell.
pub(super) struct Teller {
    tokenizer: Arc<Tokenizer>,
    /// The tokens so far; `None` where they cannot be decoded.
    stream: Option<TextStream<Arc<Tokenizer>>>,
    /// Characters of the text so far.
    offset: usize,
}

impl Teller {
    /// One for a text that continues `prompt`.
    pub(super) fn after(tokenizer: Arc<Tokenizer>, prompt: &[i64]) -> Teller {
        let context: Vec<u32> = prompt.iter().map(|&token| id(token)).collect();
        Teller { stream: TextStream::new(tokenizer.clone(), &context).ok(), tokenizer, offset: 0 }
    }

    /// For a completion. `first`: a token before, which nothing is told of because it follows nothing.
    pub(super) fn completion(&mut self, first: Option<i64>, scores: &[Score]) -> OfCompletion {
        let mut told = OfCompletion::default();
        let first = first.into_iter().map(|token| (token, None));
        for (token, score) in first.chain(scores.iter().map(|score| (score.token, Some(score)))) {
            let top = score.map(|score| {
                let mut top = BTreeMap::new();
                let own = (score.token, score.logprob);
                for &(token, logprob) in score.top.iter().chain([&own]) {
                    let known = top.entry(self.text(token).name).or_insert(number(logprob));
                    *known = known.max(number(logprob));
                }
                top
            });
            told.top_logprobs.push(top);
            told.token_logprobs.push(score.map(|score| number(score.logprob)));
            told.text_offset.push(self.offset);
            let text = self.text(token);
            self.offset += text.characters;
            told.tokens.push(text.name);
            self.go_on(token);
        }
        told
    }

    /// For a chat.
    pub(super) fn chat(&mut self, scores: &[Score]) -> OfChat {
        let mut content = Vec::with_capacity(scores.len());
        for score in scores {
            let likely = |&(token, logprob): &(i64, f32)| {
                let name = self.text(token).name;
                let bytes = (!name.contains(char::REPLACEMENT_CHARACTER)).then(|| name.clone().into_bytes());
                Likely { token: name, logprob: number(logprob), bytes }
            };
            let token = likely(&(score.token, score.logprob));
            content.push(ChatToken { token, top_logprobs: score.top.iter().map(likely).collect() });
            self.go_on(score.token);
        }
        OfChat { content }
    }

    /// What a token would add to the text.
    fn text(&self, token: i64) -> Text {
        let added = self.stream.clone().and_then(|mut stream| {
            let text = stream.push(id(token)).ok()?;
            Some(text + &stream.finish().ok()?)
        });
        match added {
            Some(text) if !text.is_empty() => Text { characters: text.chars().count(), name: text },
            // A special token, which texts do not show.
            _ => Text { characters: 0, name: self.tokenizer.token(id(token)).unwrap_or_default() },
        }
    }

    /// The text has this token.
    fn go_on(&mut self, token: i64) {
        self.stream = self.stream.take().and_then(|mut stream| stream.push(id(token)).is_ok().then_some(stream));
    }
}

struct Text {
    name: String,
    characters: usize,
}

/// A token as tokenizers have it; no model has others.
fn id(token: i64) -> u32 {
    u32::try_from(token).unwrap_or(u32::MAX)
}

/// What may take long, without holding other requests up.
pub(super) fn aside<T>(scores: &[Score], work: impl FnOnce() -> T) -> T {
    /// So many take no time.
    const FEW: usize = 8;
    if scores.len() <= FEW { work() } else { tokio::task::block_in_place(work) }
}

/// In float64, so that every way to write it gives the same text: clients compare these numbers.
fn number(logprob: f32) -> f64 {
    f64::from(logprob.max(LEAST))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    /// Byte-level tokens: é is two of them.
    fn tokenizer() -> Arc<Tokenizer> {
        let json = r#"{"version": "1.0", "added_tokens": [{"id": 5, "content": "</s>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true}], "normalizer": null, "pre_tokenizer": null,
            "post_processor": null, "truncation": null, "padding": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": {"a": 0, "Ġb": 1, "Ã": 2, "©": 3, "¨": 4, "</s>": 5}, "merges": []}}"#;
        Arc::new(Tokenizer::from_bytes(json).unwrap())
    }

    fn score(token: i64, logprob: f32, top: &[(i64, f32)]) -> Score {
        Score { token, logprob, top: top.to_vec() }
    }

    #[test]
    fn a_completion_tells_where_its_tokens_are() {
        let mut teller = Teller::after(tokenizer(), &[]);
        let part =
            teller.completion(Some(0), &[score(1, -1.5, &[(0, -0.5)]), score(2, -0.25, &[(2, -0.25), (3, -2.0)])]);
        assert_eq!(
            json!(part),
            json!({ "tokens": ["a", " b", "\u{fffd}"], "token_logprobs": [null, -1.5, -0.25], "text_offset": [0, 1, 3],
                // Parts of characters have one text.
                "top_logprobs": [null, { " b": -1.5, "a": -0.5 }, { "\u{fffd}": -0.25 }] })
        );
        let rest = teller.completion(None, &[score(3, f32::NEG_INFINITY, &[]), score(5, -1.0, &[])]);
        assert_eq!(
            json!(rest),
            json!({ "tokens": ["é", "</s>"], "token_logprobs": [-9999.0, -1.0], "text_offset": [4, 5],
                "top_logprobs": [{ "é": -9999.0 }, { "</s>": -1.0 }] })
        );
    }

    #[test]
    fn a_chat_tells_the_bytes_of_its_tokens() {
        let mut teller = Teller::after(tokenizer(), &[0, 2]);
        let told = teller.chat(&[score(3, -0.5, &[(3, -0.5), (4, -1.0)]), score(2, -0.25, &[])]);
        assert_eq!(
            json!(told),
            json!({ "content": [
                { "token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": [
                    { "token": "é", "logprob": -0.5, "bytes": [195, 169] },
                    { "token": "è", "logprob": -1.0, "bytes": [195, 168] }] },
                { "token": "\u{fffd}", "logprob": -0.25, "bytes": null, "top_logprobs": [] }] })
        );
    }

    #[test]
    fn numbers_of_tokens_are_bounded() {
        let completion = |value: Value| of_completion(Some(&value)).map_err(|problem| problem.message);
        assert_eq!(of_completion(None), Ok(None));
        assert_eq!(completion(json!(false)), Ok(None));
        assert_eq!(completion(json!(0)), Ok(Some(0)));
        assert_eq!(completion(json!(20)), Ok(Some(20)));
        assert_eq!(completion(json!(21)), Err("logprobs: expected 0 to 20, found 21".to_owned()));
        assert!(completion(json!(true)).is_err() && completion(json!(-1)).is_err());
        assert_eq!(of_chat(None, None), Ok(None));
        assert_eq!(of_chat(Some(true), None), Ok(Some(0)));
        assert_eq!(of_chat(Some(true), Some(&json!(5))), Ok(Some(5)));
        assert_eq!(of_chat(Some(false), Some(&json!(0))), Ok(None));
        assert!(of_chat(None, Some(&json!(5))).is_err() && of_chat(Some(true), Some(&json!(21))).is_err());
    }
}
