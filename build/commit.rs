//! For build scripts (`#[path]`): the commit that a crate is built from.

use std::path::Path;
use std::process::Command;

/// Gives the crate `env!("MOH_COMMIT")`: the first 12 digits of the commit that is checked out; or what the variable `MOH_COMMIT`
/// says; `unknown` without git or outside of a repository, as in a tarball.
///
/// The crate is compiled again after each commit. With `MOH_COMMIT` set it is not: git is not asked.
pub(crate) fn set() {
    println!("cargo:rerun-if-env-changed=MOH_COMMIT");
    let given = std::env::var("MOH_COMMIT").ok().filter(|commit| !commit.is_empty());
    println!("cargo:rustc-env=MOH_COMMIT={}", given.or_else(ask).unwrap_or_else(|| "unknown".to_owned()));
}

fn ask() -> Option<String> {
    // Another project's repository may be around an unpacked tarball of this one.
    let root = git(&["rev-parse", "--show-toplevel"])?;
    if !Path::new(&root).join("custom-ops/operators/Cargo.toml").is_file() {
        return None;
    }
    // HEAD changes with the branch, its log with each commit. A file that is not there would run the script in every build.
    for file in ["HEAD", "logs/HEAD"] {
        let path = git(&["rev-parse", "--git-path", file])?;
        if Path::new(&path).is_file() {
            println!("cargo:rerun-if-changed={path}");
        }
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    String::from_utf8(output.stdout).ok().map(|text| text.trim().to_owned())
}
