//! The barrier between the host and this library: every failure, a panic too, becomes a status.

use crate::api::Api;
use crate::failure::Failure;
use ort_sys::{OrtErrorCode, OrtStatusPtr};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `body` for the host: null on success, a status on failure. Nothing unwinds out of it.
pub(crate) fn guard(api: Api, body: impl FnOnce() -> Result<(), Failure>) -> OrtStatusPtr {
    let caught = |payload| Err(Failure::Panic(message(payload)));
    // Whatever a panic leaves half done is either dropped here or the host's output, which it discards with the error.
    match catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(caught) {
        Ok(()) => OrtStatusPtr::default(),
        Err(failure) => status(failure, api),
    }
}

/// A status for the host to release.
pub(crate) fn status(failure: Failure, api: Api) -> OrtStatusPtr {
    let code = match failure {
        Failure::Status(status) => return status.into_raw(),
        Failure::Operator(moh_operators::Error::OutOfMemory { .. }) => OrtErrorCode::ORT_RUNTIME_EXCEPTION,
        Failure::Operator(_) | Failure::Setting(_) => OrtErrorCode::ORT_INVALID_ARGUMENT,
        Failure::Host(_) => OrtErrorCode::ORT_FAIL,
        Failure::Panic(_) => OrtErrorCode::ORT_RUNTIME_EXCEPTION,
    };
    api.status(code, &failure.to_string())
}

/// A panic's message.
fn message(payload: Box<dyn Any + Send>) -> String {
    match payload.downcast::<String>() {
        Ok(message) => *message,
        Err(payload) => payload.downcast::<&str>().map_or("no message".to_owned(), |message| (*message).to_owned()),
    }
}
