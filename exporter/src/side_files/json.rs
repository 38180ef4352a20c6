//! JSON objects as text: keys are added without touching the others.

use crate::error::Error;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// An object, and the text that it was read from.
pub(crate) type ObjectText = (Map<String, Value>, String);

/// The object in a file of the checkpoint and its text; `None` where there is no file.
///
/// # Errors
/// A file that cannot be read or holds no JSON object.
pub(crate) fn read(path: &Path) -> Result<Option<ObjectText>, Error> {
    if path.is_dir() {
        return Err(Error::io(path)(ErrorKind::IsADirectory.into()));
    }
    if !path.is_file() {
        return Ok(None);
    }
    let text = fs::read_to_string(path).map_err(Error::io(path))?;
    let values = serde_json::from_str(&text).map_err(|reason| moh_models::Error::Json {
        file: path.to_owned(),
        part: "configuration",
        reason,
    })?;
    Ok(Some((values, text)))
}

/// Reads a file of the checkpoint, and keeps nothing of it.
///
/// # Errors
/// A file that cannot be read or holds no JSON object.
pub(super) fn check(path: &Path, part: &'static str) -> Result<(), Error> {
    let text = fs::read(path).map_err(Error::io(path))?;
    let object: Result<BTreeMap<String, IgnoredAny>, _> = serde_json::from_slice(&text);
    object.map_err(|reason| moh_models::Error::Json { file: path.to_owned(), part, reason })?;
    Ok(())
}

/// `text`, which holds `object`, with these keys before its own; written anew where one of them is there with another value.
pub(crate) fn with_keys(object: &Map<String, Value>, text: &str, keys: Vec<(&str, Value)>) -> String {
    let changed: Vec<_> = keys.into_iter().filter(|(key, value)| object.get(*key) != Some(value)).collect();
    if changed.is_empty() {
        return text.to_owned();
    }
    let replaces = changed.iter().any(|(key, _)| object.contains_key(*key));
    match text.split_once('{') {
        Some((before, rest)) if !replaces && !object.is_empty() => {
            let added: Vec<String> = changed.iter().map(|(key, value)| format!("\n  {:?}: {value},", *key)).collect();
            let space = if rest.starts_with(['\n', '\r', ' ']) { "" } else { "\n  " };
            format!("{before}{{{}{space}{rest}", added.concat())
        }
        _ => {
            let mut object = object.clone();
            object.extend(changed.into_iter().map(|(key, value)| (key.to_owned(), value)));
            pretty(&Value::Object(object))
        }
    }
}

/// A file's text.
pub(crate) fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn keys_are_added_before_the_others() {
        let added = |text: &str, keys| with_keys(&serde_json::from_str(text).unwrap(), text, keys);
        let text = "{\n  \"b\": 1e-06,\n  \"a\": 1\n}\n";
        assert_eq!(added(text, vec![("a", 1.into())]), text);
        assert_eq!(
            added(text, vec![("a", 1.into()), ("c", "x".into())]),
            "{\n  \"c\": \"x\",\n  \"b\": 1e-06,\n  \"a\": 1\n}\n"
        );
        assert_eq!(added("{\"a\":1}", vec![("c", Value::Null)]), "{\n  \"c\": null,\n  \"a\":1}");
        assert_eq!(added("{}", vec![("c", 1.into())]), "{\n  \"c\": 1\n}\n");
        assert_eq!(added("{\"a\": 1}", vec![("a", 2.into())]), "{\n  \"a\": 2\n}\n");
    }
}
