//! Runtimes side by side.

use super::timings::Timings;
use super::workload::{Phase, Sizes, Workload};
use crate::error::Result;
use moh_runtime::Model;
use std::time::{Duration, Instant};

/// How long to measure.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Time of each model's runs.
    pub time: Duration,
    /// The fewest runs of each model.
    pub runs: usize,
}

/// Far more than any statistic needs.
const MOST_RUNS: usize = 100_000;
/// Runs before those that count.
const WARM_UP: usize = 2;
/// Threads that wait for work turn for a while: not in another model's time.
const PAUSE: Duration = Duration::from_millis(3);

/// Times of one model after the other, again and again, so that what disturbs one disturbs all of them; each round begins with
/// another one. Every model gets inputs of the same numbers.
///
/// # Errors
/// As [`Workload::inputs`] and [`Model::run`].
pub fn bench(
    models: &mut [Model],
    workload: &Workload,
    phase: Phase,
    sizes: Sizes,
    effort: Effort,
) -> Result<Vec<Timings>> {
    let mut inputs = Vec::with_capacity(models.len());
    for model in models.iter_mut() {
        let made = workload.inputs(model, phase, sizes)?;
        for _ in 0..WARM_UP {
            model.run(made.clone())?;
        }
        inputs.push(made);
    }
    let mut timings = vec![Timings::default(); models.len()];
    let enough = |timings: &Timings| {
        let runs = timings.count();
        runs >= MOST_RUNS || runs >= effort.runs && timings.total() >= effort.time
    };
    let (count, mut first) = (models.len(), 0);
    while !timings.iter().all(enough) {
        for i in (first..first + count).map(|i| i % count) {
            if count > 1 {
                std::thread::sleep(PAUSE);
            }
            let given = inputs[i].clone();
            let began = Instant::now();
            let outputs = models[i].run(given)?;
            timings[i].add(began.elapsed());
            drop(outputs);
        }
        first = (first + 1) % count;
    }
    Ok(timings)
}
