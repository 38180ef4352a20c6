//! Checkpoints as they are published: files of torch.save, several state dicts, no config.json.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[allow(dead_code)]
#[path = "../../../models/src/checkpoint/tests/torch/write.rs"]
mod write;

use moh_models::presets::{NAMES, Preset};
use moh_models::{Checkpoint, Model};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use write::{call, dict, global, int, ints, program, saved, storage, tensor, text};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/dit-tiny-75")
}

/// What moh-export says, and whether it succeeds.
fn run(arguments: &[&str]) -> (bool, String) {
    let done = Command::new(env!("CARGO_BIN_EXE_moh-export")).args(arguments).output().unwrap();
    (done.status.success(), String::from_utf8([done.stdout, done.stderr].concat()).unwrap())
}

fn export(checkpoint: &Path, output: &Path, options: &[&str]) -> (bool, String) {
    let paths = [checkpoint.to_str().unwrap(), "-o", output.to_str().unwrap()];
    run(&[&paths, options].concat())
}

fn exported(checkpoint: &Path, output: &Path, options: &[&str]) -> String {
    let (success, said) = export(checkpoint, output, options);
    assert!(success, "{said}");
    said
}

/// The golden DiT's state dict, its elements times `factor`, in storage `key`; and the storage.
fn state_dict(key: &str, factor: f32) -> (Vec<u8>, Vec<u8>) {
    let checkpoint = Checkpoint::open(&golden(), None).unwrap();
    let weights: Vec<_> = checkpoint.names().map(|name| checkpoint.get(name).unwrap()).collect();
    let total = weights.iter().map(|weight| weight.elements() as i64).sum();
    let (mut pairs, mut data, mut offset) = (Vec::new(), Vec::new(), 0);
    for weight in &weights {
        let shape: Vec<i64> = weight.shape().iter().map(|&n| n as i64).collect();
        let strides: Vec<i64> = (0..shape.len()).map(|axis| shape[axis + 1..].iter().product()).collect();
        pairs.push((weight.name(), tensor(storage("DoubleStorage", key, total), offset, &shape, &strides)));
        data.extend(weight.to_f32().unwrap().iter().flat_map(|&v| f64::from(factor * v).to_le_bytes()));
        offset += weight.elements() as i64;
    }
    (dict(&pairs), data)
}

#[test]
fn what_training_left() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let ((ema, ema_data), (model, model_data)) = (state_dict("0", 1.0), state_dict("1", 0.5));
    let arguments =
        [global("argparse", "Namespace"), write::tuple(&[]), vec![0x81], dict(&[("lr", int(1))]), vec![b'b']];
    let file = dict(&[
        ("model", model),
        ("ema", ema),
        ("opt", dict(&[("state", dict(&[("step", call("numpy", "float64", &[text("x")]))]))])),
        ("args", arguments.concat()),
    ]);
    fs::create_dir(at("run")).unwrap();
    fs::write(at("run/0400000.pt"), saved(file, &[&ema_data, &model_data])).unwrap();
    fs::copy(golden().join("config.json"), at("run/config.json")).unwrap();

    let said = exported(&at("run"), &at("ema/model.onnx"), &[]);
    for part in ["weights key   ema", "f64 weights are written as f32", "outputs off by at most"] {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
    exported(&golden(), &at("golden/model.onnx"), &["--no-verify"]);
    for name in ["model.onnx", "model.onnx_data", "config.json"] {
        assert!(fs::read(at("ema").join(name)).unwrap() == fs::read(at("golden").join(name)).unwrap(), "{name}");
    }

    let said = exported(&at("run"), &at("model/model.onnx"), &["--weights-key", "model", "--no-verify"]);
    assert!(said.contains("weights key   model"), "{said}");
    assert!(fs::read(at("model/model.onnx_data")).unwrap() != fs::read(at("golden/model.onnx_data")).unwrap());

    let (success, said) = export(&at("run"), &at("none/model.onnx"), &["--weights-key", "opt"]);
    assert!(
        !success
            && said.contains("no tensors below the key \"opt\"")
            && said.contains("\"ema\", \"model\"; choose one of them with --weights-key"),
        "{said}"
    );
    assert!(!at("none").exists());
    let said = {
        let (success, said) = run(&["inspect", at("run").to_str().unwrap(), "--weights-key", "model"]);
        assert!(success, "{said}");
        said
    };
    assert!(said.contains("moh-dit"), "{said}");
}

/// A file of torch.save with the preset's tensors, all zeros that take no room on the disk.
pub(crate) fn write_zeros(path: &Path, preset: &Preset) {
    let (_, tensors) = Model::plan(&preset.config().unwrap(), None).unwrap();
    write_zeros_of(path, &tensors);
}

/// The same with these tensors.
pub(crate) fn write_zeros_of(path: &Path, tensors: &[(String, Vec<usize>)]) {
    let total = tensors.iter().map(|(_, shape)| shape.iter().product::<usize>() as i64).sum();
    let (mut pairs, mut offset) = (Vec::new(), 0);
    for (name, shape) in tensors {
        let shape: Vec<i64> = shape.iter().map(|&n| n as i64).collect();
        let strides: Vec<i64> = (0..shape.len()).map(|axis| shape[axis + 1..].iter().product()).collect();
        pairs.push((name.as_str(), tensor(storage("HalfStorage", "0", total), offset, &shape, &strides)));
        offset += shape.iter().product::<i64>();
    }
    let pickle = program(dict(&[("model", dict(&pairs)), ("epoch", ints(&[1, 2]))]));
    let mut zip = write::Zip::wide();
    zip.add("archive/data.pkl", &pickle);
    let mut file = File::create(path).unwrap();
    let header = zip.add_sparse("archive/data/0", 2 * total as u64, zip.length());
    file.write_all(&zip.front()).unwrap();
    file.write_all(&header).unwrap();
    let data = zip.length() + header.len() as u64;
    let end = data + 2 * total as u64;
    file.set_len(end).unwrap();
    let mut file = fs::OpenOptions::new().append(true).open(path).unwrap();
    file.write_all(&zip.tail(end)).unwrap();
}

#[test]
fn without_a_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let preset = Preset::named("moh-dit-s-75").unwrap();
    write_zeros(&at("model.pth"), preset);

    let said = exported(&at("model.pth"), &at("found/model.onnx"), &["--no-verify"]);
    assert!(
        said.contains("preset        moh-dit-s-75") && said.contains("shared      2 (x2), 3 (x8), 6 (x2)"),
        "{said}"
    );
    assert_eq!(fs::read_to_string(at("found/config.json")).unwrap(), preset.config);

    // With the configuration that was written, beside the weights, everything is the same.
    fs::copy(at("found/config.json"), at("config.json")).unwrap();
    let said = exported(&at("model.pth"), &at("again/model.onnx"), &["--no-verify"]);
    assert!(!said.contains("preset"), "{said}");
    assert_eq!(fs::read(at("again/model.onnx")).unwrap(), fs::read(at("found/model.onnx")).unwrap());

    fs::write(at("config.json"), "{}").unwrap();
    let said = exported(&at("model.pth"), &at("named/model.onnx"), &["--no-verify", "--preset", "moh-dit-s-75"]);
    assert!(said.contains("preset        moh-dit-s-75"), "{said}");
    assert_eq!(fs::read_to_string(at("named/config.json")).unwrap(), preset.config);
    let (success, said) = export(&at("model.pth"), &at("model.onnx"), &["--no-verify", "--preset", "moh-dit-s-75"]);
    assert!(!success && said.contains("belongs to"), "{said}");
    assert!(!at("model.onnx").exists());

    let (success, said) = export(&at("model.pth"), &at("other/model.onnx"), &["--preset", "moh-dit-s-90"]);
    assert!(!success && said.contains("\"blocks.0.attn.wg.weight\": expected [3, 384], found [4, 384]"), "{said}");
}

#[test]
fn presets_are_listed() {
    let (_, help) = run(&["--help"]);
    let (success, unknown) = run(&["model.pth", "-o", "model.onnx", "--preset", "moh-vit"]);
    assert!(!success);
    for name in NAMES {
        assert!(help.contains(name) && unknown.contains(name), "{name}");
    }
    let (success, said) = run(&["x", "-o", "x.onnx", "--preset", "moh-dit-s-75", "--config", "config.json"]);
    assert!(!success && said.contains("cannot be used with"), "{said}");
}

#[test]
fn hostile_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.pth");
    let fails = |file: &[u8], part: &str| {
        fs::write(&path, file).unwrap();
        let (success, said) = export(&path, &folder.path().join("out/model.onnx"), &[]);
        assert!(!success && said.starts_with("error: ") && said.contains("model.pth") && said.contains(part), "{said}");
        assert!(!folder.path().join("out").exists());
    };
    let evil = call("os", "system", &[text("exit 1")]);
    fails(&saved(evil, &[]), "an object of os.system");
    fails(&saved(dict(&[("w", tensor(storage("FloatStorage", "0", 2), 1, &[2], &[1]))]), &[&[0; 8]]), "last element");
    fails(b"PK\x03\x04", "directory");
    fails(b"", "an empty file");
}
