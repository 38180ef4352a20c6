//! The examples run, and agree.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use moh::{checkpoint, have_onnxruntime, ops_library};
use std::path::Path;
use std::process::Command;

fn example(name: &str, arguments: &[&Path]) -> String {
    let test = std::env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("examples").join(name);
    let output = Command::new(program)
        .args(arguments)
        // Not the one beside the examples, which may be older than they are.
        .env("MOH_OPS_LIBRARY", ops_library())
        .output()
        .expect("cargo test builds the examples, cargo test --test not");
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn export_and_run() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.onnx");
    let said = example("export", &[&checkpoint("digits-moh-dit"), &model]);
    assert!(said.contains("moh-dit") && said.contains("outputs off by at most"), "{said}");
    let tract = example("run_tract", &[&model]);
    assert!(tract.contains("[1, 2, 16, 16], first value"), "{tract}");
    if have_onnxruntime() {
        assert_eq!(example("run_onnxruntime", &[&model]), tract);
    }
}
