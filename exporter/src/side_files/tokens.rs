//! Tokens that begin, end and pad texts.

use super::json;
use crate::error::Error;
use moh_models::Checkpoint;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;

/// Numbers of special tokens, as far as the checkpoint's files tell.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct SpecialTokens {
    pub(super) begin: Option<i64>,
    /// Tokens that end a text.
    pub(super) end: Vec<i64>,
    pub(super) padding: Option<i64>,
    /// Texts of the tokenizer's special tokens, by number.
    pub(super) texts: BTreeMap<i64, String>,
}

/// What is read of tokenizer.json.
#[derive(Debug, Default, Deserialize)]
struct Tokenizer {
    #[serde(default)]
    added_tokens: Vec<Added>,
}

#[derive(Debug, Deserialize)]
struct Added {
    id: i64,
    content: String,
}

/// A number, or a list of them.
fn numbers(value: Option<&Value>) -> Vec<i64> {
    match value {
        Some(Value::Array(list)) => list.iter().filter_map(Value::as_i64).collect(),
        Some(one) => one.as_i64().into_iter().collect(),
        None => Vec::new(),
    }
}

impl SpecialTokens {
    /// From generation_config.json, else config.json, else the texts that tokenizer_config.json or special_tokens_map.json
    /// gives and tokenizer.json numbers.
    pub(super) fn read(checkpoint: &Checkpoint) -> Result<SpecialTokens, Error> {
        let object = |name: &str| {
            let found = json::read(&checkpoint.folder().join(name))?;
            Ok::<_, Error>(found.map_or_else(Map::new, |(object, _)| object))
        };
        let generation = object("generation_config.json")?;
        let named = [object("tokenizer_config.json")?, object("special_tokens_map.json")?];
        let path = checkpoint.folder().join("tokenizer.json");
        let tokenizer: Tokenizer = match fs::read(&path) {
            // One that only its own library can read is copied all the same.
            Ok(text) => serde_json::from_slice(&text).unwrap_or_default(),
            Err(_) => Tokenizer::default(),
        };
        let number = |text: &str| tokenizer.added_tokens.iter().find(|token| token.content == text).map(|t| t.id);
        let of = |kind: &str| {
            let key = format!("{kind}_token_id");
            let listed = [numbers(generation.get(&key)), numbers(checkpoint.config().value(&key))];
            let text = |object: &Map<String, Value>| {
                let token = object.get(&format!("{kind}_token"))?;
                number(token.as_str().or_else(|| token.get("content")?.as_str())?)
            };
            let found = listed.into_iter().find(|ids| !ids.is_empty());
            found.unwrap_or_else(|| named.iter().find_map(text).into_iter().collect())
        };
        let texts = tokenizer.added_tokens.iter().map(|token| (token.id, token.content.clone())).collect();
        Ok(SpecialTokens {
            begin: of("bos").first().copied(),
            end: of("eos"),
            padding: of("pad").first().copied(),
            texts,
        })
    }

    /// The first token that ends a text.
    pub(crate) fn first_end(&self) -> Option<i64> {
        self.end.first().copied()
    }

    /// The keys of the known ones, as configurations name them. Without a token for padding, it is the one that ends texts.
    pub(super) fn keys(&self) -> Vec<(&'static str, Value)> {
        let padding = self.padding.or(self.end.first().copied());
        let end = match self.end[..] {
            [] => None,
            [one] => Some(json!(one)),
            _ => Some(json!(self.end)),
        };
        let keys = [
            ("bos_token_id", self.begin.map(Value::from)),
            ("eos_token_id", end),
            ("pad_token_id", padding.map(Value::from)),
        ];
        keys.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
    }
}
