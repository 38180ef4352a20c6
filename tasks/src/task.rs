//! The error for a model that was exported for another task.

use crate::error::Error;
use moh_runtime::Model;
use moh_runtime::names::FAMILY;

/// The error for a model that is not what was `expected`; `reason` is what is missing or unexpected.
pub(crate) fn other_task(model: &Model, expected: &'static str, reason: String) -> Error {
    Error::Task { path: model.path().to_owned(), expected, reason, family: model.metadata().get(FAMILY).cloned() }
}
