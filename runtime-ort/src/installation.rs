//! What models would run with on this machine, without a model.

use crate::backend::{cuda_provider, environment};
use crate::error::{Error, Result};
use crate::locate::{self, Candidate, Found, OPS_VARIABLE, Search};
use crate::options::Options;
use std::path::PathBuf;
use std::sync::LazyLock;

/// The commit that this crate was built from; `unknown` where the build had no git.
pub const COMMIT: &str = env!("MOH_COMMIT");
/// tract's version, which is built in.
pub const TRACT_VERSION: &str = env!("MOH_TRACT_VERSION");

/// What a program says with `--version`, after its name: version and commit, the runtimes, and the instruction set that the CPU kernels
/// use.
pub fn long_version() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        let kernels = match crate::instruction_set() {
            Ok(set) => format!("{set} (this processor has {})", crate::instruction_sets().join(", ")),
            Err(error) => error.to_string(),
        };
        format!(
            "{}\nruntimes: tract {TRACT_VERSION}, built in; onnxruntime 1.{} or newer, loaded when it is used\nCPU kernels: {kernels}",
            short_version(),
            ort::MINOR_VERSION
        )
    });
    &TEXT
}

/// Version and commit; all programs of the workspace have one version.
pub fn short_version() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| format!("{} (commit {COMMIT})", env!("CARGO_PKG_VERSION")));
    &TEXT
}

/// How libmoh_ops begins the text in its file that says what it is.
const LABEL: &[u8] = b"libmoh_ops build: ";

/// The onnxruntime library that this process uses.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OnnxRuntime {
    /// The library, without links.
    pub path: PathBuf,
    /// How it was found.
    pub found: Found,
    /// Its version, if the file's name says it.
    pub version: Option<String>,
    /// Whether it has a CUDA provider.
    pub cuda: bool,
}

/// The onnxruntime library that models loaded with `options` run in; loads it.
///
/// # Errors
/// [`Error::OrtLibrary`] for a library that was named and cannot be used, [`Error::OrtMissing`] where a search found none.
pub fn onnxruntime(options: &Options) -> Result<OnnxRuntime> {
    let (path, found) = environment::library(options.ort_library.as_deref())?;
    let version = locate::version_name(&path);
    Ok(OnnxRuntime { path, found, version, cuda: cuda_provider() })
}

/// The library of the ai.moh operators for onnxruntime.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperatorLibrary {
    /// The library, as it was named or found.
    pub path: PathBuf,
    /// How it was found.
    pub found: Found,
    /// What its file says of itself; `None` for a library that was built before it said anything.
    pub build: Option<LibraryBuild>,
}

/// What a library's file says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LibraryBuild {
    /// Version of the package.
    pub version: String,
    /// The commit, or `unknown`.
    pub commit: String,
    /// Whether CUDA kernels are compiled in.
    pub cuda: bool,
}

/// The library of the ai.moh operators that models loaded with `options` use in onnxruntime; reads its file, and does not load it.
///
/// # Errors
/// [`Error::OpsLibrary`] where there is none, or the one that was named cannot be read.
pub fn operator_library(options: &Options) -> Result<OperatorLibrary> {
    let candidate = match locate::operators(options.ops_library.as_deref()) {
        Search::Named(named) => Some(named),
        Search::Candidates(candidates) => candidates.into_iter().next(),
    };
    let Some(Candidate { path, found }) = candidate else {
        let reason = format!("not found: copy it beside this program, or name it in {OPS_VARIABLE}");
        return Err(Error::OpsLibrary { path: locate::operators_name().into(), reason });
    };
    match std::fs::read(&path) {
        Ok(bytes) => Ok(OperatorLibrary { path, found, build: label(&bytes) }),
        Err(e) => Err(Error::OpsLibrary { path, reason: format!("{found}: {e}") }),
    }
}

/// What stands in the file between [`LABEL`] and a semicolon: version, commit, `cuda` or `no cuda`.
fn label(bytes: &[u8]) -> Option<LibraryBuild> {
    let start = bytes.windows(LABEL.len()).position(|window| window == LABEL)? + LABEL.len();
    let text = bytes[start..].split(|&byte| byte == b';').next()?;
    match std::str::from_utf8(text).ok()?.split(", ").collect::<Vec<_>>()[..] {
        [version, commit, cuda] => {
            Some(LibraryBuild { version: version.to_owned(), commit: commit.to_owned(), cuda: cuda == "cuda" })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_found_in_a_file() {
        let build = |cuda| LibraryBuild { version: "0.1.0".to_owned(), commit: "abc".to_owned(), cuda };
        let of = |text: &str| label([b"\x7fELF\0\0", text.as_bytes(), b"\0\xff"].concat().as_slice());
        assert_eq!(of("libmoh_ops build: 0.1.0, abc, no cuda;rest"), Some(build(false)));
        assert_eq!(of("libmoh_ops build: 0.1.0, abc, cuda;"), Some(build(true)));
        assert_eq!(of("libmoh_ops build: 0.1.0"), None);
        assert_eq!(of(""), None);
    }
}
