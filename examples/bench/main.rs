//! The benchmarks of `docs/performance.md`: what routing saves, against the best dense operators, in one run.
//!
//! `cargo run --release --example bench -- [operators|models|growth ...] [--threads 1,2] [--seconds 2] [--only TEXT]
//! [--json FILE]`; `ci/bench.sh` builds everything and writes the document. `--cases FOLDER [--large]` runs nothing, but writes the models
//! of `ci/bench.sh --against`. `llm --model MODEL.onnx [--folder FOLDER]` measures an exported language model against a dense one of
//! its shape, which is written to the folder (default target/bench/llm).
//!
//! Contenders alternate within a row, so that a disturbance of the machine meets all of them. A cell is the shortest time and,
//! in brackets, the median; ratios are those of the shortest times.

#![allow(missing_docs)]

mod cached;
mod cases;
mod graphs;
mod growth;
mod llm;
mod machine;
mod measure;
mod models;
mod operators;

use anyhow::{Context, Result, bail};
use measure::Settings;
use std::path::PathBuf;
use std::time::Duration;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(("llm-cold", rest)) = arguments.split_first().map(|(first, rest)| (first.as_str(), rest)) {
        return llm::child(rest);
    }
    let mut sections = Vec::new();
    let mut settings = Settings { threads: vec![1, 2], time: Duration::from_secs(2), only: None };
    let (mut json, mut cases, mut large, mut paths) = (None, None, false, llm::Paths::default());
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().with_context(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "operators" | "models" | "growth" | "llm" => sections.push(argument),
            "--threads" => {
                settings.threads =
                    value()?.split(',').map(str::parse).collect::<Result<_, _>>().context("--threads")?;
            }
            "--seconds" => settings.time = Duration::try_from_secs_f64(value()?.parse().context("--seconds")?)?,
            "--only" => settings.only = Some(value()?),
            "--json" => json = Some(value()?),
            "--cases" => cases = Some(PathBuf::from(value()?)),
            "--large" => large = true,
            "--model" => paths.model = Some(PathBuf::from(value()?)),
            "--folder" => paths.folder = Some(PathBuf::from(value()?)),
            other => bail!(
                "unknown argument {other}: expected operators, models, growth, llm, --threads, --seconds, --only, --json, \
                 --cases, --large, --model, --folder"
            ),
        }
    }
    if let Some(folder) = cases {
        return cases::write(&folder, large, &settings);
    }
    if sections.is_empty() {
        sections = ["operators", "models", "growth"].map(str::to_owned).to_vec();
    }
    // onnxruntime allows one environment a process, and this section makes its own.
    anyhow::ensure!(sections.len() == 1 || !sections.contains(&"llm".to_owned()), "llm runs alone");
    println!("{}\n", machine::description(&settings.threads));
    let mut tables = Vec::new();
    for section in &sections {
        match section.as_str() {
            "operators" => operators::run(&settings, &mut tables)?,
            "models" => models::run(&settings, &mut tables)?,
            "llm" => llm::run(&settings, &paths, &mut tables)?,
            _ => growth::run(&settings, &mut tables)?,
        }
    }
    if let Some(path) = json {
        std::fs::write(&path, serde_json::to_vec_pretty(&tables)?).with_context(|| path.clone())?;
    }
    Ok(())
}
