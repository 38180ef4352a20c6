//! Why a call from the host fails, and the barrier that turns every failure, panics too, into a status.

use crate::api::{Api, Status};
use ort_sys::{OrtErrorCode, OrtStatusPtr};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Why a call fails.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The operator refuses its attributes or inputs.
    #[error(transparent)]
    Operator(#[from] moh_kernels::Error),
    /// One of the host's functions failed.
    #[error("{0}")]
    Status(Status),
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

impl Failure {
    /// A status for the host to release.
    pub(crate) fn into_status(self, api: Api) -> OrtStatusPtr {
        let code = match self {
            Failure::Status(status) => return status.into_raw(),
            Failure::Operator(moh_kernels::Error::OutOfMemory { .. }) => OrtErrorCode::ORT_RUNTIME_EXCEPTION,
            Failure::Operator(_) => OrtErrorCode::ORT_INVALID_ARGUMENT,
            Failure::Host(_) => OrtErrorCode::ORT_FAIL,
            Failure::Panic(_) => OrtErrorCode::ORT_RUNTIME_EXCEPTION,
        };
        api.status(code, &self.to_string())
    }
}

/// Runs `body` for the host: null on success, a status on failure. Nothing unwinds out of it.
pub(crate) fn guard(api: Api, body: impl FnOnce() -> Result<(), Failure>) -> OrtStatusPtr {
    let caught = |payload| Err(Failure::Panic(message(payload)));
    // Whatever a panic leaves half done is either dropped here or the host's output, which it discards with the error.
    match catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(caught) {
        Ok(()) => OrtStatusPtr::default(),
        Err(failure) => failure.into_status(api),
    }
}

/// A panic's message.
fn message(payload: Box<dyn Any + Send>) -> String {
    match payload.downcast::<String>() {
        Ok(message) => *message,
        Err(payload) => payload.downcast::<&str>().map_or("no message".to_owned(), |message| (*message).to_owned()),
    }
}
