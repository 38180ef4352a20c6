//! Results of all trainings in a folder, as a page's tables and pictures.

use super::cases::{Case, Kind, TASKS, Task};
use super::common::Arguments;
use super::common::numbers::Numbers;
use super::latency::{self, PROMPT};
use super::picture::{self, Point};
use super::run::{RESULT, folder_of, plan};
use anyhow::{Context, Result};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// Seeds that are looked for.
const SEEDS: u64 = 16;

/// The trainings of one case.
struct Row {
    case: Case,
    /// One list of measures a seed.
    measured: Vec<(u64, Vec<f64>)>,
    checkpoint: PathBuf,
}

/// Prints a table for each task, and draws its models' quality over their time.
pub(crate) fn print(arguments: &Arguments) -> Result<()> {
    for task in &TASKS {
        let rows: Vec<Row> = task
            .cases()
            .into_iter()
            .filter_map(|case| row(arguments, task, case).transpose())
            .collect::<Result<_>>()?;
        if rows.is_empty() {
            continue;
        }
        let checkpoints: Vec<&Path> = rows.iter().map(|row| row.checkpoint.as_path()).collect();
        let times = latency::fastest(arguments, task, &checkpoints)?;
        println!("## {}\n", task.title);
        let names: Vec<&str> = task.measures.iter().map(|measure| measure.name).collect();
        println!(
            "| model | `results run` | heads on | parameters | M MACs | {} | against the first | ms |",
            names.join(" | ")
        );
        println!("|---|---|--:|--:|--:|{}--:|--:|", "--:|".repeat(names.len()));
        let mut points = Vec::new();
        for (row, ms) in rows.iter().zip(times) {
            let cost = Cost::of(task, &row.checkpoint)?;
            let mut cells = vec![
                row.case.title.to_owned(),
                format!("`{} {}`", task.name, row.case.name),
                format!("{:.0} %", 100.0 * cost.active),
                format!("{:.3} M", cost.parameters as f64 / 1e6),
                format!("{:.1}", cost.macs as f64 / 1e6),
            ];
            for (i, measure) in task.measures.iter().enumerate() {
                let values: Vec<f64> = row.measured.iter().map(|(_, measured)| measured[i]).collect();
                cells.push(spread(&values, measure.digits, false));
            }
            cells.push(match differences(row, &rows[0]).as_slice() {
                _ if std::ptr::eq(row, &raw const rows[0]) => String::new(),
                [] => "-".to_owned(),
                differences => spread(differences, task.measures[0].digits, true),
            });
            cells.push(format!("{ms:.2}"));
            println!("| {} |", cells.join(" | "));
            let values: Vec<f64> = row.measured.iter().map(|(_, measured)| measured[0]).collect();
            points.push(Point { name: row.case.name, ms, values });
        }
        let file = arguments.folder.join(format!("results-{}.svg", task.name));
        let title = format!("{} over ms ({}, one thread)", task.measures[0].name, task.timed);
        std::fs::write(&file, picture::quality(&title, &points)).with_context(|| file.display().to_string())?;
        println!("\n![{title}]({})\n", file.file_name().context("a name")?.to_string_lossy());
    }
    Ok(())
}

/// What the folder has of a case; `None` where no seed was trained.
fn row(arguments: &Arguments, task: &Task, case: Case) -> Result<Option<Row>> {
    let (mut measured, mut checkpoint) = (Vec::new(), None);
    for seed in 0..SEEDS {
        let file = folder_of(&arguments.folder, task, &case, seed).join(RESULT);
        let Ok(text) = std::fs::read_to_string(&file) else { continue };
        let wrong = || format!("{}: expected what `results run` writes", file.display());
        let result: Value = serde_json::from_str(&text).with_context(wrong)?;
        let numbers = result["measured"].as_array().with_context(wrong)?;
        let numbers: Vec<f64> = numbers.iter().filter_map(Value::as_f64).collect();
        anyhow::ensure!(numbers.len() == task.measures.len(), wrong());
        measured.push((seed, numbers));
        checkpoint.get_or_insert(arguments.folder.join(result["checkpoint"].as_str().with_context(wrong)?));
    }
    Ok(checkpoint.map(|checkpoint| Row { case, measured, checkpoint }))
}

/// The first measure less that of the other row's training with the same seed.
fn differences(row: &Row, first: &Row) -> Vec<f64> {
    let of = |seed: u64| first.measured.iter().find(|(other, _)| *other == seed).map(|(_, measured)| measured[0]);
    row.measured.iter().filter_map(|(seed, measured)| Some(measured[0] - of(*seed)?)).collect()
}

/// Mean and standard deviation.
fn spread(values: &[f64], digits: usize, signed: bool) -> String {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let deviation = (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (n - 1.0).max(1.0)).sqrt();
    let mean = if signed { format!("{mean:+.digits$}") } else { format!("{mean:.digits$}") };
    if values.len() > 1 { format!("{mean} ± {deviation:.digits$}") } else { mean }
}

/// What a model takes.
struct Cost {
    /// Share of the heads that are on.
    active: f64,
    parameters: usize,
    /// Multiply-accumulates of what is timed; of a translation, of encoder and decoder for 8 tokens each.
    macs: u64,
}

impl Cost {
    fn of(task: &Task, checkpoint: &Path) -> Result<Cost> {
        let file = checkpoint.join("config.json");
        let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let config: Map<String, Value> = serde_json::from_str(&text)?;
        if task.kind == Kind::Numbers {
            let numbers = Numbers::new(&config)?;
            let [encoder, decoder] = numbers.models();
            let sizes = [("batch", 1), ("source", 8), ("target", 8), ("sequence", 8)];
            let macs = encoder.macs(&sizes)?.routed + decoder.macs(&sizes)?.routed;
            // Decoder and encoder share their embedding.
            let mut tensors: Vec<_> = encoder.tensors().iter().chain(decoder.tensors()).collect();
            tensors.sort();
            tensors.dedup();
            let parameters = tensors.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
            return Ok(Cost { active: encoder.active_share(), parameters, macs });
        }
        let model = plan(&config)?;
        let sizes: &[(&str, usize)] = match task.kind {
            Kind::Text => &[("batch", 1), ("past", 0), ("sequence", PROMPT), ("past+sequence", PROMPT)],
            _ => &[("batch", 16)],
        };
        Ok(Cost { active: model.active_share(), parameters: model.parameters(), macs: model.macs(sizes)?.routed })
    }
}
