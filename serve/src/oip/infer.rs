//! A run of a model for either form of the protocol.

use super::model;
use crate::deadline::Deadline;
use crate::problem::Problem;
use crate::server::App;
use crate::tensors::{Claim, Job, check};
use moh_runtime::Tensor;
use tokio::sync::oneshot;

/// Triton's parameters that ask for another result, or for one in another place, and are not supported; others are ignored.
pub(super) const REFUSED: [&str; 3] = ["classification", "sequence_id", "shared_memory_region"];

/// For a parameter of [`REFUSED`]. `of`: what has it, as in `output logits: `.
pub(super) fn unsupported(of: &str, name: &str, found: &str) -> Problem {
    let found: String = found.chars().take(40).collect();
    Problem::invalid(format!("{of}parameters.{name}: not supported here; expected none, found {found}"))
}

/// What is asked for.
pub(super) struct Request<'a> {
    pub(super) model: &'a str,
    pub(super) version: &'a str,
    pub(super) inputs: Vec<(String, Tensor)>,
    /// Names of outputs; all where there is none.
    pub(super) outputs: Vec<String>,
    pub(super) deadline: Deadline,
}

/// The outputs that are asked for, by name.
///
/// # Errors
/// A [`Problem`] for what the model does not take, a queue that is full, a deadline that passes, or a model that fails.
pub(super) async fn infer(app: &App, request: Request<'_>) -> Result<Vec<(String, Tensor)>, Problem> {
    let served = model(app, request.model, request.version)?;
    app.check_open()?;
    let position = |name: &String| {
        let known = served.outputs.iter().position(|output| output.name == *name);
        known.ok_or_else(|| {
            let names: Vec<&str> = served.outputs.iter().map(|output| output.name.as_str()).collect();
            Problem::invalid(format!("output {name}: the model gives {}", names.join(", ")))
        })
    };
    let outputs = match request.outputs.is_empty() {
        true => (0..served.outputs.len()).collect(),
        false => request.outputs.iter().map(position).collect::<Result<Vec<usize>, _>>()?,
    };
    let inputs = check(&served.inputs, request.inputs, served.bounds)?;
    let (reply, answer) = oneshot::channel();
    // Dropped when the deadline passes or the client leaves.
    let (waiter, claim) = Claim::new();
    let deadline = request.deadline;
    served.run(Job { inputs, outputs: outputs.clone(), deadline, reply, claim })?;
    let found = match tokio::time::timeout_at(deadline.end.into(), answer).await {
        Ok(Ok(found)) => found?,
        Ok(Err(_)) if app.is_closing() => return Err(Problem::closing()),
        Ok(Err(_)) if !deadline.has_passed() => return Err(Problem::lost()),
        // A thread drops what has waited for too long.
        Ok(Err(_)) | Err(_) => return Err(if waiter.has_begun() { deadline.ran() } else { deadline.waited() }),
    };
    Ok(outputs.iter().map(|&output| served.outputs[output].name.clone()).zip(found).collect())
}
