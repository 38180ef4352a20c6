//! Where the time of a model's runs goes.

use super::part::{Kernel, Part};
use super::timings::Timings;
use super::trace;
use super::workload::{Phase, Sizes, Workload};
use crate::error::{Error, Result};
use moh_runtime::{Model, Options, RuntimeChoice};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A node of the model and its time.
#[derive(Debug, Clone)]
pub struct NodeTime {
    /// Name, as the runtime has it.
    pub name: String,
    /// Operator, as the runtime has it.
    pub op_type: String,
    /// Whose kernel ran.
    pub kernel: Kernel,
    /// What it is for.
    pub part: Part,
    /// Median of its times in the runs.
    pub time: Duration,
}

/// Where the time of one kind of runs goes.
#[derive(Debug, Clone)]
pub struct Profile {
    /// The kind.
    pub phase: Phase,
    /// Median time of a run, profiling included.
    pub run: Duration,
    /// The nodes, the slowest first.
    pub nodes: Vec<NodeTime>,
}

impl Profile {
    /// Time in nodes for which `of` holds.
    pub fn time(&self, of: impl Fn(&NodeTime) -> bool) -> Duration {
        self.nodes.iter().filter(|node| of(node)).map(|node| node.time).sum()
    }
}

/// The result of [`profile`].
#[derive(Debug)]
pub struct Profiled {
    /// The model.
    pub model: Model,
    /// Batch size and sequence length.
    pub sizes: Sizes,
    /// Whether the model takes sequences.
    pub takes_sequence: bool,
    /// One profile for each of [`Workload::phases`].
    pub profiles: Vec<Profile>,
    /// onnxruntime's own profile, if that was the runtime.
    pub trace: Option<PathBuf>,
}

/// Loads the model in `path` and runs it `runs` times on synthetic inputs, after one warm-up run.
///
/// onnxruntime writes its own profile to a file in `folder`; tract is timed node by node.
///
/// # Errors
/// As [`Model::load`], [`Workload::new`], [`Workload::sizes`] and [`Model::run`].
pub fn profile(
    path: &Path,
    options: &Options,
    batch: usize,
    sequence: Option<usize>,
    runs: usize,
    folder: &Path,
) -> Result<Profiled> {
    let (mut model, traced) = load(path, options, folder)?;
    let workload = Workload::new(&model)?;
    let sizes = workload.sizes(&model, batch, sequence)?;
    let mut measured = Vec::new();
    for &phase in workload.phases() {
        let mut inputs = workload.runs(&mut model, phase, sizes)?;
        let (mut nodes, mut total) = (Collector::default(), Timings::default());
        inputs.once(&mut model, None)?;
        for _ in 0..runs {
            total.add(inputs.once(&mut model, Some(&mut |name, op_type, time| nodes.add(name, op_type, time)))?);
        }
        measured.push((phase, nodes, total));
    }
    let trace = traced.then(|| model.end_profiling()).transpose()?;
    if let Some(trace) = &trace {
        let all = trace::read(trace)?;
        let mut end = all.len();
        for (_, nodes, _) in measured.iter_mut().rev() {
            let begin = begin(end, runs)?;
            for node in all[begin..end].iter().flatten() {
                nodes.add(&node.name, &node.op_type, node.time);
            }
            // Before them are the run that does not count and, for decoding, the one that fills the cache.
            end = begin.saturating_sub(2);
        }
    }
    let finished = |(phase, nodes, total): (Phase, Collector, Timings)| Profile {
        phase,
        run: total.median(),
        nodes: nodes.finish(),
    };
    let profiles = measured.into_iter().map(finished).collect();
    let takes_sequence = workload.takes_sequence();
    Ok(Profiled { profiles, model, sizes, takes_sequence, trace })
}

/// Of `end` runs that onnxruntime's profile has, the first of the last `runs`. Before it is the one that does not count.
fn begin(end: usize, runs: usize) -> Result<usize> {
    end.checked_sub(runs).filter(|&begin| begin > 0).ok_or_else(|| {
        let reason = "onnxruntime's profile ends after 1,000,000 events, before the last run";
        Error::Setting(format!("{runs} timed runs: {reason}; measure fewer"))
    })
}

/// The model, and whether its runtime writes a profile, as onnxruntime does where it is told so when it loads a model.
fn load(path: &Path, options: &Options, folder: &Path) -> Result<(Model, bool)> {
    let with_profile = Options { profile: Some(folder.join("onnxruntime")), ..options.clone() };
    match options.runtime {
        RuntimeChoice::Tract => Ok((Model::load(path, options)?, false)),
        RuntimeChoice::Ort => Ok((Model::load(path, &with_profile)?, true)),
        RuntimeChoice::Auto => {
            let with_profile = Options { runtime: RuntimeChoice::Ort, ..with_profile };
            match Model::load(path, &with_profile) {
                Err(moh_runtime::Error::OrtMissing { .. }) => Ok((Model::load(path, options)?, false)),
                result => Ok((result?, true)),
            }
        }
    }
}

/// Times by node.
#[derive(Default)]
struct Collector(HashMap<(String, String), Timings>);

impl Collector {
    fn add(&mut self, name: &str, op_type: &str, time: Duration) {
        self.0.entry((name.to_owned(), op_type.to_owned())).or_default().add(time);
    }

    fn finish(self) -> Vec<NodeTime> {
        let node = |((name, op_type), times): ((String, String), Timings)| NodeTime {
            kernel: Kernel::of(&name, &op_type),
            part: Part::of(&name, &op_type),
            time: times.median(),
            name,
            op_type,
        };
        let mut nodes: Vec<NodeTime> = self.0.into_iter().map(node).collect();
        nodes.sort_by(|a, b| b.time.cmp(&a.time).then_with(|| a.name.cmp(&b.name)));
        nodes
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_profile_that_ends_too_early_is_an_error() {
        // The run that does not count, and ten.
        assert_eq!(begin(11, 10).unwrap(), 1);
        for end in [0, 9, 10] {
            let error = begin(end, 10).unwrap_err().to_string();
            assert!(error.starts_with("10 timed runs: onnxruntime's profile ends after"), "{error}");
        }
    }
}
