//! What `moh_runtime::BUILD` says: the commit, and tract's version.

#[path = "../build/commit.rs"]
mod commit;

use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=../build/commit.rs");
    commit::set();
    println!("cargo:rustc-env=MOH_TRACT_VERSION={}", tract_version().unwrap_or_else(|| "unknown".to_owned()));
}

/// The version that Cargo.lock has, as tract tells none.
fn tract_version() -> Option<String> {
    let lock = Path::new("../Cargo.lock");
    println!("cargo:rerun-if-changed={}", lock.display());
    let lock = std::fs::read_to_string(lock).ok()?;
    let (_, package) = lock.split_once("name = \"tract-onnx\"\nversion = \"")?;
    package.split_once('"').map(|(version, _)| version.to_owned())
}
