//! moh-export: a checkpoint in, an ONNX model out.

#![forbid(unsafe_code)]

mod args;
mod help;
mod hints;
#[cfg(feature = "text")]
mod tokens;

use anyhow::{Context, Result};
use args::{Command, ConvertArgs, InspectArgs, RandomArgs, VerifyArgs};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use moh_export::convert::RouterKind;
use moh_export::inspect::{self, Lengths};
use moh_export::verify::{Verification, configure, verify_layers};
use moh_export::{BF16_NOTE, ElementType, VERIFY_PARAMETERS, Weights, check_part, measured};
use moh_models::presets::Preset;
use moh_models::{Config, Model, Warning, WeightType};
use std::io::{ErrorKind, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::OnceLock;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let error_text = format!("{error:#}");
            // After a list the advice has a line of its own.
            let between = if error_text.contains('\n') { "\n" } else { "; " };
            let hint = hints::hint(&error).map_or(String::new(), |hint| format!("{between}{hint}"));
            tell(format_args!("error: {error_text}{hint}"));
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let mut args = args::Args::parse();
    #[cfg(unix)]
    moh_runtime::before_signals_end(moh_export::staging::abandon);
    match args.command.take() {
        Some(Command::Inspect(args)) => inspect(&args),
        Some(Command::Random(args)) => random(&args),
        Some(Command::Convert(args)) => convert(&args),
        Some(Command::Verify(args)) => verify(&args),
        Some(Command::Completions { shell }) => help::completions(shell),
        Some(Command::Man { folder }) => help::man(&folder),
        None => {
            // clap has required both paths where there is no other command.
            let Some(export) = args.export()? else { return Ok(()) };
            let mut options = export.options;
            if options.check_links && options.weights != Weights::Link {
                anyhow::bail!(
                    "--check reads the files that --weights link links; without that, what is written is always checked"
                );
            }
            if !export.quiet && !export.json && std::io::stderr().is_terminal() {
                options.progress = Some(progress);
            }
            let report = moh_export::export(&export.checkpoint, &export.output, &options)?;
            if !export.quiet {
                warn(&report.warnings);
            }
            if report.dtype == ElementType::BF16 && !export.quiet {
                tell(format_args!("warning: {}: {BF16_NOTE}", export.output.display()));
            }
            match (export.quiet, export.json) {
                (true, _) => {}
                (false, true) => say(&serde_json::to_string_pretty(&report)?)?,
                (false, false) => say(&report)?,
            }
            let skipped = matches!(report.verification, Verification::Skipped(_));
            if skipped && report.parameters > VERIFY_PARAMETERS && !export.quiet {
                let is_model = |path: &&PathBuf| path.extension().is_some_and(|extension| extension == "onnx");
                let files: Vec<&PathBuf> = report.files.iter().map(|file| &file.path).filter(is_model).collect();
                if let [model] = files[..] {
                    let (model, checkpoint) = (model.display(), export.checkpoint.display());
                    tell(format_args!(
                        "note: to compare a model of this size layer by layer, with the options that say how the checkpoint is read: \
                         moh-export verify {model} {checkpoint}"
                    ));
                }
            }
            Ok(())
        }
    }
}

/// Shows how much of the weight file is ready, on stderr.
fn progress(done: u64, all: u64) {
    static BAR: OnceLock<ProgressBar> = OnceLock::new();
    let bar = BAR.get_or_init(|| {
        let style = ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes}, {bytes_per_sec}, {eta} left");
        ProgressBar::new(all).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
    });
    match done < all {
        true => bar.set_position(done),
        false => bar.finish_and_clear(),
    }
}

/// Prints a line; a closed pipe is no failure of what was done.
fn say(what: &impl std::fmt::Display) -> Result<()> {
    match writeln!(std::io::stdout(), "{what}") {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("standard output"),
        _ => Ok(()),
    }
}

/// Prints a line on stderr, where that can be: whether the command succeeded is another matter.
fn tell(what: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{what}");
}

/// Prints what is probably not as it was meant, and what to do about it.
fn warn(warnings: &[Warning]) {
    for warning in warnings {
        let hint = hints::of_warning(warning).map_or(String::new(), |hint| format!("; {hint}"));
        tell(format_args!("warning: {warning}{hint}"));
    }
}

fn inspect(args: &InspectArgs) -> Result<()> {
    let lengths = Lengths { tokens: args.tokens, past: args.past, source: args.source_tokens };
    let family = args.source.family.as_deref();
    let planned = |mut config: Config| {
        args.part.put(&mut config);
        let (model, tensors) = Model::plan(&config, family)?;
        Ok::<_, moh_models::Error>((model, tensors, config))
    };
    let mut preset = args.source.preset.as_deref();
    let (model, tensors, config) = match (&args.checkpoint, preset) {
        (Some(path), _) if is_config(path) => {
            if let Some(option) = args.source.of_weights() {
                anyhow::bail!("{option} is for a checkpoint, and {} is a configuration", path.display());
            }
            planned(Config::read(path)?)?
        }
        (Some(path), _) => {
            let checkpoint = args.source.open(path, args.part.part())?;
            let model = Model::load(&checkpoint, family)?;
            preset = checkpoint.preset().map(|preset| preset.name);
            let tensors = model.tensors().clone();
            (model, tensors, checkpoint.config().clone())
        }
        (None, Some(name)) => planned(Preset::named(name)?.complete()?.0)?,
        (None, None) => anyhow::bail!("neither a checkpoint nor --preset"),
    };
    check_part(args.part.part(), &model)?;
    let usual = model.workload().tokens;
    let (model, tensors) = inspect::with_tokens(model, tensors, &config, lengths.tokens)?;
    let mut inspection = inspect::inspect(&model, &tensors, lengths)?;
    // At the lengths at which it was measured.
    let is_usual = inspection.tokens == usual && lengths.past == 0 && lengths.source.is_none();
    inspection.measured = preset.filter(|_| is_usual).and_then(measured::of);
    warn(model.warnings());
    match args.json {
        true => say(&serde_json::to_string_pretty(&inspection)?)?,
        false => say(&inspection)?,
    }
    Ok(())
}

/// Whether a path names a configuration rather than weights.
fn is_config(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "json") && !path.to_string_lossy().ends_with(".index.json")
}

/// A model that disagrees is a failure, after the table that says where.
fn verify(args: &VerifyArgs) -> Result<()> {
    let file = moh_runtime::find_model(&args.model)?;
    // clap has required it unless --check is there.
    let Some(path) = &args.checkpoint else { return check_links(&file, args.json) };
    let mut checkpoint = args.source.open(path, args.part.part())?;
    configure(&mut checkpoint, &file)?;
    let model = Model::load(&checkpoint, args.source.family.as_deref())?;
    check_part(args.part.part(), &model)?;
    warn(model.warnings());
    let is_bf16 = |name| checkpoint.get(name).is_some_and(|tensor| tensor.dtype() == WeightType::BF16);
    let all_bf16 = checkpoint.names().all(is_bf16);
    let scratch = args.scratch.clone().unwrap_or_else(std::env::temp_dir);
    let report = verify_layers(&file, &model, all_bf16, &scratch)?;
    match args.json {
        true => say(&serde_json::to_string_pretty(&report)?)?,
        false => say(&report)?,
    }
    match report.agrees {
        true => Ok(()),
        false => anyhow::bail!("{} disagrees with {}", args.model.display(), path.display()),
    }
}

/// Compares the files of the checkpoint that a model uses with the digests in the model.
fn check_links(model: &Path, json: bool) -> Result<()> {
    let links = moh_runtime::links(model)?;
    if links.is_empty() {
        anyhow::bail!("{}: it uses no file of a checkpoint: it was exported without --weights link", model.display());
    }
    let mut checked = Vec::new();
    for link in links {
        let contents = link.check_contents(model, &mut |_| ())?;
        match (json, contents) {
            (true, _) => {}
            (false, true) => say(&format!("{}: header and contents are as they were", link.file))?,
            (false, false) => say(&format!(
                "{}: length and header are as they were; the export noted no contents, because it was without --check",
                link.file
            ))?,
        }
        checked.push(serde_json::json!({ "file": link.file, "bytes": link.bytes, "contents": contents }));
    }
    if json {
        say(&serde_json::to_string_pretty(&checked)?)?;
    }
    Ok(())
}

fn random(args: &RandomArgs) -> Result<()> {
    let (config, text) = match is_config(&args.model) {
        true => (Config::read(&args.model)?, std::fs::read_to_string(&args.model)?),
        false => Preset::named(&args.model.to_string_lossy())?.complete()?,
    };
    let text = moh_export::random::config(&text, args.family.as_deref(), args.part.part())?;
    let (tensors, warnings) = moh_export::random::plan(&config, args.family.as_deref(), args.part.part())?;
    warn(&warnings);
    let dtype = args.dtype.element_type();
    let written = moh_export::random::write(&args.output, &text, &tensors, dtype, args.seed, args.force)?;
    match args.json {
        true => say(&serde_json::to_string_pretty(&written)?)?,
        false => say(&written)?,
    }
    Ok(())
}

fn convert(args: &ConvertArgs) -> Result<()> {
    if args.seed.is_some() && args.router == RouterKind::QueryNorm {
        anyhow::bail!("--seed is for the random weights of --router two-stage: query norms have none");
    }
    let mut options = args.options();
    #[cfg(feature = "text")]
    if let Some(text) = &args.text {
        let weights = moh_models::checkpoint::find_weights(&args.checkpoint)?;
        options.text = tokens::first(&weights.with_file_name(""), text, args.tokens)?;
    }
    if !args.json && std::io::stderr().is_terminal() {
        options.progress = Some(progress);
    }
    let converted = moh_export::convert::convert(&args.checkpoint, &args.output, &options)?;
    warn(&converted.warnings);
    match args.json {
        true => say(&serde_json::to_string_pretty(&converted)?)?,
        false => say(&converted)?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_names_weights() {
        for (name, expected) in [
            ("config.json", true),
            ("a/moh.json", true),
            ("model.safetensors.index.json", false),
            ("a/pytorch_model.bin.index.json", false),
            ("model.safetensors", false),
            ("folder", false),
        ] {
            assert_eq!(is_config(Path::new(name)), expected, "{name}");
        }
    }
}
