//! moh-export: a checkpoint in, an ONNX model out.

#![forbid(unsafe_code)]

mod args;

use anyhow::Result;
use clap::Parser;
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
    let args = args::Args::parse();
    let quiet = args.quiet;
    let (checkpoint, output, options) = args.options();
    let report = moh_export::export(&checkpoint, &output, &options)?;
    if !quiet {
        // A closed pipe is no failure of the export.
        let _ = writeln!(std::io::stdout(), "{report}");
    }
    Ok(())
}
