//! onnxruntime's library, loaded once a process.

use crate::error::{Error, Result};
use crate::locate::{self, Candidate, Found, ORT_VARIABLE, Search};
use ort::LoadDynamicError;
use ort::environment::Environment;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// ort allows one environment a process, and none after it is dropped: it is kept for the process's life.
static LOADED: Mutex<Option<Loaded>> = Mutex::new(None);

struct Loaded {
    library: PathBuf,
    found: Found,
    environment: Environment,
}

/// The process's environment, made from the library that `option`, the variable or a search names.
///
/// # Errors
/// [`Error::OrtLibrary`] for a library that was named and cannot be used, [`Error::OrtMissing`] where a search found none.
pub(crate) fn environment(option: Option<&Path>) -> Result<Environment> {
    with_loaded(option, |loaded| loaded.environment.clone())
}

/// The path of the library behind [`environment`], without links, and how it was found.
///
/// # Errors
/// As [`environment`].
pub(crate) fn library(option: Option<&Path>) -> Result<(PathBuf, Found)> {
    with_loaded(option, |loaded| (loaded.library.clone(), loaded.found))
}

fn with_loaded<T>(option: Option<&Path>, take: impl FnOnce(&Loaded) -> T) -> Result<T> {
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(loaded) = &*loaded {
        check_same(loaded, option)?;
        return Ok(take(loaded));
    }
    let made = match locate::onnxruntime(option) {
        Search::Named(named) => load(&named).map_err(|reason| {
            let reason = format!("{}: {reason}; without that, a library is searched for", named.found);
            Error::OrtLibrary { path: named.path, reason }
        })?,
        Search::Candidates(candidates) => first_usable(&candidates)?,
    };
    Ok(take(loaded.insert(made)))
}

fn check_same(loaded: &Loaded, option: Option<&Path>) -> Result<()> {
    match option {
        Some(path) if path.canonicalize().ok().as_deref() != Some(&loaded.library) => Err(Error::OrtLibrary {
            path: path.to_owned(),
            reason: format!("this process already uses {}, and can use only one", loaded.library.display()),
        }),
        _ => Ok(()),
    }
}

fn first_usable(candidates: &[Candidate]) -> Result<Loaded> {
    let mut tried = Vec::new();
    for candidate in candidates {
        match load(candidate) {
            Ok(loaded) => return Ok(loaded),
            Err(reason) => tried.push(format!("{}: {reason}", candidate.path.display())),
        }
    }
    let tried = if tried.is_empty() { "none was found".to_owned() } else { tried.join("; ") };
    let reason =
        format!("{tried} (install it, as with `pip install onnxruntime`, or name the library in {ORT_VARIABLE})");
    Err(Error::OrtMissing { reason })
}

/// Loads one library; a reason why it cannot be used leaves the process free to try another.
fn load(candidate: &Candidate) -> std::result::Result<Loaded, String> {
    let library = candidate.path.canonicalize().map_err(|e| e.to_string())?;
    let builder = ort::init_from(&library).map_err(|e| match e {
        LoadDynamicError::Dlopen { error, .. } => format!("cannot be loaded: {}", with_causes(&error)),
        LoadDynamicError::MissingApi { .. } => "it is not an onnxruntime library: OrtGetApiBase is missing".to_owned(),
        LoadDynamicError::InvalidVersionString => "its version is unreadable".to_owned(),
        LoadDynamicError::BadVersion { version_str, .. } => {
            format!("expected version 1.{} or newer, found {version_str}", ort::MINOR_VERSION)
        }
    })?;
    let environment = builder.with_name("moh").with_telemetry(false).build().map_err(|e| e.to_string())?;
    Ok(Loaded { library, found: candidate.found, environment })
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
