//! `moh-run completions` and `moh-run man`.

use crate::args::Args;
use anyhow::{Context, Result};
use clap::CommandFactory;
use clap_complete::Shell;
use std::io::Write;
use std::path::Path;

/// Prints the script that completes commands and options in `shell`.
pub(crate) fn completions(shell: Shell) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "moh-run", &mut script);
    std::io::stdout().lock().write_all(&script)?;
    Ok(())
}

/// Writes a man page for the program and one for each command to `folder`.
pub(crate) fn man(folder: &Path) -> Result<()> {
    clap_mangen::generate_to(Args::command(), folder).with_context(|| folder.display().to_string())
}
