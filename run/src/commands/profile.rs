//! `moh-run profile`: where the time of a model's runs goes, and whose kernels ran.

use crate::args::ProfileArgs;
use crate::temporary::Folder;
use anyhow::{Context, Result};
use moh_tasks::measure::{Kernel, NodeTime, Part, Profile, Profiled, profile};
use moh_tasks::write_text;
use serde_json::{Value, json};
use std::fmt::{self, Write as _};
use std::io::Write;
use std::time::Duration;

pub(crate) fn run(args: &ProfileArgs) -> Result<()> {
    super::check_output(args.trace.iter(), args.force)?;
    let folder = Folder::new()?;
    let (options, runs) = (args.runtime.options()?, args.runs);
    let profiled = profile(&args.model, &options, args.sizes.batch, args.sizes.sequence, runs, folder.path())?;
    super::tell(&profiled.model, args.runtime.quiet());
    match (&args.trace, &profiled.trace) {
        (Some(to), Some(from)) => {
            let text = std::fs::read_to_string(from).with_context(|| from.display().to_string())?;
            write_text(to, &text, args.force)?;
        }
        (Some(_), None) => inform!("note: {} writes no profile of its own", profiled.model.runtime_name()),
        (None, _) => {}
    }
    if args.json {
        return Ok(super::print_json(&object(&profiled, runs))?);
    }
    std::io::stdout().lock().write_all(table(&profiled, runs, args.top)?.as_bytes())?;
    Ok(())
}

fn ms(time: Duration) -> f64 {
    1e3 * time.as_secs_f64()
}

fn share(part: Duration, whole: Duration) -> f64 {
    100.0 * part.as_secs_f64() / whole.as_secs_f64().max(f64::MIN_POSITIVE)
}

fn sizes(profiled: &Profiled) -> String {
    let (batch, sequence) = (profiled.sizes.batch, profiled.sizes.sequence);
    if profiled.takes_sequence { format!("batch {batch}, {sequence} tokens") } else { format!("batch {batch}") }
}

fn table(profiled: &Profiled, runs: usize, top: usize) -> std::result::Result<String, fmt::Error> {
    let mut text = String::new();
    for profile in &profiled.profiles {
        let (name, runtime) = (profile.phase.name(), profiled.model.runtime_name());
        let all = profile.time(|_| true);
        writeln!(
            text,
            "{name} in {runtime}, {}: {:.3} ms a run, {:.3} ms in nodes (medians of {runs} runs)\n",
            sizes(profiled),
            ms(profile.run),
            ms(all)
        )?;
        write!(text, "{:<18}{:>10}  {:>7} ", "part", "ms", "share")?;
        Kernel::ALL.iter().try_for_each(|kernel| write!(text, "{:>10}", kernel.name()))?;
        writeln!(text)?;
        for part in Part::ALL {
            row(&mut text, part.name(), profile, all, &|node: &NodeTime| node.part == *part)?;
        }
        row(&mut text, "all nodes", profile, all, &|_: &NodeTime| true)?;
        writeln!(text, "\n{:>10}  {:>7}  {:<8} {:<26} node", "ms", "share", "kernel", "operator")?;
        for node in profile.nodes.iter().take(top) {
            let NodeTime { name, op_type, kernel, time, .. } = node;
            let share = share(*time, all);
            writeln!(text, "{:>10.3}  {share:>5.1} %  {:<8} {op_type:<26} {name}", ms(*time), kernel.name())?;
        }
        writeln!(text)?;
    }
    Ok(text)
}

/// A line for some of the nodes: their time, its share of `all`, and how much of it each kind of kernel took.
fn row(text: &mut String, name: &str, profile: &Profile, all: Duration, of: &dyn Fn(&NodeTime) -> bool) -> fmt::Result {
    let time = profile.time(of);
    if time.is_zero() {
        return Ok(());
    }
    write!(text, "{name:<18}{:>10.3}  {:>5.1} % ", ms(time), share(time, all))?;
    for kernel in Kernel::ALL {
        let by = profile.time(|node| of(node) && node.kernel == *kernel);
        let cell = if by.is_zero() { String::new() } else { format!("{:.1} %", share(by, time)) };
        write!(text, "{cell:>10}")?;
    }
    writeln!(text)
}

fn object(profiled: &Profiled, runs: usize) -> Value {
    let node = |node: &NodeTime| {
        let NodeTime { name, op_type, kernel, part, time } = node;
        json!({ "name": name, "operator": op_type, "kernel": kernel.name(), "part": part.name(), "ms": ms(*time) })
    };
    let phase = |profile: &Profile| {
        let of = |part: &Part| (part.name().to_owned(), json!(ms(profile.time(|node| node.part == *part))));
        let by = |kernel: &Kernel| (kernel.name().to_owned(), json!(ms(profile.time(|node| node.kernel == *kernel))));
        json!({
            "phase": profile.phase.name(),
            "run_ms": ms(profile.run),
            "parts_ms": Part::ALL.iter().map(of).collect::<serde_json::Map<_, _>>(),
            "kernels_ms": Kernel::ALL.iter().map(by).collect::<serde_json::Map<_, _>>(),
            "nodes": profile.nodes.iter().map(node).collect::<Vec<Value>>(),
        })
    };
    let sequence = profiled.takes_sequence.then_some(profiled.sizes.sequence);
    json!({
        "runtime": profiled.model.runtime_name(),
        "batch": profiled.sizes.batch,
        "sequence": sequence,
        "runs": runs,
        "phases": profiled.profiles.iter().map(phase).collect::<Vec<Value>>(),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use moh_tasks::measure::Phase;

    #[test]
    fn shares_are_of_the_model_and_of_the_part() {
        let node = |part, kernel, ms| {
            let (name, op_type) = ("n".to_owned(), "Op".to_owned());
            NodeTime { name, op_type, kernel, part, time: Duration::from_millis(ms) }
        };
        let nodes = vec![
            node(Part::Attention, Kernel::Moh, 30),
            node(Part::Attention, Kernel::Runtime, 10),
            node(Part::Rest, Kernel::Runtime, 60),
        ];
        let profile = Profile { phase: Phase::Forward, run: Duration::from_millis(110), nodes };
        let mut text = String::new();
        let all = Duration::from_millis(100);
        row(&mut text, "attention", &profile, all, &|node| node.part == Part::Attention).unwrap();
        let cells: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(cells, ["attention", "40.000", "40.0", "%", "75.0", "%", "25.0", "%"]);
    }
}
