//! tokenizer_config.json: the checkpoint's, with a class that reads tokenizer.json; written where there is only that.

use super::facts::{Facts, Kind};
use super::json;
use crate::error::Error;
use serde_json::{Map, Value, json};
use std::fs;

/// transformers' class for any tokenizer.json.
const CLASS: &str = "PreTrainedTokenizerFast";

/// What to know of a language model without a tokenizer.json.
pub(super) const MISSING: &str = "tokenizer.json is not written, because the checkpoint has none, so that moh-run and servers \
                                  take and give token numbers only; put the model's tokenizer.json into the checkpoint's folder";

pub(super) fn write(facts: &Facts<'_>) -> Result<Option<String>, Error> {
    let at = |name: &str| facts.checkpoint.folder().join(name);
    let there = json::read(&at("tokenizer_config.json"))?;
    if !at("tokenizer.json").is_file() {
        return Ok(there.map(|(_, text)| text));
    }
    // transformers would choose the class by `model_type`, and LLaMA's changes what other tokenizers do.
    let class = ("tokenizer_class", json!(CLASS));
    // By default that class also makes `token_type_ids`, which the models do not have.
    let inputs = ("model_input_names", json!(["input_ids", "attention_mask"]));
    if let Some((object, text)) = there {
        let known = object.get("tokenizer_class").filter(|class| !class.is_null());
        let mut keys = Vec::new();
        if known.is_none() {
            keys.push(class);
        }
        if known.is_none_or(|class| class == CLASS) && !object.contains_key(inputs.0) {
            keys.push(inputs);
        }
        return Ok(Some(json::with_keys(&object, &text, keys)));
    }
    if matches!(facts.kind, Kind::Other | Kind::Diffusion | Kind::Classifier { .. }) {
        return Ok(None);
    }
    let mut keys = Map::from_iter([class, inputs].map(|(key, value)| (key.to_owned(), value)));
    let tokens = &facts.tokens;
    let special =
        [("bos_token", tokens.begin), ("eos_token", tokens.end.first().copied()), ("pad_token", tokens.padding)];
    for (key, id) in special {
        if let Some(text) = id.and_then(|id| tokens.texts.get(&id)) {
            keys.insert(key.to_owned(), json!(text));
        }
    }
    keys.insert("clean_up_tokenization_spaces".to_owned(), json!(false));
    if let Some(context) = facts.context() {
        keys.insert("model_max_length".to_owned(), json!(context));
    }
    if let Ok(template) = fs::read_to_string(at("chat_template.jinja")) {
        keys.insert("chat_template".to_owned(), json!(template));
    }
    Ok(Some(json::pretty(&Value::Object(keys))))
}
