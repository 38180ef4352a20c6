//! config.json: the checkpoint's, with the keys that transformers, Optimum and transformers.js need. Ours stay, `family` among
//! them, so that the file can be exported with again.

use super::facts::{Facts, Kind};
use super::json;
use crate::error::Error;
use serde_json::{Map, Value, json};

pub(super) fn write(facts: &Facts<'_>) -> Result<String, Error> {
    let (object, text) = facts.config()?;
    let family = ("family", json!(facts.model.family()));
    let standard = match &facts.kind {
        Kind::LanguageModel { kv_num_heads, head_dim, .. } => {
            let sizes = [("num_key_value_heads", json!(kv_num_heads)), ("head_dim", json!(head_dim))];
            [model_type(&object, "llama", "LlamaForCausalLM"), absent(&object, sizes)].concat()
        }
        Kind::Classifier { classes, .. } => {
            [model_type(&object, "vit", "ViTForImageClassification"), labels(&object, *classes)].concat()
        }
        Kind::Translator => {
            let mut keys = model_type(&object, "marian", "MarianMTModel");
            keys.extend(absent(&object, facts.translator.clone()));
            keys
        }
        Kind::Diffusion | Kind::Other => Vec::new(),
    };
    // What serves no other stack stays as it is.
    let browser = !standard.is_empty() && facts.external;
    let browser =
        browser.then(|| absent(&object, [("transformers.js_config", json!({"use_external_data_format": true}))]));
    let keys = standard.into_iter().chain(browser.into_iter().flatten());
    Ok(json::with_keys(&object, &text, [family].into_iter().chain(keys).collect()))
}

/// Those of `keys` that `object` lacks, or has as null.
fn absent(
    object: &Map<String, Value>,
    keys: impl IntoIterator<Item = (&'static str, Value)>,
) -> Vec<(&'static str, Value)> {
    keys.into_iter().filter(|(key, _)| object.get(*key).is_none_or(Value::is_null)).collect()
}

/// A `model_type` that transformers knows, unless the file has one; names of ours are none.
fn model_type(object: &Map<String, Value>, name: &str, class: &str) -> Vec<(&'static str, Value)> {
    let ours = |name: &str| name.starts_with("moh") || name == "moa";
    let kept = object.get("model_type").and_then(Value::as_str).filter(|found| !ours(found)).unwrap_or(name);
    let mut keys = vec![("model_type", json!(kept))];
    keys.extend(absent(object, [("architectures", json!([class]))]));
    keys
}

/// `label2id` from `id2label`; without labels their number.
fn labels(object: &Map<String, Value>, classes: usize) -> Vec<(&'static str, Value)> {
    let Some(labels) = object.get("id2label").and_then(Value::as_object) else {
        return absent(object, [("num_labels", json!(classes))]);
    };
    let number = |(id, label): (&String, &Value)| Some((label.as_str()?.to_owned(), json!(id.parse::<u64>().ok()?)));
    let numbers: Option<Map<String, Value>> = labels.iter().map(number).collect();
    // Labels that are not unique have no numbers.
    let numbers = numbers.filter(|numbers| numbers.len() == labels.len());
    absent(object, numbers.map(|numbers| ("label2id", Value::Object(numbers))))
}
