//! What moh-export says of checkpoints and outputs that it can't use: one clear message, a non-zero exit, no file left.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A copy of the golden LLaMA that a test may spoil, and a folder for the output.
struct Case {
    root: TempDir,
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/llama-moh-tiny")
}

impl Case {
    fn new() -> Case {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("checkpoint")).unwrap();
        for name in ["config.json", "model.safetensors"] {
            fs::copy(golden().join(name), root.path().join("checkpoint").join(name)).unwrap();
        }
        Case { root }
    }

    fn folder(&self) -> PathBuf {
        self.root.path().join("checkpoint")
    }

    fn weights(&self) -> PathBuf {
        self.folder().join("model.safetensors")
    }

    fn configure(self, change: impl FnOnce(&mut Value)) -> Case {
        let path = self.folder().join("config.json");
        let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        change(&mut config);
        fs::write(path, config.to_string()).unwrap();
        self
    }

    /// Rewrites the header of the weights, the data staying as it is.
    fn header(self, change: impl FnOnce(&mut Value)) -> Case {
        let bytes = fs::read(self.weights()).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        change(&mut header);
        let text = header.to_string();
        let mut spoiled = (text.len() as u64).to_le_bytes().to_vec();
        spoiled.extend(text.as_bytes());
        spoiled.extend(&bytes[8 + length..]);
        fs::write(self.weights(), spoiled).unwrap();
        self
    }

    fn bytes(self, change: impl FnOnce(&mut Vec<u8>)) -> Case {
        let mut bytes = fs::read(self.weights()).unwrap();
        change(&mut bytes);
        fs::write(self.weights(), bytes).unwrap();
        self
    }

    /// Puts an index in the place of the single file.
    fn index(self, shard: &str, rename: bool) -> Case {
        let names = ["lm_head.weight", "model.norm.weight"];
        let map: serde_json::Map<String, Value> = names.iter().map(|name| ((*name).to_owned(), json!(shard))).collect();
        let index = json!({"metadata": {}, "weight_map": map});
        fs::write(self.folder().join("model.safetensors.index.json"), index.to_string()).unwrap();
        if rename {
            fs::rename(self.weights(), self.folder().join("other.safetensors")).unwrap();
        } else {
            fs::rename(self.weights(), self.root.path().join("outside.safetensors")).unwrap();
        }
        self
    }

    fn run(&self, arguments: &[&str]) -> (bool, String) {
        let output = self.root.path().join("out/nested/model.onnx");
        let done = Command::new(env!("CARGO_BIN_EXE_moh-export"))
            .arg(self.folder())
            .arg("-o")
            .arg(output)
            .args(arguments)
            .output()
            .unwrap();
        (done.status.success(), String::from_utf8(done.stderr).unwrap())
    }

    /// The export fails, says all of `parts` in one message, and leaves nothing.
    fn fails(&self, arguments: &[&str], parts: &[&str]) {
        let (success, message) = self.run(arguments);
        assert!(!success, "no failure; expected {parts:?}");
        assert!(
            message.starts_with("error: ") && message.lines().count() < 8 && !message.contains("panicked"),
            "{message}"
        );
        for part in parts {
            assert!(message.contains(part), "{part:?} is not in: {message}");
        }
        assert!(!self.root.path().join("out").exists(), "files were left: {message}");
    }
}

#[test]
fn the_unspoiled_copy_exports() {
    let case = Case::new();
    let (success, message) = case.run(&["--no-verify"]);
    assert!(success, "{message}");
    assert!(case.root.path().join("out/nested/model.onnx").is_file());
}

#[test]
fn truncated() {
    Case::new().bytes(|b| b.truncate(b.len() - 1000)).fails(&[], &["model.safetensors", "truncated"]);
    Case::new().bytes(|b| b.truncate(5)).fails(&[], &["model.safetensors", "5 bytes"]);
}

#[test]
fn header_longer_than_the_file() {
    let lie = |b: &mut Vec<u8>| b[..8].copy_from_slice(&(1u64 << 40).to_le_bytes());
    Case::new().bytes(lie).fails(&[], &["model.safetensors", "1099511627776"]);
}

#[test]
fn overlapping_tensors() {
    let overlap = |h: &mut Value| {
        let offsets = h["model.layers.0.self_attn.q_proj.weight"]["data_offsets"].clone();
        h["model.layers.0.self_attn.o_proj.weight"]["data_offsets"] = offsets;
    };
    Case::new().header(overlap).fails(&[], &["model.safetensors", "overlap", "q_proj", "o_proj"]);
}

#[test]
fn missing_tensors_are_all_listed() {
    let drop_two = |h: &mut Value| {
        let header = h.as_object_mut().unwrap();
        for name in ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"] {
            let entry = header.remove(name).unwrap();
            header.insert(format!("renamed.{name}"), entry);
        }
    };
    let parts = ["model.safetensors", "\"model.norm.weight\"", "\"model.layers.1.mlp.up_proj.weight\"", "renamed."];
    Case::new().header(drop_two).fails(&[], &parts);
}

#[test]
fn wrong_shape() {
    let reshape = |h: &mut Value| h["model.layers.0.self_attn.q_proj.weight"]["shape"] = json!([32, 128]);
    let parts = ["model.safetensors", "model.layers.0.self_attn.q_proj.weight", "[64, 64]", "[32, 128]"];
    Case::new().header(reshape).fails(&[], &parts);
}

#[test]
fn families() {
    Case::new().fails(&["--family", "gpt"], &["--family", "gpt", "moh-dit", "moh-llama"]);
    let unnamed = Case::new().configure(|c| drop(c.as_object_mut().unwrap().remove("family")));
    unnamed.fails(&[], &["config.json", "moh-llama, moh-llm, gqe-llama, switchhead, llama", "--family"]);
    let (success, message) = unnamed.run(&["--family", "moh-llama", "--no-verify"]);
    assert!(success, "{message}");
}

#[test]
fn heads_that_do_not_divide() {
    let parts = ["config.json", "num_key_value_heads", "divisor", "3"];
    Case::new().configure(|c| c["num_key_value_heads"] = json!(3)).fails(&[], &parts);
    let parts = ["config.json", "num_attention_heads", "hidden_size = 64", "7"];
    let seven = |c: &mut Value| {
        c["num_attention_heads"] = json!(7);
        c["num_key_value_heads"] = json!(7);
    };
    Case::new().configure(seven).fails(&[], &parts);
    Case::new().configure(|c| c["num_attention_heads"] = json!(0)).fails(&[], &["config.json", "num_attention_heads"]);
    Case::new().configure(|c| c["hidden_size"] = json!(1u64 << 62)).fails(&[], &["config.json", "hidden_size"]);
    Case::new().configure(|c| c["hidden_size"] = json!("wide")).fails(&[], &["config.json", "hidden_size", "wide"]);
}

#[test]
fn shards() {
    Case::new().index("model-00001-of-00001.safetensors", true).fails(&[], &["index.json", "model-00001", "not exist"]);
    Case::new().index("../outside.safetensors", false).fails(&[], &["index.json", "../outside.safetensors"]);
    Case::new().index("/etc/hostname", true).fails(&[], &["index.json", "/etc/hostname"]);
}

#[test]
fn non_finite_weights() {
    for (value, shown) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let spoil = |b: &mut Vec<u8>| {
            let at = b.len() - 4;
            b[at..].copy_from_slice(&value.to_le_bytes());
        };
        Case::new().bytes(spoil).fails(&["--no-verify"], &["model.safetensors", "element", shown]);
    }
    let large = |b: &mut Vec<u8>| {
        let at = b.len() - 4;
        b[at..].copy_from_slice(&70_000f32.to_le_bytes());
    };
    Case::new()
        .bytes(large)
        .fails(&["--dtype", "f16", "--no-verify"], &["model.safetensors", "70000", "f16", "--dtype f32"]);
}

#[test]
fn no_checkpoint() {
    let case = Case::new();
    fs::remove_file(case.folder().join("config.json")).unwrap();
    case.fails(&[], &["config.json"]);
    let case = Case::new();
    fs::remove_file(case.weights()).unwrap();
    case.fails(&[], &["checkpoint", "model.safetensors"]);
    Case::new().configure(|c| *c = json!([1])).fails(&[], &["config.json"]);
}

#[test]
fn outputs_that_can_not_be_written() {
    let case = Case::new();
    let run = |output: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_moh-export"));
        let done = command.arg(case.folder()).arg("-o").arg(output).arg("--no-verify").output().unwrap();
        (done.status.success(), String::from_utf8(done.stderr).unwrap())
    };
    // A file where a folder is needed fails for every user, root included.
    let (success, message) = run(&case.weights().join("folder/model.onnx"));
    assert!(!success && message.contains("model.safetensors"), "{message}");
    let (success, message) = run(&case.root.path().join("model.bin"));
    assert!(!success && message.contains(".onnx"), "{message}");
    let output = case.root.path().join("model.onnx");
    fs::write(&output, "precious").unwrap();
    let (success, message) = run(&output);
    assert!(!success && message.contains("--force"), "{message}");
    assert_eq!(fs::read_to_string(&output).unwrap(), "precious");
    let mut names: Vec<_> = fs::read_dir(case.root.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["checkpoint", "model.onnx"]);
}

#[test]
fn versions_out_of_range() {
    Case::new().fails(&["--opset", "12"], &["--opset", "20 to 24", "12"]);
    Case::new().fails(&["--ir-version", "3"], &["--ir-version", "3"]);
}

/// A limit on the size of files stands in for a full disk: writing fails halfway in the same manner.
#[cfg(unix)]
#[test]
fn no_room_for_the_output() {
    let case = Case::new();
    let limited = |arguments: &[&str]| {
        let output = Command::new("sh")
            // Blocks of 512 bytes; without a handler the signal of the limit would end the program.
            .args(["-c", "trap '' XFSZ; ulimit -f 40; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_moh-export")])
            .args(arguments)
            .current_dir(case.root.path())
            .output()
            .unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    for arguments in [&["checkpoint", "-o", "out/model.onnx"][..], &["random", "moh-dit-s-75", "-o", "out/random"]] {
        let (success, message) = limited(arguments);
        assert!(!success && message.starts_with("error: ") && message.lines().count() == 1, "{message}");
        assert_eq!(message.matches("os error").count(), 1, "the reason once: {message}");
        assert!(!case.root.path().join("out").exists(), "files were left: {message}");
    }
}
