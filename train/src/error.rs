//! What can go wrong in a training.

use std::path::PathBuf;

/// Result of what this crate does.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure of this crate. The text names the step, the file or the option, what was expected and what was found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option with which nothing can be trained.
    #[error("option {name}: expected {expected}, found {found}")]
    Option {
        /// The field of [`crate::Options`].
        name: &'static str,
        /// What it must be.
        expected: &'static str,
        /// What it is.
        found: String,
    },
    /// A folder with a training that was begun in another way.
    #[error(
        "{}: this training was begun with {name} = {found}, not {wanted}; go on with that, or begin another in a new folder",
        file.display()
    )]
    Other {
        /// The checkpoint's settings.
        file: PathBuf,
        /// What differs.
        name: String,
        /// Now.
        wanted: String,
        /// In the folder.
        found: String,
    },
    /// A checkpoint of this crate that is not complete, or of another model.
    #[error("{}: {problem}", file.display())]
    Checkpoint {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The operating system refused.
    #[error("{}: {reason}{}", file.display(), kept(last.as_ref()))]
    Io {
        /// What was to be read or written.
        file: PathBuf,
        /// The system's reason.
        reason: std::io::Error,
        /// The last complete checkpoint, where one was to be written.
        last: Option<PathBuf>,
    },
    /// Data that are not there, or not as they should be.
    #[error("{}: {problem}", file.display())]
    Data {
        /// The file.
        file: PathBuf,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// A loss, gradient or weight that is infinite or not a number. The training stops before it changes any weight.
    #[error("step {step}: {what} is not finite{}{}", at(layer.as_ref()), kept(last.as_ref()))]
    NotFinite {
        /// The step, counted from 1.
        step: usize,
        /// What is not finite.
        what: String,
        /// The first module whose output is not finite either.
        layer: Option<String>,
        /// The last complete checkpoint.
        last: Option<PathBuf>,
    },
    /// A tensor that the loss does not depend on.
    #[error("no gradient reaches {}: the loss does not depend on {}", listed(tensors), if tensors.len() == 1 { "it" } else { "them" })]
    NoGradient {
        /// The tensors.
        tensors: Vec<String>,
    },
    /// Failures of models.
    #[error(transparent)]
    Model(#[from] moh_models::Error),
    /// Failures of candle.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// What a task fails with.
    #[error(transparent)]
    Task(Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    pub(crate) fn io(file: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
        let file = file.into();
        |reason| Error::Io { file, reason, last: None }
    }

    /// Says which checkpoint is the last complete one.
    pub(crate) fn keeping(self, checkpoint: Option<PathBuf>) -> Error {
        match self {
            Error::Io { file, reason, last: None } => Error::Io { file, reason, last: checkpoint },
            error => error,
        }
    }
}

fn kept(last: Option<&PathBuf>) -> String {
    last.map_or(String::new(), |path| format!("; the last complete checkpoint is {}", path.display()))
}

fn at(layer: Option<&String>) -> String {
    layer.map_or(String::new(), |layer| format!(", from {layer} on"))
}

fn listed(tensors: &[String]) -> String {
    const SHOWN: usize = 5;
    let shown = tensors.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    match tensors.len().checked_sub(SHOWN) {
        None | Some(0) => shown,
        Some(more) => format!("{shown} and {more} more"),
    }
}
