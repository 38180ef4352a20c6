//! Runs of models on tensors, several requests at a time where their rows can share a run.

mod check;
mod claim;
mod gather;

pub(crate) use check::{Bounds, check};
pub(crate) use claim::Claim;
pub(crate) use gather::Batching;

use crate::deadline::Deadline;
use crate::measure;
use crate::problem::Problem;
use crate::queue::{Abandoned, Queue};
use crate::worker::Health;
use moh_runtime::{Interrupt, Model, Tensor, Value};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// A request: inputs in the model's order, and which outputs are wanted.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) inputs: Vec<Tensor>,
    pub(crate) outputs: Vec<usize>,
    pub(crate) deadline: Deadline,
    pub(crate) reply: oneshot::Sender<Result<Vec<Tensor>, Problem>>,
    /// Whether somebody waits.
    pub(crate) claim: Claim,
}

impl Abandoned for Job {
    fn is_abandoned(&self) -> bool {
        self.reply.is_closed() || self.deadline.has_passed()
    }
}

/// What runs.
pub(crate) trait Run {
    /// The outputs of these numbers, for inputs in the model's order, unless the run is broken off.
    fn run(&mut self, inputs: Vec<Tensor>, outputs: &[usize], interrupt: &Interrupt) -> Result<Vec<Tensor>, Problem>;
}

impl Run for Model {
    fn run(&mut self, inputs: Vec<Tensor>, outputs: &[usize], interrupt: &Interrupt) -> Result<Vec<Tensor>, Problem> {
        let names: Vec<String> = self.inputs().iter().map(|info| info.name.clone()).collect();
        let given = names.into_iter().zip(inputs.into_iter().map(Value::from)).collect();
        let found = self.run_until(given, interrupt).map_err(|e| Problem::of_runtime(&e.into()))?;
        let wanted = outputs.iter().map(|&output| found[output].to_tensor());
        wanted.collect::<moh_runtime::Result<_>>().map_err(|e| Problem::of_runtime(&e.into()))
    }
}

/// Serves requests until the queue is closed and empty.
pub(crate) fn serve(
    model: &mut impl Run,
    name: &str,
    queue: &Queue<Job>,
    batching: Option<&Batching>,
    window: Duration,
    health: &Health,
) {
    while let Some(first) = queue.pop() {
        if health.is_aborted() {
            let _ = first.reply.send(Err(Problem::closing()));
            continue;
        }
        let jobs = match batching {
            Some(batching) => gathered(first, queue, batching, window),
            None => vec![first],
        };
        measure::batch(name, batching.map_or(1, |_| jobs.iter().map(gather::rows).sum()));
        answer(model, jobs, batching);
    }
}

/// `first`, and those that share its run and come in time.
fn gathered(first: Job, queue: &Queue<Job>, batching: &Batching, window: Duration) -> Vec<Job> {
    let end = Instant::now() + window;
    let (mut rows, mut jobs) = (gather::rows(&first), vec![first]);
    while rows < batching.rows {
        let fits = |job: &Job| gather::fit(&jobs[0], job) && rows + gather::rows(job) <= batching.rows;
        let Some(job) = queue.pop_fitting(fits, end.saturating_duration_since(Instant::now())) else { break };
        rows += gather::rows(&job);
        jobs.push(job);
    }
    jobs
}

fn answer(model: &mut impl Run, jobs: Vec<Job>, batching: Option<&Batching>) {
    if jobs.len() > 1 && batching.is_some() {
        match gather::run(model, &jobs) {
            Some(answers) => {
                for (job, outputs) in jobs.into_iter().zip(answers) {
                    let _ = job.reply.send(Ok(outputs));
                }
                return;
            }
            None if jobs.iter().all(Job::is_abandoned) => return,
            // One of them may be to blame, and the others are not to suffer from it.
            None => tracing::warn!("a batch of {} requests failed; they run one by one", jobs.len()),
        }
    }
    jobs.into_iter().filter(|job| !job.is_abandoned()).for_each(|job| alone(model, job));
}

/// Runs one request.
pub(crate) fn alone(model: &mut impl Run, job: Job) {
    let Job { inputs, outputs, reply, claim, .. } = job;
    let found = model.run(inputs, &outputs, &claim::interrupt([&claim].into_iter()));
    // Nobody waits any more if this fails.
    let _ = reply.send(found);
}

#[cfg(test)]
mod tests;
