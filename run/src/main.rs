//! `moh-run`: runs exported models from the command line.
#![forbid(unsafe_code)]
#![deny(clippy::print_stderr)]

/// `eprintln!` without its panic where standard error cannot be written, as on a full disk: how a command ends does not depend on what it tells.
macro_rules! inform {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($words)*);
    }};
}

mod args;
mod commands;
mod temporary;

use args::{Args, Command};
use clap::Parser;
use std::io::ErrorKind;
use std::process::ExitCode;

fn main() -> ExitCode {
    let result = match Args::parse().command {
        Command::Infer(args) => commands::infer::run(&args),
        Command::Generate(args) => commands::generate::run(&args),
        Command::Translate(args) => commands::translate::run(&args),
        Command::Classify(args) => commands::classify::run(&args),
        Command::Sample(args) => commands::sample::run(&args),
        Command::Profile(args) => commands::profile::run(&args),
        Command::Routes(args) => commands::routes::run(&args),
        Command::Bench(args) => commands::bench::run(&args),
        Command::Serve(args) => commands::serve::run(&args),
        Command::Doctor(args) => commands::doctor::run(&args),
        Command::Completions { shell } => commands::help::completions(shell),
        Command::Man { folder } => commands::help::man(&folder),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            inform!("error: {error:#}{}", usage(&error).unwrap_or_default());
            ExitCode::FAILURE
        }
    }
}

/// Which command takes a model that another command refused, as the end of its message.
fn usage(error: &anyhow::Error) -> Option<&'static str> {
    let family = error.chain().find_map(|cause| match cause.downcast_ref() {
        Some(moh_tasks::Error::Task { family, .. }) => family.as_deref(),
        _ => None,
    });
    Some(match family?.trim_start_matches("moh-") {
        "vit" => ": `moh-run classify` names what is in images with it",
        "dit" => ": `moh-run sample` draws images with it",
        "llama" | "llm" | "gqe-llama" | "switchhead" => ": `moh-run generate` continues texts with it",
        "moa" => ": `moh-run translate` translates with an encoder and a decoder",
        _ => ": `moh-run infer` runs it on tensors",
    })
}

/// Whoever reads our output has seen enough, as `head` does.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let io = error.chain().find_map(|cause| cause.downcast_ref::<std::io::Error>());
    io.is_some_and(|io| io.kind() == ErrorKind::BrokenPipe)
}
