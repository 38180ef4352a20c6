//! Checkpoints as people have them: what moh-export makes of them, and what it says.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(case)
}

/// A folder with a golden checkpoint in `checkpoint`.
fn copy(case: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("checkpoint")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(golden(case).join(name), folder.path().join("checkpoint").join(name)).unwrap();
    }
    folder
}

/// Renames the tensors, and adds some of one number.
fn rewrite(folder: &TempDir, rename: impl Fn(&str) -> String, more: &[&str]) {
    let path = folder.path().join("checkpoint/model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut all: Vec<(String, TensorView<'_>)> = tensors.iter().map(|(name, view)| (rename(name), view)).collect();
    let one = 1f32.to_le_bytes();
    for name in more {
        all.push(((*name).to_owned(), TensorView::new(Dtype::F32, vec![1], &one).unwrap()));
    }
    fs::write(path, safetensors::serialize(all, None).unwrap()).unwrap();
}

fn configure(folder: &TempDir, keys: &str) {
    let path = folder.path().join("checkpoint/config.json");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(path, text.replacen('{', &format!("{{{keys}, "), 1)).unwrap();
}

/// Whether it succeeds, and what it prints to stdout and stderr.
fn run(folder: &TempDir, arguments: &[&str]) -> (bool, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moh-export"));
    let done = command.current_dir(folder.path()).args(arguments).output().unwrap();
    (done.status.success(), String::from_utf8(done.stdout).unwrap(), String::from_utf8(done.stderr).unwrap())
}

fn export(folder: &TempDir, arguments: &[&str]) -> (bool, String, String) {
    run(folder, &[&["checkpoint", "-o", "out/model.onnx", "--no-verify", "--force"], arguments].concat())
}

fn says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

#[test]
fn keys_that_nobody_reads() {
    let folder = copy("llama-moh-tiny");
    let (success, said, warned) = export(&folder, &[]);
    assert!(success && warned.is_empty(), "{warned}");
    says(
        &said,
        &["defaults      head_dim = 8, moh_shared_fraction = 0.5, moh_routed_fraction = 0.25, mlp_bias = false\n"],
    );

    configure(&folder, "\"slidingwindow\": 4, \"hiddenact\": \"silu\"");
    let (success, said, warned) = export(&folder, &[]);
    let warning = "checkpoint/config.json: not read by family moh-llama: \"slidingwindow\"";
    says(&said, &[&format!("warning       {warning}\n")]);
    says(&warned, &[&format!("warning: {warning}\n"), "did you mean \"hidden_act\"?"]);
    assert!(success && warned.lines().count() == 2, "{warned}");
    let (success, said, warned) = export(&folder, &["--quiet"]);
    assert!(success && said.is_empty() && warned.is_empty(), "{said}{warned}");

    configure(&folder, "\"moh_share_fraction\": 0.25");
    fs::remove_dir_all(folder.path().join("out")).unwrap();
    for arguments in [
        &["checkpoint", "-o", "out/model.onnx"][..],
        &["inspect", "checkpoint"],
        &["inspect", "checkpoint/config.json"],
        &["random", "checkpoint/config.json", "-o", "out"],
    ] {
        let (success, _, error) = run(&folder, arguments);
        assert!(!success && !folder.path().join("out").exists(), "{arguments:?}");
        says(
            &error,
            &["config.json", "\"moh_share_fraction\" (did you mean \"moh_shared_fraction\", which is 0.5 by default?)"],
        );
    }
}

#[test]
fn inspect_says_what_was_chosen() {
    let folder = copy("llama-moh-tiny");
    configure(&folder, "\"zork\": 4");
    for path in ["checkpoint", "checkpoint/config.json"] {
        let (success, said, warned) = run(&folder, &["inspect", path]);
        assert!(success);
        says(&said, &["defaults of absent keys: head_dim = 8, moh_shared_fraction = 0.5, "]);
        says(&warned, &["warning: checkpoint/config.json: not read by family moh-llama: \"zork\"\n"]);
        let (_, said, _) = run(&folder, &["inspect", path, "--json"]);
        let json: serde_json::Value = serde_json::from_str(&said).unwrap();
        assert_eq!(json["defaults"][1], serde_json::json!({"key": "moh_shared_fraction", "value": "0.5"}));
        says(json["warnings"][0].as_str().unwrap(), &["zork"]);
    }
}

#[test]
fn wrapped_and_with_other_things_beside() {
    let folder = copy("dit-tiny-75");
    let plain = run(&folder, &["inspect", "checkpoint"]).1;
    rewrite(&folder, |name| format!("model.{name}"), &["criterion.weight"]);
    let (success, said, warned) = export(&folder, &[]);
    assert!(success, "{warned}");
    says(&said, &["name prefix   \"model.\" removed\n", "1 tensors are no part of the model: \"criterion.weight\""]);
    assert_eq!(run(&folder, &["inspect", "checkpoint"]).1, plain, "parameters by layers");
}

#[test]
fn the_files_of_an_export_do_not_depend_on_a_prefix() {
    let folder = copy("vit-tiny-b");
    assert!(export(&folder, &[]).0);
    let files =
        || ["model.onnx", "model.onnx_data"].map(|name| fs::read(folder.path().join("out").join(name)).unwrap());
    let plain = files();
    rewrite(&folder, |name| format!("module.{name}"), &["module.aux_head.weight"]);
    let (success, said, _) = export(&folder, &["--ignore-unexpected", "aux_head.*"]);
    assert!(success && files() == plain);
    says(&said, &["ignored       module.aux_head.weight\n"]);
}

#[test]
fn tensors_that_the_model_does_not_need() {
    let folder = copy("dit-tiny-75");
    rewrite(&folder, str::to_owned, &["aux_head.weight", "aux_head.bias"]);
    let (success, _, error) = export(&folder, &[]);
    assert!(!success);
    says(&error, &["2 unexpected", "\"aux_head.bias\"", "--ignore-unexpected 'aux_head.*'"]);
    for command in [&["inspect", "checkpoint"][..], &["checkpoint", "-o", "out/model.onnx", "--no-verify"]] {
        let (success, _, error) = run(&folder, &[command, &["--ignore-unexpected", "aux_head.*"]].concat());
        assert!(success, "{error}");
    }
    let both = [("student.", "teacher."), ("teacher.", "student.")];
    let folder = copy("dit-tiny-75");
    let path = folder.path().join("checkpoint/model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let all =
        both.iter().flat_map(|(prefix, _)| tensors.iter().map(move |(name, view)| (format!("{prefix}{name}"), view)));
    fs::write(&path, safetensors::serialize(all.collect::<Vec<_>>(), None).unwrap()).unwrap();
    let (success, _, error) = export(&folder, &[]);
    assert!(!success);
    says(&error, &["the whole model is there 2 times", "--ignore-unexpected 'teacher.*'"]);
    assert!(export(&folder, &["--ignore-unexpected", "teacher.*"]).0);
}

#[test]
fn paths_and_families_that_are_wrong() {
    let folder = copy("vit-tiny-b");
    let (_, _, error) = run(&folder, &["nosuchfolder", "-o", "out/model.onnx"]);
    says(&error, &["nosuchfolder: no such file or folder; a checkpoint is a folder with weights", "*.safetensors"]);
    let (_, _, error) = export(&folder, &["--family", "moh-dit"]);
    says(&error, &["config.json: this configuration belongs to moh-vit (it has img_size, ", "--family"]);
    let text = fs::read_to_string(folder.path().join("checkpoint/config.json")).unwrap();
    fs::write(folder.path().join("checkpoint/config.json"), text.replace("\"family\": \"moh-vit\",", "")).unwrap();
    let (_, _, error) = export(&folder, &[]);
    says(
        &error,
        &["the key \"family\" is missing", "moh-dit, dit, moh-llama", "its keys fit moh-vit; choose it with --family"],
    );
}

/// The routers' tensors are merged, which the error does not show.
#[test]
fn infinite_weights() {
    for (case, name) in [
        ("dit-tiny-75", "blocks.1.attn.wg_1.weight"),
        ("vit-tiny-b", "block1.0.attn.wg_0.weight"),
        ("vit-tiny-b", "block4.0.attn.qkv.weight"),
    ] {
        let folder = copy(case);
        let path = folder.path().join("checkpoint/model.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let view = tensors.tensor(name).unwrap();
        let (at, last) = (view.data().as_ptr().addr() - bytes.as_ptr().addr(), view.data().len() - 4);
        bytes[at + last..at + last + 4].copy_from_slice(&f32::INFINITY.to_le_bytes());
        fs::write(&path, bytes).unwrap();
        let (success, _, error) = export(&folder, &[]);
        let expected = format!("checkpoint/model.safetensors: tensor {name:?}: element {} is inf", last / 4);
        assert!(!success && error.starts_with(&format!("error: {expected}")), "{expected:?}: {error}");
    }
}

/// Pickled arrays are a checkpoint like any other.
#[test]
fn several_state_dicts_and_arrays() {
    let folder = copy("dit-tiny-75");
    let bytes = fs::read(folder.path().join("checkpoint/model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    assert!(export(&folder, &[]).0);
    let plain = fs::read(folder.path().join("out/model.onnx_data")).unwrap();
    let mut state = b"}".to_vec();
    for (name, view) in tensors.iter() {
        let text = |text: &str| [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
        let shape: Vec<u8> =
            view.shape().iter().flat_map(|&n| [b"J", &(n as i32).to_le_bytes()[..]].concat()).collect();
        state.extend(text(name));
        state.extend(b"cnumpy.core.multiarray\n_reconstruct\n(tR(K\x01(");
        state.extend([&shape[..], b"tcnumpy\ndtype\n(", &text("f4"), b"tR(K\x03", &text("<"), b"tb\x89B"].concat());
        state.extend((view.data().len() as u32).to_le_bytes());
        state.extend([view.data(), b"tbs"].concat());
    }
    let text = |text: &str| [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
    let file = [b"\x80\x03}", &text("model")[..], &state, b"s", &text("model_ema"), &state, b"s."].concat();
    fs::remove_file(folder.path().join("checkpoint/model.safetensors")).unwrap();
    fs::write(folder.path().join("checkpoint/model.pkl"), file).unwrap();
    let (success, said, warned) = export(&folder, &[]);
    assert!(success, "{warned}");
    let warning = "the weights are those of \"model\"; the file also has \"model_ema\"";
    says(&warned, &[warning, "choose with --weights-key"]);
    says(&said, &["weights key   model\n", warning]);
    assert_eq!(fs::read(folder.path().join("out/model.onnx_data")).unwrap(), plain);
    assert!(export(&folder, &["--weights-key", "model_ema"]).0);
}

#[test]
fn adapters() {
    let folder = copy("llama-moh-tiny");
    rewrite(&folder, |name| name.replace("q_proj.", "q_proj.lora_A."), &[]);
    let (success, _, error) = export(&folder, &[]);
    assert!(!success);
    says(&error, &["model.safetensors: these are adapter weights", "merge_and_unload()"]);
}
