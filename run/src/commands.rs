//! The subcommands.

pub(crate) mod bench;
pub(crate) mod classify;
pub(crate) mod doctor;
pub(crate) mod generate;
pub(crate) mod help;
pub(crate) mod infer;
pub(crate) mod profile;
pub(crate) mod routes;
pub(crate) mod sample;
pub(crate) mod serve;
mod text;
pub(crate) mod translate;

use crate::args::RuntimeArgs;
use anyhow::{Result, ensure};
use moh_runtime::Model;
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Loads a model and tells what is to be told about it.
fn load(path: &Path, args: &RuntimeArgs) -> Result<Model> {
    let model = Model::load(path, &args.options()?)?;
    tell(&model, args.quiet());
    Ok(model)
}

/// Refuses outputs that cannot be written, before the work.
fn check_output<'a>(outputs: impl IntoIterator<Item = &'a PathBuf>, force: bool) -> Result<()> {
    for path in outputs {
        ensure!(!path.is_dir(), "{}: expected a file, found a folder", path.display());
        ensure!(force || !path.try_exists()?, "{} exists already; --force overwrites it", path.display());
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        ensure!(folder.is_dir(), "{}: cannot be written: there is no folder {}", path.display(), folder.display());
    }
    Ok(())
}

/// Prints what `--json` asks for: the only thing that is then on standard output.
fn print_json(value: &Value) -> std::io::Result<()> {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{value:#}")?;
    output.flush()
}

/// Tells what is to be told about a model.
fn tell(model: &Model, quiet: bool) {
    for notice in model.notices().iter().filter(|_| !quiet) {
        inform!("note: {notice}");
    }
}
