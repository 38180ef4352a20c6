//! Files of several models in one folder: one model's files never replace another's.

use crate::support::{Run, golden, text};
use std::fs;
use std::path::{Path, PathBuf};

fn export(checkpoint: &Path, output: &Path, options: &[&str]) -> (bool, String) {
    let mut command = Run::tract().command();
    let done = command.arg(checkpoint).arg("-o").arg(output).args(["--no-verify"]).args(options).output().unwrap();
    (done.status.success(), text(&done.stdout) + &text(&done.stderr))
}

fn succeeds(checkpoint: &Path, output: &Path, options: &[&str]) {
    let (success, said) = export(checkpoint, output, options);
    assert!(success, "{said}");
}

fn refused(checkpoint: &Path, output: &Path, options: &[&str], parts: &[&str]) {
    let before = contents(output.parent().unwrap());
    let (success, said) = export(checkpoint, output, options);
    assert!(!success, "{said}");
    for part in parts {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
    assert!(contents(output.parent().unwrap()) == before, "files were changed");
}

/// Every file of a folder.
fn contents(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let paths = fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = paths.map(|path| (path.clone(), fs::read(&path).unwrap_or_default())).collect();
    files.sort();
    files
}

#[test]
fn a_second_model_in_the_folder() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join("out").join(name);
    succeeds(&golden("dit-tiny-75"), &at("first.onnx"), &[]);
    for options in [&[][..], &["--force"]] {
        let parts = ["config.json belongs to ", "first.onnx", "choose another folder"];
        refused(&golden("llama-moh-tiny"), &at("second.onnx"), options, &parts);
    }
    // The first one itself may be replaced, and its files with it.
    refused(&golden("llama-moh-tiny"), &at("first.onnx"), &[], &["first.onnx exists already; --force replaces it"]);
    succeeds(&golden("llama-moh-tiny"), &at("first.onnx"), &["--force"]);
    assert!(fs::read_to_string(at("config.json")).unwrap().contains("\"family\": \"moh-llama\""));
    // Models that share their configuration share a folder, until one of them is to have another.
    succeeds(&golden("llama-moh-tiny"), &at("second.onnx"), &["--dtype", "f16"]);
    refused(&golden("dit-tiny-75"), &at("first.onnx"), &["--force"], &["belongs to", "second.onnx"]);
    let mut names: Vec<_> = fs::read_dir(root.path().join("out")).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    let models = ["first.onnx", "first.onnx_data", "genai_config.json", "generation_config.json", "second.onnx"];
    assert_eq!(names, [&["README.md", "config.json"], &models[..], &["second.onnx_data"]].concat());
}

#[test]
fn a_file_of_the_users_own() {
    let root = tempfile::tempdir().unwrap();
    let output = root.path().join("model.onnx");
    fs::write(root.path().join("config.json"), "mine").unwrap();
    let parts = ["config.json exists already and differs from", "choose another folder, or replace it with --force"];
    refused(&golden("dit-tiny-75"), &output, &[], &parts);
    succeeds(&golden("dit-tiny-75"), &output, &["--force"]);
    assert_ne!(fs::read(root.path().join("config.json")).unwrap(), b"mine");
}

/// Exporting into a checkpoint's folder with another configuration would leave the checkpoint with that one.
#[test]
fn a_checkpoints_own_configuration() {
    let root = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(golden("llama-moh-tiny").join(name), root.path().join(name)).unwrap();
    }
    let config = fs::read_to_string(root.path().join("config.json")).unwrap();
    let other = tempfile::NamedTempFile::new().unwrap();
    fs::write(other.path(), config.replacen('{', "{\"moh_routed_fraction\": 0.5,", 1)).unwrap();
    let options = ["--config", other.path().to_str().unwrap(), "--force"];
    refused(root.path(), &root.path().join("model.onnx"), &options, &["belongs to", "model.safetensors"]);
    succeeds(root.path(), &root.path().join("model.onnx"), &["--force"]);
}
