//! genai_config.json, for onnxruntime-genai.

use super::facts::{Facts, Kind};
use super::json;
use crate::error::Error;
use crate::graph::Dim;
use serde_json::{Map, Value, json};

pub(super) const NAME: &str = "genai_config.json";

/// Settings of a generation_config.json that genai has under the same names.
const SEARCH: &[&str] = &["do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "min_length"];

/// Whether genai can run the model: a language model that takes calls of any length.
pub(crate) fn fits(facts: &Facts<'_>) -> bool {
    let symbolic =
        |name: &str| facts.graph.inputs.iter().any(|input| input.dims.contains(&Dim::Named(name.to_owned())));
    matches!(facts.kind, Kind::LanguageModel { .. }) && symbolic("sequence") && symbolic("past")
}

/// `None` for other models than language models, and for those that do not take the lengths that genai gives them.
/// `library` is the name of our library in the folder.
pub(super) fn write(facts: &Facts<'_>, library: Option<&str>) -> Result<Option<String>, Error> {
    let Kind::LanguageModel { vocab_size, layers, num_heads, kv_num_heads, head_dim } = facts.kind else {
        return Ok(None);
    };
    if !fits(facts) {
        return Ok(None);
    }
    let mut session = Map::from_iter([("provider_options".to_owned(), json!([]))]);
    if let Some(library) = library {
        session.insert("custom_ops_library".to_owned(), json!(library));
    }
    let mut decoder = json!({
        "filename": facts.place.model_from_folder(),
        "head_size": head_dim,
        "num_attention_heads": num_heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_num_heads,
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "position_ids": "position_ids",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
        "session_options": session,
    });
    if let Some(width) = facts.number("hidden_size") {
        decoder["hidden_size"] = json!(width);
    }
    let mut model = json!({ "type": "llama", "vocab_size": vocab_size, "decoder": decoder });
    for (key, value) in facts.tokens.keys() {
        model[key] = value;
    }
    // A cache that grows by concatenation would be read while it is written.
    let shares = crate::cache::in_place(facts.model);
    let mut search = json!({ "do_sample": false, "past_present_share_buffer": shares });
    if let Some((generation, _)) = json::read(&facts.checkpoint.folder().join("generation_config.json"))? {
        for key in SEARCH {
            if let Some(value) = generation.get(*key).filter(|value| !value.is_null()) {
                search[*key] = value.clone();
            }
        }
    }
    if let Some(context) = facts.context() {
        model["context_length"] = json!(context);
        search["max_length"] = json!(context);
    }
    Ok(Some(json::pretty(&json!({ "model": model, "search": search }))))
}

/// The model that a genai_config.json names.
pub(super) fn model_of(text: &[u8]) -> Option<String> {
    let config: Value = serde_json::from_slice(text).ok()?;
    Some(config.get("model")?.get("decoder")?.get("filename")?.as_str()?.to_owned())
}
