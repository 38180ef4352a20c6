//! Why a model cannot be loaded or run.

use crate::element::ElementType;
use std::path::PathBuf;

/// What went wrong, and with which file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no such file.
    #[error("{}: {what} not found{hint}", path.display())]
    NotFound {
        /// The file.
        path: PathBuf,
        /// What it was to be.
        what: &'static str,
        /// What is there instead and what to do, after a semicolon; or nothing.
        hint: String,
    },
    /// A file cannot be read.
    #[error("{}: cannot be read", path.display())]
    Read {
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
    /// A library of onnxruntime that was asked for by name cannot be used.
    #[error("onnxruntime library {}: {reason}", path.display())]
    OrtLibrary {
        /// The library.
        path: PathBuf,
        /// Why it cannot be used.
        reason: String,
    },
    /// onnxruntime was asked for, and no usable library was found.
    #[error("no usable onnxruntime library: {reason}")]
    OrtMissing {
        /// What was tried and what to do.
        reason: String,
    },
    /// The custom operators were asked for, and their library cannot be used.
    #[error("operator library {}: {reason}", path.display())]
    OpsLibrary {
        /// The library.
        path: PathBuf,
        /// Why it cannot be used.
        reason: String,
    },
    /// An environment variable has a value that it must not have.
    #[error("{reason}")]
    Setting {
        /// The variable, what was expected and what was found.
        reason: String,
    },
    /// The chosen runtime cannot do what was asked.
    #[error("{}: {reason}", path.display())]
    Unsupported {
        /// The model.
        path: PathBuf,
        /// What it cannot do.
        reason: String,
    },
    /// A file of a checkpoint that holds the model's weights is not what it was at the export.
    #[error(
        "{}: its weights are in {}, which is not as it was at the export: {problem}; put the file back, or export the model again",
        path.display(), file.display()
    )]
    Link {
        /// The model.
        path: PathBuf,
        /// The file.
        file: PathBuf,
        /// What was expected and what was found.
        problem: String,
    },
    /// The runtime refused the model.
    #[error("{}: {runtime} cannot load the model: {reason}", path.display())]
    Load {
        /// The model.
        path: PathBuf,
        /// The runtime.
        runtime: &'static str,
        /// What it said.
        reason: String,
    },
    /// Inputs that the model does not take.
    #[error("{}: {problems}", path.display())]
    Inputs {
        /// The model.
        path: PathBuf,
        /// Everything that is wrong, a line each, and what is expected.
        problems: String,
    },
    /// The runtime failed.
    #[error("{}: {runtime} failed: {reason}", path.display())]
    Run {
        /// The model.
        path: PathBuf,
        /// The runtime.
        runtime: &'static str,
        /// What it said.
        reason: String,
    },
    /// A run was broken off.
    #[error("{}: the run was broken off", path.display())]
    Interrupted {
        /// The model.
        path: PathBuf,
    },
    /// A tensor's data does not fill its shape.
    #[error("a tensor of shape {shape:?} holds {expected} elements, found {found}")]
    Length {
        /// The shape.
        shape: Vec<usize>,
        /// Product of the dimensions.
        expected: usize,
        /// Elements given.
        found: usize,
    },
    /// A tensor has another element type than the one that is needed.
    #[error("{tensor}: expected element type {expected}, found {found}")]
    ElementType {
        /// The tensor.
        tensor: String,
        /// Needed type or types.
        expected: String,
        /// Type found.
        found: String,
    },
    /// A value cannot be written in another element type without loss.
    #[error("{tensor}: {value} (element {index}) is not a {to}")]
    Lossy {
        /// The tensor.
        tensor: String,
        /// The value.
        value: String,
        /// Its index in row-major order.
        index: usize,
        /// The type it should have.
        to: ElementType,
    },
}

/// A result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
