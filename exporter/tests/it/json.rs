//! Reports as JSON.

use crate::support::{Run, golden, text};
use serde_json::Value;
use std::path::Path;

fn json(folder: &Path, arguments: &[&str]) -> Value {
    let done = Run::tract().command().current_dir(folder).args(arguments).output().unwrap();
    assert!(done.status.success(), "{arguments:?}: {}", text(&done.stderr));
    serde_json::from_slice(&done.stdout).unwrap_or_else(|e| panic!("{e}: {}", text(&done.stdout)))
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn an_export() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = golden("dit-tiny-75");
    let report = json(folder.path(), &[checkpoint.to_str().unwrap(), "-o", "out/model.onnx", "--json"]);
    let mut expected = [
        "family",
        "preset",
        "weights_key",
        "layers",
        "active_share",
        "parameters",
        "dtype",
        "notes",
        "macs",
        "tokens",
        "files",
        "verification",
        "reference",
        "target",
        "quantization",
        "seconds",
        "peak_memory",
        "prefix",
        "ignored",
        "defaults",
        "warnings",
    ];
    expected.sort_unstable();
    assert_eq!(keys(&report), expected);
    assert_eq!((&report["family"], &report["dtype"]), (&"moh-dit".into(), &"f32".into()));
    assert!(report["preset"].is_null() && report["reference"].is_null() && report["notes"] == Value::Array(Vec::new()));
    assert!(
        report["seconds"].as_f64().unwrap() > 0.0
            && report["macs"]["dense"].as_u64() > report["macs"]["routed"].as_u64()
    );
    assert_eq!(report["layers"].as_array().unwrap().len(), 4);
    assert_eq!(report["layers"][1]["path"], "blocks.1.attn");
    let files = report["files"].as_array().unwrap();
    assert_eq!(files.len(), 4);
    for file in files {
        let path = folder.path().join(file["path"].as_str().unwrap());
        assert_eq!(file["bytes"].as_u64().unwrap(), std::fs::metadata(path).unwrap().len());
    }
    let agrees = &report["verification"]["agrees"];
    assert_eq!((&agrees["runtime"], &agrees["tolerance"].to_string()), (&"tract".into(), &"0.0002".to_owned()));
    assert!(agrees["error"].as_f64().unwrap() < 2e-4 && agrees["rows"] == 192 && agrees["rerouted"] == 0, "{agrees}");

    let bf16 = ["-o", "bf16/model.onnx", "--json", "--dtype", "bf16"];
    let report = json(folder.path(), &[&[checkpoint.to_str().unwrap()], &bf16[..]].concat());
    assert_eq!(report["verification"]["not_run"], "no CPU runtime here runs bfloat16 models");
    assert!(report["notes"][0].as_str().unwrap().contains("bf16"), "{report}");

    let both = Run::tract().command().args(["x", "-o", "x.onnx", "--json", "--quiet"]).output().unwrap();
    assert!(text(&both.stderr).contains("cannot be used with"), "{}", text(&both.stderr));
}

#[test]
fn heads_of_keys_and_values_in_a_report() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = golden("llama-moh-tiny");
    let report = json(folder.path(), &[checkpoint.to_str().unwrap(), "-o", "model.onnx", "--json", "--no-verify"]);
    let layer = &report["layers"][0];
    assert_eq!((&layer["num_heads"], &layer["kv_num_heads"]), (&8.into(), &2.into()));
}

#[test]
fn a_random_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let config = golden("llama-moh-tiny").join("config.json");
    let written = json(folder.path(), &["random", config.to_str().unwrap(), "-o", "r", "--dtype", "bf16", "--json"]);
    assert_eq!(keys(&written), ["dtype", "files", "parameters", "seed"]);
    let of = |i: usize| written["files"][i]["path"].as_str().unwrap().to_owned();
    assert_eq!([of(0), of(1)], ["r/config.json", "r/model.safetensors"]);
    let weights = written["files"][1]["bytes"].as_u64().unwrap();
    assert!(weights > 2 * written["parameters"].as_u64().unwrap() && written["dtype"] == "bf16", "{written}");
}
