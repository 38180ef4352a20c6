//! `moh-run bench`: latency and throughput, the runtimes side by side.

use crate::args::{BenchArgs, BenchRuntime};
use anyhow::{Result, bail, ensure};
use moh_runtime::{Error, Model, Notice, Options, RuntimeChoice};
use moh_tasks::measure::{Effort, Phase, Sizes, Timings, Workload, bench};
use serde_json::{Value, json};
use std::io::Write;
use std::time::Duration;

const ALL: &[BenchRuntime] = &[BenchRuntime::Ort, BenchRuntime::OrtBodies, BenchRuntime::Tract];

pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    let asked = if args.runtime.is_empty() { ALL } else { &args.runtime };
    args.library.check(asked.iter().any(|&runtime| runtime != BenchRuntime::Tract))?;
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if args.threads.is_empty() { vec![processors] } else { args.threads.clone() };
    if let Some(most) = threads.iter().max().filter(|&&most| most > processors && !args.library.quiet) {
        inform!("note: {most} threads on {processors} processors");
    }
    let effort = Effort { time: Duration::from_secs_f64(args.seconds), runs: args.runs };
    let mut results = Vec::new();
    for (first, &threads) in std::iter::once(true).chain(std::iter::repeat(false)).zip(&threads) {
        let (runtimes, mut models) = load(args, threads, first)?;
        let workload = Workload::new(&models[0])?;
        let sizes = all_sizes(args, &workload, &models[0])?;
        for (&phase, &sizes) in workload.phases().iter().flat_map(|phase| sizes.iter().map(move |sizes| (phase, sizes)))
        {
            let timings = bench(&mut models, &workload, phase, sizes, effort)?;
            let measured = runtimes.iter().copied().zip(timings).collect();
            let result = Measured { threads, phase, sizes, items: workload.items(phase, sizes), measured };
            if !args.json {
                result.print(results.is_empty(), workload.takes_sequence())?;
            }
            results.push(result.object(workload.takes_sequence()));
        }
    }
    if args.json {
        super::print_json(&Value::Array(results))?;
    }
    Ok(())
}

/// The model in every runtime that was asked for, or that is there if none was.
fn load(args: &BenchArgs, threads: usize, first: bool) -> Result<(Vec<BenchRuntime>, Vec<Model>)> {
    let asked = if args.runtime.is_empty() { ALL } else { &args.runtime };
    let (mut runtimes, mut models) = (Vec::new(), Vec::new());
    for &runtime in asked.iter() {
        if runtimes.contains(&runtime) {
            continue;
        }
        let left_out = match Model::load(&args.model, &options(args, runtime, threads)) {
            Ok(model) => {
                let missing = model.notices().iter().find_map(|notice| match notice {
                    Notice::NoCustomOps { reason } => Some(format!("the ai.moh kernels are missing: {reason}")),
                    _ => None,
                });
                let Some(missing) = missing else {
                    runtimes.push(runtime);
                    models.push(model);
                    continue;
                };
                missing
            }
            Err(error @ (Error::OrtMissing { .. } | Error::Load { .. } | Error::Unsupported { .. })) => {
                error.to_string()
            }
            Err(error) => return Err(error.into()),
        };
        ensure!(args.runtime.is_empty(), "{}: {left_out}", runtime.name());
        if first && !args.library.quiet {
            inform!("note: without {}: {left_out}", runtime.name());
        }
    }
    match models.is_empty() {
        true => bail!("{}: no runtime runs it; `moh-run doctor` shows which there are", args.model.display()),
        false => Ok((runtimes, models)),
    }
}

fn options(args: &BenchArgs, runtime: BenchRuntime, threads: usize) -> Options {
    Options {
        runtime: if runtime == BenchRuntime::Tract { RuntimeChoice::Tract } else { RuntimeChoice::Ort },
        threads: Some(threads),
        without_custom_ops: runtime == BenchRuntime::OrtBodies,
        // The runtimes run in turns.
        sleep_between_runs: true,
        ..args.library.options()
    }
}

fn all_sizes(args: &BenchArgs, workload: &Workload, model: &Model) -> Result<Vec<Sizes>> {
    let sequences: Vec<Option<usize>> = match &args.sequence[..] {
        [] => vec![None],
        given => given.iter().map(|&length| Some(length)).collect(),
    };
    let mut all = Vec::new();
    for &batch in &args.batch {
        for &sequence in &sequences {
            all.push(workload.sizes(model, batch, sequence)?);
        }
    }
    Ok(all)
}

/// One line of each runtime.
struct Measured {
    threads: usize,
    phase: Phase,
    sizes: Sizes,
    items: (usize, &'static str),
    measured: Vec<(BenchRuntime, Timings)>,
}

fn ms(time: Duration) -> f64 {
    1e3 * time.as_secs_f64()
}

impl Measured {
    fn rate(&self, timings: &Timings) -> f64 {
        self.items.0 as f64 / timings.median().as_secs_f64().max(f64::MIN_POSITIVE)
    }

    /// The table's next lines; times are relative to those of the first runtime.
    fn print(&self, begins: bool, takes_sequence: bool) -> Result<()> {
        let mut out = std::io::stdout().lock();
        if begins {
            writeln!(
                out,
                "{:<8} {:>7} {:>5} {:>8}  {:<10} {:>9} {:>9} {:>9} {:>9} {:>6} {:>12}  ratio",
                "run",
                "threads",
                "batch",
                "sequence",
                "runtime",
                "min ms",
                "median",
                "p95",
                "p99",
                "runs",
                format!("{}/s", self.items.1)
            )?;
        }
        let first = self.measured.first().map_or(0.0, |(_, timings)| ms(timings.median()));
        for (runtime, timings) in &self.measured {
            let Sizes { batch, sequence } = self.sizes;
            let sequence = if takes_sequence { sequence.to_string() } else { "-".to_owned() };
            let [min, median, p95, p99] =
                [timings.min(), timings.median(), timings.percentile(0.95), timings.percentile(0.99)].map(ms);
            writeln!(
                out,
                "{:<8} {:>7} {batch:>5} {sequence:>8}  {:<10} {min:>9.3} {median:>9.3} {p95:>9.3} {p99:>9.3} {:>6} {:>12.1}  {:>5.2}",
                self.phase.name(),
                self.threads,
                runtime.name(),
                timings.count(),
                self.rate(timings),
                median / first.max(f64::MIN_POSITIVE)
            )?;
        }
        out.flush()?;
        Ok(())
    }

    fn object(&self, takes_sequence: bool) -> Value {
        let runtime = |(runtime, timings): &(BenchRuntime, Timings)| {
            json!({
                "runtime": runtime.name(),
                "runs": timings.count(),
                "min_ms": ms(timings.min()),
                "median_ms": ms(timings.median()),
                "p95_ms": ms(timings.percentile(0.95)),
                "p99_ms": ms(timings.percentile(0.99)),
                "per_second": self.rate(timings),
            })
        };
        json!({
            "phase": self.phase.name(),
            "threads": self.threads,
            "batch": self.sizes.batch,
            "sequence": takes_sequence.then_some(self.sizes.sequence),
            "items": self.items.1,
            "runtimes": self.measured.iter().map(runtime).collect::<Vec<Value>>(),
        })
    }
}
