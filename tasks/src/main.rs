//! `moh-run`: runs exported models from the command line.
#![forbid(unsafe_code)]

mod args;
mod commands;

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
        Command::Completions { shell } => commands::help::completions(shell),
        Command::Man { folder } => commands::help::man(&folder),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whoever reads our output has seen enough, as `head` does.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let io = error.chain().find_map(|cause| cause.downcast_ref::<std::io::Error>());
    io.is_some_and(|io| io.kind() == ErrorKind::BrokenPipe)
}
