//! What generation needs to know of a model's configuration.

use crate::error::{Error, Result};
use crate::files::read_json;
use serde::Deserialize;
use serde_json::Value;
use std::path::Path;

/// A model's special tokens and its longest sequence, from the files that Hugging Face models have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GenerationConfig {
    /// The token that begins a text, if the model has one.
    pub begin: Option<i64>,
    /// Tokens that end a text.
    pub end: Vec<i64>,
    /// The longest sequence that the model was made for.
    pub max_length: Option<usize>,
}

#[derive(Debug, Default, Deserialize)]
struct File {
    #[serde(default)]
    bos_token_id: Value,
    #[serde(default)]
    eos_token_id: Value,
    max_position_embeddings: Option<usize>,
}

impl GenerationConfig {
    /// Reads `config.json` in `folder`, and `generation_config.json`, which takes precedence. A file that is not there says
    /// nothing.
    ///
    /// # Errors
    /// [`Error::Read`](crate::Error::Read) or [`Error::Malformed`](crate::Error::Malformed) for a file that is there.
    pub fn from_folder(folder: &Path) -> Result<GenerationConfig> {
        let paths = ["config.json", "generation_config.json"].map(|name| folder.join(name));
        let [model, generation]: [File; 2] = [read_json(&paths[0])?, read_json(&paths[1])?];
        let tokens = |key, of: fn(&File) -> &Value| {
            let [usual, first] = [token_ids(&paths[0], key, of(&model))?, token_ids(&paths[1], key, of(&generation))?];
            Ok::<_, Error>(if first.is_empty() { usual } else { first })
        };
        Ok(GenerationConfig {
            begin: tokens("bos_token_id", |file| &file.bos_token_id)?.first().copied(),
            end: tokens("eos_token_id", |file| &file.eos_token_id)?,
            max_length: model.max_position_embeddings,
        })
    }
}

/// One id, a list of them, or null.
fn token_ids(path: &Path, key: &str, value: &Value) -> Result<Vec<i64>> {
    let ids = match value {
        Value::Null => Some(Vec::new()),
        Value::Array(list) => list.iter().map(Value::as_i64).collect(),
        one => one.as_i64().map(|id| vec![id]),
    };
    ids.ok_or_else(|| {
        let reason = format!("{key}: expected the number of a token, or a list of them, found {value}");
        Error::malformed(path, "a model configuration", reason)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn generation_config_takes_precedence_and_both_may_be_missing() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(GenerationConfig::from_folder(folder.path()).unwrap(), GenerationConfig::default());
        let config = r#"{"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512, "hidden_size": 8}"#;
        std::fs::write(folder.path().join("config.json"), config).unwrap();
        let read = || GenerationConfig::from_folder(folder.path()).unwrap();
        assert_eq!(read(), GenerationConfig { begin: Some(1), end: vec![2], max_length: Some(512) });
        let generation = r#"{"bos_token_id": null, "eos_token_id": [3, 4]}"#;
        std::fs::write(folder.path().join("generation_config.json"), generation).unwrap();
        assert_eq!(read(), GenerationConfig { begin: Some(1), end: vec![3, 4], max_length: Some(512) });
    }

    /// Without them texts would not end.
    #[test]
    fn tokens_that_are_no_numbers_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        for (file, key) in [("config.json", "bos_token_id"), ("generation_config.json", "eos_token_id")] {
            for found in [r#""</s>""#, "[2,null]", "2.0", "true", "{}"] {
                std::fs::write(folder.path().join(file), format!(r#"{{"{key}": {found}}}"#)).unwrap();
                let error = GenerationConfig::from_folder(folder.path()).unwrap_err();
                let expected = format!("{key}: expected the number of a token, or a list of them, found {found}");
                let message = format!("{:#}", anyhow::Error::from(error));
                assert!(message.contains(file) && message.ends_with(&expected), "{message}");
            }
            std::fs::write(folder.path().join(file), format!(r#"{{"{key}": []}}"#)).unwrap();
            assert_eq!(GenerationConfig::from_folder(folder.path()).unwrap(), GenerationConfig::default());
        }
    }

    #[test]
    fn a_damaged_file_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), "{").unwrap();
        let message = GenerationConfig::from_folder(folder.path()).unwrap_err().to_string();
        assert!(message.contains("config.json: not a model configuration"), "{message}");
    }
}
