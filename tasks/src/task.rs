//! What a model is for, as far as its metadata says so: what to tell who tries another thing.

use crate::error::Error;
use moh_runtime::Model;

/// The metadata property that names the family.
const FAMILY: &str = "moh.family";

/// The error for a model that is not what was `expected`; `reason` is what is missing or unexpected.
pub(crate) fn other_task(model: &Model, expected: &'static str, reason: String) -> Error {
    let reason = reason + &hint(model);
    Error::Task { path: model.path().to_owned(), expected, reason }
}

/// What the model is for, as the end of a sentence; empty where it does not say.
pub(crate) fn hint(model: &Model) -> String {
    let Some(family) = model.metadata().get(FAMILY) else { return String::new() };
    let usage = match family.trim_start_matches("moh-") {
        "vit" => ": `moh-run classify` names what is in images with it",
        "dit" => ": `moh-run sample` draws images with it",
        "llama" | "llm" => ": `moh-run generate` continues texts with it",
        "moa" => ": `moh-run translate` translates with an encoder and a decoder",
        _ => ": `moh-run infer` runs it on tensors",
    };
    format!("; the model is of the family {}{usage}", family.escape_debug())
}
