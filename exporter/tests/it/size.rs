//! What holds for models of any size: the same bytes each time, weights in the model file, and a comparison layer by layer.

use crate::support::{Run, golden, text};
use std::fs;
use std::path::Path;
use std::process::Output;

fn run(folder: &Path, arguments: &[&str]) -> Output {
    Run::tract().command().current_dir(folder).args(arguments).output().unwrap()
}

/// Exports golden data to `<name>/model.onnx`.
fn export(folder: &Path, case: &str, name: &str, arguments: &[&str]) {
    let (checkpoint, output) = (golden(case), format!("{name}/model.onnx"));
    let done = run(folder, &[&[checkpoint.to_str().unwrap(), "-o", &output], arguments].concat());
    assert!(done.status.success(), "{case} {arguments:?}: {}", text(&done.stderr));
}

#[test]
fn an_export_has_the_same_bytes_each_time() {
    let folder = tempfile::tempdir().unwrap();
    for case in ["llama-moh-tiny", "vit-tiny-b", "dit-tiny-75", "moa-dec-tiny"] {
        for arguments in [&["--no-verify"][..], &["--no-verify", "--dtype", "f16"]] {
            for name in ["a", "b"] {
                export(folder.path(), case, name, &[arguments, &["--force"]].concat());
            }
            for file in ["model.onnx", "model.onnx_data", "config.json"] {
                let of = |name: &str| fs::read(folder.path().join(name).join(file)).unwrap();
                assert!(of("a") == of("b"), "{case} {arguments:?}: {file}");
            }
            fs::remove_dir_all(folder.path().join("a")).unwrap();
            fs::remove_dir_all(folder.path().join("b")).unwrap();
        }
    }
}

/// Verification after the export runs the model that holds its weights itself.
#[test]
fn weights_in_the_model_file() {
    let folder = tempfile::tempdir().unwrap();
    let names = |name: &str| {
        let entries = fs::read_dir(folder.path().join(name)).unwrap();
        let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort_unstable();
        names
    };
    export(folder.path(), "dit-tiny-75", "out", &[]);
    assert_eq!(names("out"), ["README.md", "config.json", "model.onnx", "model.onnx_data"]);
    export(folder.path(), "dit-tiny-75", "out", &["--weights", "inline", "--force"]);
    assert_eq!(names("out"), ["README.md", "config.json", "model.onnx"], "the weights of the model before are gone");
    // By the folder too, as moh-run takes it.
    let verified = run(folder.path(), &["verify", "out", golden("dit-tiny-75").to_str().unwrap()]);
    assert!(verified.status.success(), "{}", text(&verified.stderr));
}

#[test]
fn a_comparison_layer_by_layer() {
    let folder = tempfile::tempdir().unwrap();
    export(folder.path(), "llama-moh-tiny", "out", &["--no-verify"]);
    let checkpoint = golden("llama-moh-tiny");
    let arguments = ["verify", "out/model.onnx", checkpoint.to_str().unwrap(), "--scratch", "."];
    let agrees = run(folder.path(), &arguments);
    assert!(agrees.status.success(), "{}", text(&agrees.stderr));
    let said = text(&agrees.stdout);
    assert!(said.contains("run with tract") && said.ends_with("all 4 layers agree\n"), "{said}");
    for layer in ["model.layers.0 ", "model.layers.2 ", "outputs "] {
        assert!(said.contains(layer), "{said}");
    }

    let data = folder.path().join("out/model.onnx_data");
    let bytes = fs::read(&data).unwrap();
    fs::write(&data, &bytes[..bytes.len() / 2]).unwrap();
    let truncated = run(folder.path(), &arguments);
    let said = text(&truncated.stderr);
    let parts = ["out/model.onnx_data: truncated: tensor \"", &format!("and the file has {}", bytes.len() / 2)];
    assert!(!truncated.status.success() && parts.iter().all(|part| said.contains(part)), "{said}");
    fs::write(&data, &bytes).unwrap();

    // Another checkpoint of the same shapes: its weights disagree everywhere, and the exit status says so.
    let config = checkpoint.join("config.json");
    let random = run(folder.path(), &["random", config.to_str().unwrap(), "-o", "other"]);
    assert!(random.status.success(), "{}", text(&random.stderr));
    let differs = run(folder.path(), &["verify", "out/model.onnx", "other", "--json"]);
    assert_eq!(differs.status.code(), Some(1), "{}", text(&differs.stderr));
    assert!(text(&differs.stderr).contains("out/model.onnx disagrees with other"), "{}", text(&differs.stderr));
    let report: serde_json::Value = serde_json::from_slice(&differs.stdout).unwrap();
    assert_eq!(report["agrees"], false);
    assert_eq!(report["layers"].as_array().unwrap().len(), 4);
    assert!(report["layers"][0]["problem"].as_str().unwrap().contains("expected"), "{report}");
    let mut left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort_unstable();
    assert_eq!(left, ["other", "out"], "copies of layers were left");
}
