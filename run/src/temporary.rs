//! A temporary folder that goes away whatever ends the program: a return, an error, or a signal that asks it to end.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use tempfile::TempDir;

/// The folder that a signal removes, if there is one now.
static CURRENT: Mutex<Option<PathBuf>> = Mutex::new(None);

#[cfg(unix)]
static ON_SIGNALS: std::sync::Once = std::sync::Once::new();

pub(crate) struct Folder(TempDir);

impl Folder {
    /// Makes the folder. A program has one at a time.
    pub(crate) fn new() -> Result<Folder> {
        #[cfg(unix)]
        ON_SIGNALS.call_once(|| moh_runtime::before_signals_end(remove));
        let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = tempfile::Builder::new().prefix("moh-run-").tempdir();
        let folder = folder.with_context(|| format!("{}: no temporary folder", std::env::temp_dir().display()))?;
        *current = Some(folder.path().to_owned());
        Ok(Folder(folder))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

#[cfg(unix)]
fn remove() {
    let current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(folder) = &*current {
        let _ = std::fs::remove_dir_all(folder);
    }
}
