//! Why a task fails.

use std::path::{Path, PathBuf};

/// A failed task.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model cannot be loaded or run.
    #[error(transparent)]
    Runtime(#[from] moh_runtime::Error),
    /// There is no such file.
    #[error("{}: {what} not found", path.display())]
    NotFound {
        /// The file.
        path: PathBuf,
        /// What it was to be.
        what: &'static str,
    },
    /// A file cannot be read.
    #[error("{}: cannot be read", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file cannot be written.
    #[error("{}: cannot be written", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{}: not {expected}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What it should be.
        expected: &'static str,
        /// What is wrong with it.
        #[source]
        reason: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The model ran, but its output is not what the task needs.
    #[error("{}: {runtime} failed: {reason}", path.display())]
    Output {
        /// The model.
        path: PathBuf,
        /// The runtime.
        runtime: &'static str,
        /// What was expected and what was found.
        reason: String,
    },
    /// A model for another task.
    #[error("{}: not {expected}: {reason}{}", path.display(), of_family(family.as_deref()))]
    Task {
        /// The model.
        path: PathBuf,
        /// What the task needs.
        expected: &'static str,
        /// What is missing or unexpected.
        reason: String,
        /// The model's family, if its metadata names one.
        family: Option<String>,
    },
    /// Samples that do not make up a picture.
    #[error("a picture of {width} x {height} pixels and {channels} channels (expected 1 or 3): found {found} samples")]
    Picture {
        /// Pixels in a row.
        width: usize,
        /// Rows.
        height: usize,
        /// Channels.
        channels: usize,
        /// Number of samples.
        found: usize,
    },
    /// A tensor that holds no pictures.
    #[error("expected float32 pictures of shape (batch, 1 or 3, height, width), found {found}")]
    Samples {
        /// Its element type and shape.
        found: String,
    },
    /// Gates that do not make up whole tokens.
    #[error("expected gates of one or more tokens with {heads} heads each, found {found} gates")]
    Gates {
        /// Heads of a token.
        heads: usize,
        /// Number of gates.
        found: usize,
    },
    /// A request that the model cannot serve, such as a class that it does not have.
    #[error("{}: {reason}", path.display())]
    Request {
        /// The model.
        path: PathBuf,
        /// What was requested, and what the model has.
        reason: String,
    },
    /// A tokenizer that is missing, broken, or another model's.
    #[error("{}: {problem}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A token that the model does not know.
    #[error("token {id}: {}", known(*vocabulary))]
    Token {
        /// Its number.
        id: i64,
        /// How many tokens the model knows.
        vocabulary: Option<usize>,
    },
    /// A prompt, or a text to translate, that the model cannot take.
    #[error("prompt: {0}")]
    Prompt(String),
    /// An option out of its range, as `top_p: expected 0 to 1, found 2`.
    #[error("{0}")]
    Setting(String),
    /// Logits that are all NaN or infinite.
    #[error("the model gives no probabilities for the next token: no logit is a number")]
    NoLogits,
}

impl Error {
    /// An [`Error::Malformed`].
    pub(crate) fn malformed(
        path: &Path,
        expected: &'static str,
        reason: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Error {
        Error::Malformed { path: path.to_owned(), expected, reason: reason.into() }
    }
}

/// Which tokens there are.
fn known(vocabulary: Option<usize>) -> String {
    match vocabulary {
        Some(count) => format!("the model knows {count} tokens, 0 to {}", count.saturating_sub(1)),
        None => "expected a number from 0 on".to_owned(),
    }
}

/// The end of a message about a model of another task.
fn of_family(family: Option<&str>) -> String {
    family.map_or_else(String::new, |family| format!("; the model is of the family {}", family.escape_debug()))
}

/// A result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
