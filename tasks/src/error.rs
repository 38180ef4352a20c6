//! Why a task fails.

use std::path::PathBuf;

/// What went wrong, and with which file.
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
    #[error("{}: not {expected}: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What it should be.
        expected: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The model ran, but gave something else than its task needs.
    #[error("{}: {runtime} failed: {reason}", path.display())]
    Output {
        /// The model.
        path: PathBuf,
        /// The runtime.
        runtime: &'static str,
        /// What was expected and what was found.
        reason: String,
    },
    /// Numbers that do not fill their shape.
    #[error("a tensor of shape {shape:?} holds {expected} elements, found {found}")]
    Length {
        /// The shape.
        shape: Vec<usize>,
        /// Product of the dimensions.
        expected: usize,
        /// Elements given.
        found: usize,
    },
    /// The model is not a language model with a key-value cache.
    #[error("{}: not a language model: {reason}", path.display())]
    NotLanguageModel {
        /// The model.
        path: PathBuf,
        /// What is missing or unexpected.
        reason: String,
    },
    /// A model that is for something else.
    #[error("{}: not {expected}: {reason}", path.display())]
    Task {
        /// The model.
        path: PathBuf,
        /// What it was to be.
        expected: &'static str,
        /// What is missing or unexpected, and what the model is for as far as it says so.
        reason: String,
    },
    /// A class that the model does not have, or another request that it cannot serve.
    #[error("{}: {reason}", path.display())]
    Request {
        /// The model.
        path: PathBuf,
        /// What was asked for, and what there is.
        reason: String,
    },
    /// A prompt that cannot be continued, or not in this way.
    #[error("prompt: {0}")]
    Prompt(String),
}

/// A result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
