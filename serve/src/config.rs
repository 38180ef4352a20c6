//! What to serve, and how much of it.

use crate::error::{Error, Result};
use crate::keys::ApiKeys;
use moh_runtime::{MODEL_FILE, Options};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// What to serve.
#[derive(Debug, Clone)]
pub struct Config {
    /// The models, each under a name of its own.
    pub models: Vec<ModelSpec>,
    /// Where to listen; port 0: any free one.
    pub listen: SocketAddr,
    /// How to run each model.
    pub runtime: Options,
    /// Copies of each model, each in a thread of its own.
    pub instances: usize,
    /// Keys of which requests must have one; `None`: everybody is served.
    pub keys: Option<ApiKeys>,
    /// Bounds.
    pub limits: Limits,
}

/// Bounds of what requests may need. What exceeds one is refused, and nobody else notices.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Bytes of a request's body.
    pub body: usize,
    /// Requests that wait for a model.
    pub queue: usize,
    /// Sequences of an instance of a language model at a time.
    pub slots: usize,
    /// Bytes of the caches of all language models; `None`: most of what is free. Texts wait until there is room for them.
    pub cache: Option<usize>,
    /// Tokens of prompts that are read between two steps of the other sequences.
    pub prefill: usize,
    /// Rows of a batch of tensors.
    pub batch: usize,
    /// How long tensors wait for others to share a batch with.
    pub window: Duration,
    /// From a request's arrival to its end.
    pub timeout: Duration,
    /// Connections at a time.
    pub connections: usize,
    /// How long a client may take to send a request or to read what was sent.
    pub stall: Duration,
    /// From the signal to end to the end of requests that run.
    pub shutdown: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            body: 32 << 20,
            queue: 256,
            slots: 16,
            cache: None,
            prefill: 256,
            batch: 32,
            window: Duration::from_millis(2),
            timeout: Duration::from_secs(300),
            connections: 1024,
            stall: Duration::from_secs(60),
            shutdown: Duration::from_secs(30),
        }
    }
}

/// A model, and the name that requests call it by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelSpec {
    /// The name.
    pub name: String,
    /// The .onnx file, or the folder that holds it.
    pub path: PathBuf,
}

impl ModelSpec {
    /// Reads `PATH` or `NAME=PATH`. The name of a path is that of the model's folder, or of the file where that is not called model.onnx.
    ///
    /// # Errors
    /// [`Error::Name`] where there is no such name, or it has other characters than letters, digits, `.`, `_` and `-`.
    pub fn parse(text: &str) -> Result<ModelSpec> {
        let (name, path) = match text.split_once('=') {
            Some((name, path)) => (Some(name.to_owned()), PathBuf::from(path)),
            None => (None, PathBuf::from(text)),
        };
        let name = name.or_else(|| named_by(&path)).unwrap_or_default();
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if name.is_empty() || name.len() > 128 || !name.chars().all(fits) {
            return Err(Error::Name { model: text.to_owned(), name });
        }
        Ok(ModelSpec { name, path })
    }
}

fn named_by(path: &std::path::Path) -> Option<String> {
    let whole = std::path::absolute(path).ok()?;
    let is_file = whole.extension().is_some_and(|end| end == "onnx");
    let mut named = whole.as_path();
    if is_file && whole.file_name()? == MODEL_FILE {
        named = whole.parent()?;
    }
    // The folders that layouts put models into say nothing.
    if named.file_name().is_some_and(|name| name == "onnx" || name == "1") {
        named = named.parent()?;
    }
    let name = if named.extension().is_some_and(|end| end == "onnx") { named.file_stem() } else { named.file_name() };
    Some(name?.to_str()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Option<String> {
        ModelSpec::parse(text).ok().map(|spec| spec.name)
    }

    #[test]
    fn models_are_named_by_folder_or_file() {
        for (text, expected) in [
            ("out/llama", "llama"),
            ("out/llama/", "llama"),
            ("out/llama/model.onnx", "llama"),
            ("out/llama/onnx/model.onnx", "llama"),
            ("repository/digits/1/model.onnx", "digits"),
            ("out/encoder.onnx", "encoder"),
            ("out/llama-3.2", "llama-3.2"),
            ("out/llama-3.2/model.onnx", "llama-3.2"),
            ("tall=out/llama", "tall"),
        ] {
            assert_eq!(name(text).as_deref(), Some(expected), "{text}");
        }
        assert_eq!(ModelSpec::parse("a=b=c").ok().map(|spec| spec.path), Some(PathBuf::from("b=c")));
        for bad in ["=x", "a b=x", "a/b=x", "/", "é=x"] {
            assert_eq!(name(bad), None, "{bad}");
        }
    }
}
