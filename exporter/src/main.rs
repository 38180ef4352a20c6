//! moh-export: a checkpoint in, an ONNX model out.

#![forbid(unsafe_code)]

mod args;

use anyhow::Result;
use args::{Command, InspectArgs, RandomArgs};
use clap::Parser;
use moh_export::inspect::Lengths;
use moh_models::{Config, Model};
use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let mut args = args::Args::parse();
    match args.command.take() {
        Some(Command::Inspect(args)) => inspect(&args),
        Some(Command::Random(args)) => random(&args),
        None => {
            // clap has required both paths where there is no other command.
            let Some(export) = args.export() else { return Ok(()) };
            let report = moh_export::export(&export.checkpoint, &export.output, &export.options)?;
            if !export.quiet {
                say(&report);
            }
            Ok(())
        }
    }
}

/// Prints a line; a closed pipe is no failure of what was done.
fn say(what: &impl std::fmt::Display) {
    let _ = writeln!(std::io::stdout(), "{what}");
}

fn inspect(args: &InspectArgs) -> Result<()> {
    let lengths = Lengths { tokens: args.tokens, past: args.past };
    let is_config = args.checkpoint.extension().is_some_and(|extension| extension == "json")
        && !args.checkpoint.to_string_lossy().ends_with(".index.json");
    let (model, tensors) = match is_config {
        true => Model::plan(&Config::read(&args.checkpoint)?, args.family.as_deref())?,
        false => {
            let checkpoint = args.source.open(&args.checkpoint)?;
            let model = Model::load(&checkpoint, args.family.as_deref())?;
            let shapes = checkpoint.names().filter_map(|name| checkpoint.get(name));
            (model, shapes.map(|weight| (weight.name().to_owned(), weight.shape().to_vec())).collect())
        }
    };
    let inspection = moh_export::inspect::inspect(&model, &tensors, lengths)?;
    match args.json {
        true => say(&serde_json::to_string_pretty(&inspection)?),
        false => say(&inspection),
    }
    Ok(())
}

fn random(args: &RandomArgs) -> Result<()> {
    let config = Config::read(&args.config)?;
    let (_, tensors) = Model::plan(&config, args.family.as_deref())?;
    let text = std::fs::read_to_string(&args.config)?;
    let dtype = args.dtype.element_type();
    for path in moh_export::random::write(&args.output, &text, &tensors, dtype, args.seed, args.force)? {
        say(&format!("wrote {}", path.display()));
    }
    Ok(())
}
