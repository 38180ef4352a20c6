//! A process of its own for each contender: the time to its first token, and its memory after a step on a long cache.

use super::Who;
use super::step::Step;
use crate::measure::{Settings, Table};
use anyhow::{Context, Result, ensure};
use serde_json::Value as Json;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// The prompt.
const PROMPT: Step = Step { past: 0, tokens: 16 };
const LONG: Step = Step { past: 4096, tokens: 1 };

/// The shortest of so many starts; the first may have to fetch the file.
const STARTS: usize = 2;

/// The line that says that the first token is there.
const FIRST_TOKEN: &str = "first token";

const COLUMNS: [&str; 7] = [
    "contender",
    "threads",
    "start to first token s",
    "most until then MB",
    "most while decoding MB",
    "of it not of files MB",
    "of it pages of files MB",
];

pub(super) fn run(
    settings: &Settings,
    model: &Path,
    dense: &[(Who, PathBuf); 2],
    tables: &mut Vec<Json>,
) -> Result<()> {
    if !settings.wants("memory") {
        return Ok(());
    }
    let threads = settings.threads.iter().copied().max().unwrap_or(1);
    let mut table = Table::new("Start and memory: a 16-token prompt, then a token after 4096", &COLUMNS, tables);
    let contenders = [
        ("library", Who::Library, model),
        ("dense, level 4", Who::Dense, &dense[0].1),
        ("dense, level 0", Who::Dense, &dense[1].1),
        ("tract", Who::Tract, model),
    ];
    for (name, who, path) in contenders {
        let runs = (0..STARTS).map(|_| start(who, path, threads)).collect::<Result<Vec<_>>>()?;
        let first = runs.iter().map(|(seconds, _)| *seconds).fold(f64::INFINITY, f64::min);
        let mut cells = vec![name.to_owned(), threads.to_string(), format!("{first:.2}")];
        // A file's pages are resident only once they are read: the last start has found them all.
        cells.extend(runs[STARTS - 1].1.iter().map(|kilobytes| format!("{:.0}", *kilobytes as f64 * 1.024e-3)));
        table.row(&cells);
    }
    Ok(())
}

/// Seconds to the first token, and kilobytes: the most until then, the most in decode steps, and after them, apart, what is of no file
/// and pages of files.
fn start(who: Who, model: &Path, threads: usize) -> Result<(f64, [u64; 4])> {
    let start = Instant::now();
    let mut child = Command::new(std::env::current_exe()?)
        .args(["llm-cold", who.name(), &threads.to_string()])
        .arg(model)
        .stdout(Stdio::piped())
        .spawn()?;
    let output = BufReader::new(child.stdout.take().context("no output")?);
    let (mut first, mut memory) = (None, None);
    for line in output.lines() {
        let line = line?;
        if line == FIRST_TOKEN {
            first = Some(start.elapsed().as_secs_f64());
        } else if let Ok(found) = serde_json::from_str(&line) {
            memory = Some(found);
        }
    }
    ensure!(child.wait()?.success(), "{} failed", who.name());
    Ok((first.context("no first token")?, memory.context("no memory")?))
}

/// The child process: `llm-cold WHO THREADS MODEL`.
pub(crate) fn child(arguments: &[String]) -> Result<()> {
    let [who, threads, model] = arguments else { anyhow::bail!("llm-cold WHO THREADS MODEL") };
    let mut decoder = Who::named(who)?.load(Path::new(model), threads.parse()?)?;
    decoder.prepare(PROMPT)?;
    decoder.run()?;
    println!("{FIRST_TOKEN}");
    std::io::stdout().flush()?;
    let [until_then] = memory(["VmHWM"])?;
    decoder.prepare(LONG)?;
    // The largest resident set begins anew.
    std::fs::write("/proc/self/clear_refs", "5").context("/proc/self/clear_refs")?;
    decoder.run()?;
    decoder.run()?;
    let [decoding, anonymous, files] = memory(["VmHWM", "RssAnon", "RssFile"])?;
    println!("{}", serde_json::to_string(&[until_then, decoding, anonymous, files])?);
    Ok(())
}

/// Kilobytes of this process.
fn memory<const N: usize>(fields: [&str; N]) -> Result<[u64; N]> {
    let status = std::fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    };
    Ok(fields.map(field))
}
