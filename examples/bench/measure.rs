//! Contenders of one row, timed in turns.

use anyhow::Result;
use moh_runtime::{Model, Options, RuntimeChoice, Value};
use serde_json::json;
use std::path::Path;
use std::time::{Duration, Instant};

/// What the command line says.
pub(crate) struct Settings {
    pub(crate) threads: Vec<usize>,
    /// For a row.
    pub(crate) time: Duration,
    /// Only rows whose name contains this.
    pub(crate) only: Option<String>,
}

impl Settings {
    pub(crate) fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| name.contains(only.as_str()))
    }
}

/// Who runs a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// onnxruntime with libmoh_ops.
    Library,
    /// The same with weights packed once.
    Packed,
    /// onnxruntime alone.
    Alone,
    /// tract.
    Tract,
}

/// What is timed.
pub(crate) trait Timed {
    /// Runs once.
    fn run(&mut self) -> Result<Duration>;
}

/// A model with its inputs.
pub(crate) struct Contender {
    model: Model,
    inputs: Vec<(String, Value)>,
}

impl Contender {
    pub(crate) fn new(path: &Path, way: Way, threads: usize, inputs: Vec<(String, Value)>) -> Result<Contender> {
        let runtime = if way == Way::Tract { RuntimeChoice::Tract } else { RuntimeChoice::Ort };
        let options = Options {
            runtime,
            threads: Some(threads),
            without_custom_ops: way == Way::Alone,
            pack_weights: way == Way::Packed,
            ..Options::default()
        };
        let model = Model::load(path, &options)?;
        // A library that is not there would make every ratio 1.
        anyhow::ensure!(way == Way::Alone || model.notices().is_empty(), "{}", model.notices()[0]);
        let known: Vec<&str> = model.inputs().iter().map(|input| input.name.as_str()).collect();
        let inputs = inputs.into_iter().filter(|(name, _)| known.contains(&name.as_str())).collect();
        Ok(Contender { model, inputs })
    }
}

impl Timed for Contender {
    fn run(&mut self) -> Result<Duration> {
        let inputs = self.inputs.clone();
        let start = Instant::now();
        let outputs = self.model.run(inputs)?;
        let time = start.elapsed();
        drop(outputs);
        Ok(time)
    }
}

/// A contender's times in seconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    pub(crate) min: f64,
    pub(crate) median: f64,
}

impl Times {
    fn of(mut all: Vec<f64>) -> Times {
        all.sort_by(f64::total_cmp);
        Times { min: all[0], median: all[all.len() / 2] }
    }

    pub(crate) fn cell(&self) -> String {
        let digits = if self.min < 0.01 { 3 } else { 1 };
        format!("{:.digits$} ({:.digits$})", 1e3 * self.min, 1e3 * self.median)
    }
}

/// Calls of one turn. In a model the operator before has just written what an operator reads, so that a run after others'
/// would find colder caches than it does in practice.
const TURN: usize = 3;

/// Calls that take longer, in seconds, find the caches as they leave them, and are repeated less often.
const LONG: f64 = 1.0;

/// Runs the contenders in turns: one round to warm up, then for the given time, three rounds at least (two of long calls).
pub(crate) fn alternate(contenders: &mut [impl Timed], time: Duration) -> Result<Vec<Times>> {
    let mut times = vec![Vec::new(); contenders.len()];
    let mut longest = 0f64;
    for contender in &mut *contenders {
        longest = longest.max(contender.run()?.as_secs_f64());
    }
    let (turn, rounds) = if longest < LONG { (TURN, 3) } else { (1, 2) };
    let start = Instant::now();
    while start.elapsed() < time || times[0].len() < rounds * turn {
        for (contender, times) in contenders.iter_mut().zip(&mut times) {
            for _ in 0..turn {
                times.push(contender.run()?.as_secs_f64());
            }
        }
    }
    Ok(times.into_iter().map(Times::of).collect())
}

/// A table that is printed row by row, and kept for `--json`.
pub(crate) struct Table<'t> {
    name: &'static str,
    columns: Vec<String>,
    all: &'t mut Vec<serde_json::Value>,
}

impl<'t> Table<'t> {
    pub(crate) fn new(name: &'static str, columns: &[&str], all: &'t mut Vec<serde_json::Value>) -> Table<'t> {
        println!("### {name}\n\n| {} |\n|{}", columns.join(" | "), "---|".repeat(columns.len()));
        Table { name, columns: columns.iter().map(|&column| column.to_owned()).collect(), all }
    }

    pub(crate) fn row(&mut self, cells: &[String]) {
        println!("| {} |", cells.join(" | "));
        let cells: serde_json::Map<_, _> =
            self.columns.iter().cloned().zip(cells.iter().map(|cell| json!(cell))).collect();
        self.all.push(json!({ "table": self.name, "row": cells }));
    }
}

impl Drop for Table<'_> {
    fn drop(&mut self) {
        println!();
    }
}
