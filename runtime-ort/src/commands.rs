//! The subcommands.

pub(crate) mod classify;
pub(crate) mod generate;
pub(crate) mod infer;
pub(crate) mod sample;

use crate::args::RuntimeArgs;
use moh_runtime::Model;
use std::path::Path;

/// Loads a model and tells what is to be told about it.
fn load(path: &Path, args: &RuntimeArgs) -> moh_runtime::Result<Model> {
    let model = Model::load(path, &args.options())?;
    if !args.quiet {
        for notice in model.notices() {
            eprintln!("note: {notice}");
        }
    }
    Ok(model)
}
