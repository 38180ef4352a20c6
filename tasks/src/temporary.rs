//! A temporary folder that goes away whatever ends the program: a return, an error, or a signal that asks it to end.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use tempfile::TempDir;

/// The folder that a signal removes, if there is one now.
static CURRENT: Mutex<Option<PathBuf>> = Mutex::new(None);

pub(crate) struct Folder(TempDir);

impl Folder {
    /// Makes the folder. A program has one at a time.
    pub(crate) fn new() -> Result<Folder> {
        on_signals(remove);
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

fn remove() {
    let current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(folder) = &*current {
        let _ = std::fs::remove_dir_all(folder);
    }
}

/// Runs `clean_up` before a signal ends the program, as it then does.
#[cfg(unix)]
fn on_signals(clean_up: fn()) {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    use signal_hook::iterator::Signals;
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        // Without it, signals end the program as they always do.
        let Ok(mut signals) = Signals::new([SIGHUP, SIGINT, SIGTERM]) else { return };
        std::thread::spawn(move || {
            if let Some(signal) = signals.forever().next() {
                clean_up();
                let _ = signal_hook::low_level::emulate_default_handler(signal);
            }
        });
    });
}

#[cfg(not(unix))]
fn on_signals(_: fn()) {}
