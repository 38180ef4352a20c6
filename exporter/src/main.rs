//! moh-export: a checkpoint in, an ONNX model out.

#![forbid(unsafe_code)]

mod args;
mod help;
mod hints;

use anyhow::Result;
use args::{Command, InspectArgs, RandomArgs};
use clap::Parser;
use moh_export::check_part;
use moh_export::inspect::Lengths;
use moh_models::presets::Preset;
use moh_models::{Config, Model, Warning};
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let error_text = format!("{error:#}");
            // After a list the advice has a line of its own.
            let between = if error_text.contains('\n') { "\n" } else { "; " };
            let hint = hints::hint(&error).map_or(String::new(), |hint| format!("{between}{hint}"));
            eprintln!("error: {error_text}{hint}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let mut args = args::Args::parse();
    match args.command.take() {
        Some(Command::Inspect(args)) => inspect(&args),
        Some(Command::Random(args)) => random(&args),
        Some(Command::Completions { shell }) => help::completions(shell),
        Some(Command::Man { folder }) => help::man(&folder),
        None => {
            // clap has required both paths where there is no other command.
            let Some(export) = args.export() else { return Ok(()) };
            let report = moh_export::export(&export.checkpoint, &export.output, &export.options)?;
            if !export.quiet {
                warn(&report.warnings);
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

/// Prints what is probably not as it was meant, and what to do about it.
fn warn(warnings: &[Warning]) {
    for warning in warnings {
        let hint = hints::of_warning(warning).map_or(String::new(), |hint| format!("; {hint}"));
        eprintln!("warning: {warning}{hint}");
    }
}

fn inspect(args: &InspectArgs) -> Result<()> {
    let lengths = Lengths { tokens: args.tokens, past: args.past };
    let family = args.family.as_deref();
    let planned = |mut config: Config| {
        args.part.put(&mut config);
        Model::plan(&config, family)
    };
    let (model, tensors) = match (&args.checkpoint, args.source.preset.as_deref()) {
        (Some(path), _) if is_config(path) => planned(Config::read(path)?)?,
        (Some(path), _) => {
            let checkpoint = args.source.open(path, args.part.part())?;
            let model = Model::load(&checkpoint, family)?;
            let tensors = model.tensors().clone();
            (model, tensors)
        }
        (None, Some(name)) => planned(Preset::named(name)?.complete()?.0)?,
        (None, None) => anyhow::bail!("neither a checkpoint nor --preset"),
    };
    check_part(args.part.part(), &model)?;
    let inspection = moh_export::inspect::inspect(&model, &tensors, lengths)?;
    warn(model.warnings());
    match args.json {
        true => say(&serde_json::to_string_pretty(&inspection)?),
        false => say(&inspection),
    }
    Ok(())
}

/// Whether a path names a configuration rather than weights.
fn is_config(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "json") && !path.to_string_lossy().ends_with(".index.json")
}

fn random(args: &RandomArgs) -> Result<()> {
    let (config, text) = match is_config(&args.model) {
        true => (Config::read(&args.model)?, std::fs::read_to_string(&args.model)?),
        false => Preset::named(&args.model.to_string_lossy())?.complete()?,
    };
    let (tensors, warnings) = moh_export::random::plan(&config, args.family.as_deref(), args.part.part())?;
    warn(&warnings);
    let dtype = args.dtype.element_type();
    for path in moh_export::random::write(&args.output, &text, &tensors, dtype, args.seed, args.force)? {
        say(&format!("wrote {}", path.display()));
    }
    Ok(())
}
