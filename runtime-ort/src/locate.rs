//! Where the two libraries may be: onnxruntime itself and the ai.moh operators for it.

use std::cmp::Reverse;
use std::env;
use std::env::consts::{ARCH, DLL_PREFIX, DLL_SUFFIX};
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Names the onnxruntime library; the variable that ort and others read, too.
pub(crate) const ORT_VARIABLE: &str = "ORT_DYLIB_PATH";
/// Names the library of the ai.moh operators.
pub(crate) const OPS_VARIABLE: &str = "MOH_OPS_LIBRARY";

/// How a library was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Found {
    /// An option names it.
    Option,
    /// This environment variable names it.
    Variable(&'static str),
    /// It is in the program's folder, or in the one above.
    BesideProgram,
    /// It belongs to the onnxruntime package of a Python installation.
    PythonPackage,
    /// It is in a folder of the system's libraries.
    System,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Found::Option => f.write_str("named by an option"),
            Found::Variable(variable) => write!(f, "named by {variable}"),
            Found::BesideProgram => f.write_str("found beside the program"),
            Found::PythonPackage => f.write_str("found in a Python package"),
            Found::System => f.write_str("found among the system's libraries"),
        }
    }
}

/// A library that may be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) path: PathBuf,
    pub(crate) found: Found,
}

/// A library that was asked for by name, or places to try.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Search {
    /// This one or an error.
    Named(Candidate),
    /// The first that is usable.
    Candidates(Vec<Candidate>),
}

/// The onnxruntime library: the option, the environment variable, or what is found.
pub(crate) fn onnxruntime(option: Option<&Path>) -> Search {
    named(option, ORT_VARIABLE).unwrap_or_else(|| {
        let mut candidates = Vec::new();
        let mut add = |found, folders: Vec<PathBuf>| {
            let paths = folders.iter().flat_map(|folder| versions_in(folder));
            candidates.extend(paths.map(|path| Candidate { path, found }));
        };
        add(Found::BesideProgram, executable_folders());
        add(Found::PythonPackage, python_packages().iter().map(|package| package.join("capi")).collect());
        add(Found::System, system_folders());
        Search::Candidates(candidates)
    })
}

/// The operator library: the option, the environment variable, or the file beside the executable.
pub(crate) fn operators(option: Option<&Path>) -> Search {
    named(option, OPS_VARIABLE).unwrap_or_else(|| {
        let beside = executable_folders().into_iter().map(|folder| folder.join(operators_name()));
        let candidate = |path| Candidate { path, found: Found::BesideProgram };
        Search::Candidates(beside.filter(|path| path.is_file()).map(candidate).collect())
    })
}

/// The operator library's file name on this system.
pub(crate) fn operators_name() -> String {
    format!("{DLL_PREFIX}moh_ops{DLL_SUFFIX}")
}

fn named(option: Option<&Path>, variable: &'static str) -> Option<Search> {
    let candidate = |path, found| Search::Named(Candidate { path, found });
    let from_variable = || env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    match option {
        Some(path) => Some(candidate(path.to_owned(), Found::Option)),
        None => from_variable().map(|path| candidate(path, Found::Variable(variable))),
    }
}

/// The executable's folder, and the one above for executables in a subfolder of the libraries'.
fn executable_folders() -> Vec<PathBuf> {
    let executable = env::current_exe().and_then(|path| path.canonicalize());
    executable.iter().flat_map(|path| path.ancestors().skip(1).take(2)).map(Path::to_owned).collect()
}

/// The folders of installed onnxruntime packages: the one that was installed together with this program's own Python package, then those
/// of every Python that the environment points at; asked, not guessed, because only the interpreter knows its own search path.
fn python_packages() -> Vec<PathBuf> {
    let packages = executable_folders().first().and_then(|folder| beside_package(folder));
    packages.into_iter().chain(asked_packages()).collect()
}

/// The onnxruntime package beside the Python package that a program's folder, `.../moh_onnx/bin`, belongs to.
fn beside_package(folder: &Path) -> Option<PathBuf> {
    let package = folder.ancestors().nth(2)?.join("onnxruntime");
    (folder.ends_with("moh_onnx/bin") && package.is_dir()).then_some(package)
}

fn asked_packages() -> Vec<PathBuf> {
    const FIND: &str = "import importlib.util\n\
                        spec = importlib.util.find_spec('onnxruntime')\n\
                        print((spec.submodule_search_locations or [''])[0] if spec else '')";
    let (folder, name) = if cfg!(windows) { ("Scripts", "python.exe") } else { ("bin", "python3") };
    let in_prefix = |variable| env::var_os(variable).map(|prefix| Path::new(&prefix).join(folder).join(name));
    let interpreters: Vec<OsString> = ["VIRTUAL_ENV", "CONDA_PREFIX"]
        .into_iter()
        .filter_map(in_prefix)
        .filter(|path| path.is_file())
        .map(OsString::from)
        .chain([OsString::from(name)])
        .collect();
    let ask = |interpreter: &OsString| {
        let answer = Command::new(interpreter)
            .args(["-c", FIND])
            // Python searches the current folder first: it must not be the user's.
            .current_dir(executable_folders().first()?)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output()
            .ok()?;
        let path = PathBuf::from(String::from_utf8(answer.stdout).ok()?.trim_end_matches(['\r', '\n']));
        path.is_absolute().then_some(path)
    };
    interpreters.iter().filter_map(ask).collect()
}

fn system_folders() -> Vec<PathBuf> {
    let variable = if cfg!(target_os = "macos") { "DYLD_LIBRARY_PATH" } else { "LD_LIBRARY_PATH" };
    let listed = env::var_os(variable).map(|value| env::split_paths(&value).collect()).unwrap_or_default();
    let usual = ["/usr/local/lib", "/usr/lib", "/usr/lib64", "/opt/homebrew/lib"].map(PathBuf::from);
    let multiarch = PathBuf::from(format!("/usr/lib/{ARCH}-linux-gnu"));
    let folders: Vec<PathBuf> = listed;
    folders.into_iter().filter(|folder| folder.is_absolute()).chain(usual).chain([multiarch]).collect()
}

/// The onnxruntime libraries in `folder`, newest first.
fn versions_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<(Vec<u64>, PathBuf)> = entries
        .filter_map(|entry| Some((version(entry.file_name().to_str()?)?, entry.path())))
        .filter(|(_, path)| path.is_file())
        .collect();
    found.sort_by_cached_key(|(version, path)| (Reverse(version.clone()), path.clone()));
    found.into_iter().map(|(_, path)| path).collect()
}

/// The version in the file name of an onnxruntime library, where it has one.
pub(crate) fn version_name(path: &Path) -> Option<String> {
    let numbers = version(path.file_name()?.to_str()?)?;
    let name = numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(".");
    (!name.is_empty()).then_some(name)
}

/// The numbers in the file name of an onnxruntime library; `None` for another file, such as a provider's library.
fn version(file_name: &str) -> Option<Vec<u64>> {
    let rest = file_name.strip_prefix(DLL_PREFIX)?.strip_prefix("onnxruntime")?;
    let is_library = rest.starts_with('.') && rest.contains(DLL_SUFFIX);
    is_library.then(|| rest.split('.').filter_map(|part| part.parse().ok()).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn the_newest_version_comes_first_and_providers_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let names = ["so.1.9.0", "so.1.31.1", "so"].map(|end| format!("libonnxruntime.{end}"));
        for name in names.iter().map(String::as_str).chain(["libonnxruntime_providers_shared.so", "libonnxruntime.txt"])
        {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        std::fs::create_dir(folder.path().join("libonnxruntime.so.1.40.0")).unwrap();
        let found: Vec<String> = versions_in(folder.path())
            .iter()
            .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
            .collect();
        assert_eq!(found, ["libonnxruntime.so.1.31.1", "libonnxruntime.so.1.9.0", "libonnxruntime.so"]);
    }

    #[test]
    fn a_python_package_finds_the_onnxruntime_that_is_installed_with_it() {
        let site_packages = tempfile::tempdir().unwrap();
        let own = site_packages.path().join("moh_onnx/bin");
        assert_eq!(beside_package(&own), None);
        let onnxruntime = site_packages.path().join("onnxruntime");
        std::fs::create_dir(&onnxruntime).unwrap();
        assert_eq!(beside_package(&own), Some(onnxruntime));
        assert_eq!(beside_package(&site_packages.path().join("other/bin")), None);
    }

    #[test]
    fn a_named_library_is_the_only_one() {
        let path = Path::new("/nowhere/libonnxruntime.so");
        let named = || Search::Named(Candidate { path: path.to_owned(), found: Found::Option });
        assert_eq!(onnxruntime(Some(path)), named());
        assert_eq!(operators(Some(path)), named());
    }
}
