//! `moh-run doctor`: what models would run with on this machine, and whether it works.

use crate::args::DoctorArgs;
use crate::temporary::Folder;
use anyhow::{Result, bail};
use moh_runtime::{DeviceChoice, Found, OnnxRuntime, OperatorLibrary, Options, RuntimeChoice};
use moh_tasks::doctor::{Checked, check};
use serde_json::{Map, Value, json};
use std::fmt::Display;
use std::io::Write;
use std::path::Path;

pub(crate) fn run(args: &DoctorArgs) -> Result<()> {
    let folder = Folder::new()?;
    let report = examine(&args.library.options(), folder.path());
    if args.json {
        super::print_json(&report.object())?;
    } else {
        report.print(args.library.quiet)?;
    }
    match report.problems.len() {
        0 => Ok(()),
        1 => bail!("a problem was found"),
        count => bail!("{count} problems were found"),
    }
}

/// What was found.
#[derive(Default)]
struct Report {
    /// A name and a line for people each.
    lines: Vec<(&'static str, String)>,
    /// The same for programs.
    facts: Map<String, Value>,
    problems: Vec<Problem>,
}

/// Something that should work and does not.
struct Problem {
    what: String,
    remedy: String,
}

impl Report {
    fn add(&mut self, name: &'static str, line: impl Into<String>, fact: Value) {
        self.lines.push((name, line.into()));
        self.facts.insert(name.to_owned(), fact);
    }

    /// A fact that is a problem.
    fn add_problem(&mut self, name: &'static str, what: &dyn Display, remedy: &str) {
        self.add(name, "does not work, see below", json!({ "error": what.to_string() }));
        self.problems.push(Problem { what: format!("{name}: {what}"), remedy: remedy.to_owned() });
    }

    fn print(&self, quiet: bool) -> Result<()> {
        let mut output = std::io::stdout().lock();
        for (name, line) in self.lines.iter().filter(|_| !quiet) {
            writeln!(output, "{name:<24}{line}")?;
        }
        for Problem { what, remedy } in &self.problems {
            writeln!(output, "problem: {what}\n  what to do: {remedy}")?;
        }
        output.flush()?;
        Ok(())
    }

    fn object(&self) -> Value {
        let problem = |Problem { what, remedy }: &Problem| json!({ "problem": what, "what_to_do": remedy });
        let mut object = self.facts.clone();
        object.insert("works".to_owned(), json!(self.problems.is_empty()));
        object.insert("problems".to_owned(), self.problems.iter().map(problem).collect());
        Value::Object(object)
    }
}

fn examine(options: &Options, folder: &Path) -> Report {
    let mut report = Report::default();
    report.add(
        "moh-run",
        moh_runtime::short_version(),
        json!({ "version": env!("CARGO_PKG_VERSION"), "commit": moh_runtime::COMMIT }),
    );
    processor(&mut report);
    let told = report.problems.len();
    let runtime = onnxruntime(&mut report, options);
    let is_broken = report.problems.len() > told;
    let library = runtime.as_ref().and_then(|_| library(&mut report, options));
    report.add(
        "tract",
        format!("{}, built in", moh_runtime::TRACT_VERSION),
        json!({ "version": moh_runtime::TRACT_VERSION }),
    );
    gpu(&mut report, options, runtime.as_ref(), library.as_ref());
    let (chosen, why) = match (&runtime, &library) {
        (Some(_), Some(_)) => ("onnxruntime", "onnxruntime with our kernels"),
        (Some(_), None) => ("onnxruntime", "onnxruntime without our kernels: every head is computed"),
        (None, _) if is_broken => {
            ("none", "nothing, until the problem with onnxruntime is solved; `--runtime tract` runs them")
        }
        (None, _) => ("tract", "tract with our kernels"),
    };
    let choice = if is_broken { "" } else { " (--runtime chooses)" };
    report.add("models run in", format!("{why}{choice}"), json!(chosen));
    if !report.problems.is_empty() && moh_runtime::instruction_set().is_err() {
        // No kernel runs, for a reason that is told already.
        return report;
    }
    if let Some(library) = &library {
        // By name, because one that was found and cannot be loaded would be left out without an error.
        let ops_library = Some(library.path.clone());
        let options =
            Options { runtime: RuntimeChoice::Ort, device: DeviceChoice::Cpu, ops_library, ..options.clone() };
        let checked = check(&options, folder).map_err(|error| as_found(error, library.found));
        kernels(&mut report, "kernels in onnxruntime", checked);
    }
    let options = Options { runtime: RuntimeChoice::Tract, device: DeviceChoice::Cpu, ..options.clone() };
    kernels(&mut report, "kernels in tract", check(&options, folder));
    report
}

/// The check names the library in an option, however it was found.
fn as_found(error: moh_tasks::Error, found: Found) -> moh_tasks::Error {
    match error {
        moh_tasks::Error::Runtime(moh_runtime::Error::OpsLibrary { path, reason }) => {
            let reason = reason.replacen(&Found::Option.to_string(), &found.to_string(), 1);
            moh_runtime::Error::OpsLibrary { path, reason }.into()
        }
        error => error,
    }
}

fn processor(report: &mut Report) {
    let sets = moh_runtime::instruction_sets();
    match moh_runtime::instruction_set() {
        Ok(set) => {
            let why = if sets.first() == Some(&set) { "the best of" } else { "chosen by MOH_CPU_ISA or by speed from" };
            let line = format!("kernels use {set}, {why} {}", sets.join(", "));
            report.add("processor", line, json!({ "instruction_set": set, "instruction_sets": sets }));
        }
        Err(error) => report.add_problem("processor", &error, "unset MOH_CPU_ISA, and the best set is used"),
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let line =
        format!("tract: {threads}, one for each processor that this process may use; onnxruntime: its own choice");
    report.add("threads", line, json!({ "processors": threads }));
}

/// The library, if there is a usable one. That there is none is no problem, but a named one that is unusable is.
fn onnxruntime(report: &mut Report, options: &Options) -> Option<OnnxRuntime> {
    match moh_runtime::onnxruntime(options) {
        Ok(found) => {
            let version = found.version.as_deref().unwrap_or("version unknown");
            let line = format!("{version}, {} ({})", found.path.display(), found.found);
            let (path, how) = (found.path.to_string_lossy(), found.found.to_string());
            report.add("onnxruntime", line, json!({ "version": found.version, "path": path, "found": how }));
            Some(found)
        }
        Err(moh_runtime::Error::OrtMissing { reason }) => {
            report.add("onnxruntime", format!("not used: {reason}"), json!({ "missing": reason }));
            None
        }
        Err(error) => {
            let remedy = "name the library of an onnxruntime in ORT_DYLIB_PATH, or unset it: \
                          `pip install onnxruntime` installs one where it is found";
            report.add_problem("onnxruntime", &error, remedy);
            None
        }
    }
}

fn library(report: &mut Report, options: &Options) -> Option<OperatorLibrary> {
    match moh_runtime::operator_library(options) {
        Ok(found) => {
            let built = found.build.as_ref().map_or("of an older build".to_owned(), |build| {
                let cuda = if build.cuda { "with" } else { "without" };
                let other = if build.commit == moh_runtime::COMMIT { "" } else { ", not that of moh-run" };
                format!("{} (commit {}{other}), {cuda} CUDA kernels", build.version, build.commit)
            });
            let (path, how) = (found.path.to_string_lossy(), found.found.to_string());
            let build = found.build.as_ref();
            let build = build.map(|b| json!({ "version": b.version, "commit": b.commit, "cuda": b.cuda }));
            report.add(
                "libmoh_ops",
                format!("{built}, {path} ({how})"),
                json!({ "build": build, "path": path, "found": how }),
            );
            Some(found)
        }
        Err(error) => {
            let remedy = "`cargo build --release -p moh-ops` makes it; without it onnxruntime computes every head";
            report.add_problem("libmoh_ops", &error, remedy);
            None
        }
    }
}

/// Which GPU there is, and what would keep it from being used.
fn gpu(report: &mut Report, options: &Options, runtime: Option<&OnnxRuntime>, library: Option<&OperatorLibrary>) {
    let version = std::fs::read_to_string("/proc/driver/nvidia/version").ok();
    let version = version.and_then(|text| text.lines().next().map(str::to_owned));
    // Containers may have the device and not the file.
    let driver = version.or_else(|| Path::new("/dev/nvidiactl").exists().then(|| "/dev/nvidiactl".to_owned()));
    let kernels = library.and_then(|library| library.build.as_ref()).is_some_and(|build| build.cuda);
    let provider = runtime.is_some_and(|runtime| runtime.cuda);
    let line = match (&driver, runtime) {
        (None, _) => "none: no NVIDIA driver is loaded".to_owned(),
        (Some(_), None) => "not used: tract runs models on the CPU only".to_owned(),
        (Some(_), Some(_)) if !provider => {
            "not used: this onnxruntime has no CUDA provider; the package onnxruntime-gpu has one".to_owned()
        }
        (Some(_), Some(_)) if !kernels => {
            "used by onnxruntime, but libmoh_ops has no CUDA kernels: its operators run on the CPU (docs/cuda.md)"
                .to_owned()
        }
        (Some(driver), Some(_)) => format!("used: {driver}"),
    };
    let is_wanted = options.device == DeviceChoice::Cuda;
    match is_wanted && (driver.is_none() || !provider) {
        true => report.add_problem("GPU", &line, "leave out --device cuda; docs/cuda.md says what it needs"),
        false => report.add("GPU", line, json!({ "driver": driver, "provider": provider, "kernels": kernels })),
    }
}

/// What the operators did in a runtime.
fn kernels(report: &mut Report, name: &'static str, checked: moh_tasks::Result<Vec<Checked>>) {
    let remedy = "please report this, with the output of `moh-run doctor --json`";
    match checked {
        Ok(checked) => {
            let calls: usize = checked.iter().map(|checked| checked.calls).sum();
            let most = checked.iter().map(|checked| checked.error).fold(0.0, f64::max);
            let fact = |c: &Checked| json!({ "operator": c.operator, "calls": c.calls, "ran": c.ran, "left": c.left, "error": c.error });
            let fact: Vec<Value> = checked.iter().map(fact).collect();
            let wrong: Vec<&str> = checked.iter().filter(|c| !c.is_right()).map(|c| c.operator).collect();
            let left: Vec<&str> = checked.iter().filter(|c| c.left).map(|c| c.operator).collect();
            let line = match wrong[..] {
                [] => format!(
                    "right: {} operators ran in {calls} calls, with at most {:.0} % of the error allowed{}",
                    checked.len() - left.len(),
                    100.0 * most,
                    match left[..] {
                        [] => String::new(),
                        _ => format!("; left to the runtime, which is as fast on this processor: {}", left.join(", ")),
                    }
                ),
                _ => format!("wrong: {}", wrong.join(", ")),
            };
            report.add(name, line, fact.into());
            for c in checked.iter().filter(|c| !c.is_right()) {
                let what = match c.ran {
                    true => format!(
                        "{name}: {}: {:.1} times the error allowed against the f64 reference",
                        c.operator, c.error
                    ),
                    false => format!("{name}: {}: another kernel than ours ran", c.operator),
                };
                report.problems.push(Problem { what, remedy: remedy.to_owned() });
            }
        }
        Err(error) => {
            use moh_runtime::Error::{OpsLibrary, OrtLibrary, Setting};
            let remedy = match &error {
                moh_tasks::Error::Runtime(OpsLibrary { .. } | OrtLibrary { .. } | Setting { .. }) => {
                    "correct the setting, or build libmoh_ops for this system: docs/run.md lists libraries and variables"
                }
                _ => remedy,
            };
            report.add_problem(name, &format!("{:#}", anyhow::Error::from(error)), remedy);
        }
    }
}
