//! Why a call from the host fails.

use crate::api::Status;

/// Why a call fails.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The operator refuses its attributes or inputs.
    #[error(transparent)]
    Operator(#[from] moh_operators::Error),
    /// One of the host's functions failed.
    #[error("{0}")]
    Status(Status),
    /// A setting of the session or of the environment that has no such value.
    #[error("{0}")]
    Setting(String),
    /// The host did something else than its API says.
    #[error("{0}")]
    Host(String),
    /// A defect of this library.
    #[error("panic in the ai.moh operators: {0}")]
    Panic(String),
}

impl From<Status> for Failure {
    fn from(status: Status) -> Failure {
        Failure::Status(status)
    }
}
