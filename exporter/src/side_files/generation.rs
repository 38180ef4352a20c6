//! generation_config.json: the checkpoint's; else greedy search up to the model's context. Without the file, transformers stops
//! after 20 tokens.

use super::facts::{Facts, Kind};
use super::json;
use crate::error::Error;
use serde_json::{Map, Value, json};

pub(super) fn write(facts: &Facts<'_>) -> Result<Option<String>, Error> {
    if let Some((_, text)) = json::read(&facts.checkpoint.folder().join("generation_config.json"))? {
        return Ok(Some(text));
    }
    let mut keys: Map<String, Value> =
        facts.tokens.keys().into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    match facts.kind {
        Kind::LanguageModel { .. } => {}
        Kind::Translator => {
            let of_translator = facts.translator.iter().filter(|(key, _)| key.ends_with("_token_id"));
            keys.extend(of_translator.map(|(key, value)| ((*key).to_owned(), value.clone())));
        }
        Kind::Classifier { .. } | Kind::Diffusion | Kind::Other => return Ok(None),
    }
    keys.insert("do_sample".to_owned(), json!(false));
    if let Some(context) = facts.context() {
        keys.insert("max_length".to_owned(), json!(context));
    }
    Ok(Some(json::pretty(&Value::Object(keys))))
}
