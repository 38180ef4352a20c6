//! The papers' claims in small: trains dense and routed models alike, measures them on what they were not trained on, and times the exported
//! files.
//!
//!     examples/train/fetch.sh
//!     cargo run --release --example results -- list                                  # tasks and models
//!     cargo run --release --example results -- run FOLDER TASK MODEL [--seed N] [--steps N] [--data FOLDER]
//!     cargo run --release --example results -- table FOLDER [--data FOLDER]          # what FOLDER has, as in docs/results.md
//!
//! `ci/results.sh` runs all of them with three seeds. Models of one seed begin with the same numbers in the tensors that they share, and
//! see the same batches. `table` exports the first seed's models and times them in onnxruntime with the library of the ai.moh operators, in
//! turns: `ORT_DYLIB_PATH` and `MOH_OPS_LIBRARY` say where these are, if they are not found.

mod cases;
#[path = "../common/mod.rs"]
mod common;
mod latency;
mod picture;
mod run;
mod table;

use anyhow::{Context, Result, bail};
use cases::{TASKS, Task};
use common::Arguments;

const USAGE: &str =
    "usage: list | run FOLDER TASK MODEL [--seed N] [--steps N] [--data FOLDER] | table FOLDER [--data FOLDER]";

fn main() -> Result<()> {
    moh_train::join_pool();
    let mut words = Vec::new();
    let mut read = Arguments { folder: "".into(), data: "target/train-data".into(), steps: None, seed: 0 };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().with_context(|| format!("{argument}: expected a value; {USAGE}"));
        match argument.as_str() {
            "--steps" => read.steps = Some(value()?.parse().context("--steps")?),
            "--seed" => read.seed = value()?.parse().context("--seed")?,
            "--data" => read.data = value()?.into(),
            _ if argument.starts_with('-') => bail!("{argument}: unknown; {USAGE}"),
            _ => words.push(argument),
        }
    }
    match words.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["list"] => {
            for task in &TASKS {
                task.cases().iter().for_each(|case| println!("{} {}", task.name, case.name));
            }
        }
        ["run", folder, task, case] => {
            read.folder = folder.into();
            let task = Task::named(task)?;
            println!("{}", run::run(&read, task, &task.case(case)?)?);
        }
        ["table", folder] => {
            read.folder = folder.into();
            table::print(&read)?;
        }
        _ => bail!(USAGE),
    }
    Ok(())
}
