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

/// A forward that is written for candle alone, whose tensors have the family's names.
#[test]
fn a_model_of_ones_own() {
    let folder = tempfile::tempdir().unwrap();
    let said = example("own_model", &[folder.path()]);
    assert!(said.contains("outputs off by at most") && said.ends_with("; after 0 comes 1\n"), "{said}");
}

/// A family that no crate of ours knows is trained and exported.
#[test]
fn a_family_of_ones_own() {
    let folder = tempfile::tempdir().unwrap();
    let said = example("own_family", &[folder.path()]);
    assert!(said.contains("outputs off by at most") && said.contains("same heads"), "{said}");
    let right = said.lines().find_map(|line| line.strip_suffix(" of 100 texts are right, in tract"));
    assert!(right.unwrap().parse::<usize>().unwrap() >= 90, "{said}");
}

/// A few steps of a training, exported and run: what it says of numbers that nobody trained it on does not matter here.
#[test]
fn a_training() {
    let folder = tempfile::tempdir().unwrap();
    let said = example("translate_moa", &[folder.path(), Path::new("--steps"), Path::new("3")]);
    assert_eq!(said.matches("outputs off by at most").count(), 2, "{said}");
    assert!(said.contains("numbers are translated right, in tract"), "{said}");
    assert!(folder.path().join("loss.svg").exists() && folder.path().join("step-00000003/config.json").exists());
}

/// Data that are not there are named, with what fetches them.
#[test]
fn a_training_without_data() {
    let folder = tempfile::tempdir().unwrap();
    let test = std::env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("examples/digits_vit");
    let output =
        Command::new(program).arg(folder.path().join("run")).arg("--data").arg(folder.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && said.contains("digits.csv: ") && said.contains("examples/train/fetch.sh"),
        "{said}"
    );
}
