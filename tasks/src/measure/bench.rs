//! Latency of several models, or of one in several runtimes.

use super::timings::Timings;
use super::workload::{Phase, Sizes, Workload};
use crate::error::Result;
use moh_runtime::Model;
use std::time::{Duration, Instant};

/// How long to measure.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Minimum time for each model, of its runs and of the pauses between them: several models share what is meant for them.
    pub time: Duration,
    /// Minimum runs of each model.
    pub runs: usize,
}

/// Far more than any statistic needs.
const MOST_RUNS: usize = 100_000;
/// Runs before those that count.
const WARM_UP: usize = 2;
/// Idle threads spin for a while after a run; the pause keeps that out of the next model's time.
const PAUSE: Duration = Duration::from_millis(3);

/// Runs the models interleaved, one run each per round, so that a disturbance hits all of them; rounds begin with different
/// models. All models get the same inputs.
///
/// # Errors
/// As [`Workload::runs`] and [`Model::run`].
pub fn bench(
    models: &mut [Model],
    workload: &Workload,
    phase: Phase,
    sizes: Sizes,
    effort: Effort,
) -> Result<Vec<Timings>> {
    let mut all = Vec::with_capacity(models.len());
    for model in models.iter_mut() {
        let mut runs = workload.runs(model, phase, sizes)?;
        for _ in 0..WARM_UP {
            runs.once(model, None)?;
        }
        all.push(runs);
    }
    let mut timings = vec![Timings::default(); models.len()];
    let (count, mut first) = (models.len(), 0);
    let (begun, least) = (Instant::now(), effort.time.saturating_mul(count as u32));
    let enough = |timings: &Timings| {
        let runs = timings.count();
        runs >= MOST_RUNS || runs >= effort.runs && begun.elapsed() >= least
    };
    while !timings.iter().all(enough) {
        for i in (first..first + count).map(|i| i % count) {
            if count > 1 {
                std::thread::sleep(PAUSE);
            }
            timings[i].add(all[i].once(&mut models[i], None)?);
        }
        first = (first + 1) % count;
    }
    Ok(timings)
}
