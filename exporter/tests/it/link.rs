//! Models whose weights stay in the checkpoint's files.

use crate::support::{Run, golden, text};
use moh_runtime::{Digest, Model, Options, RuntimeChoice};
use safetensors::SafeTensors;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Output;
use tempfile::TempDir;

const LINK: &str = "model.onnx_data-00001-of-00001.safetensors";

/// A folder with a copy of golden data in `checkpoint`.
fn folder(case: &str) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("checkpoint")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(golden(case).join(name), root.path().join("checkpoint").join(name)).unwrap();
    }
    root
}

fn run(run: &Run, folder: &Path, arguments: &[&str]) -> Output {
    run.command().current_dir(folder).args(arguments).output().unwrap()
}

/// Exports with links; returns what was said.
fn link(runtime: &Run, folder: &Path, options: &[&str]) -> String {
    let arguments = ["checkpoint", "-o", "out/model.onnx", "--weights", "link"];
    let done = run(runtime, folder, &[&arguments[..], options].concat());
    assert!(done.status.success(), "{options:?}: {}", text(&done.stderr));
    text(&done.stdout)
}

fn refused(folder: &Path, arguments: &[&str], parts: &[&str]) {
    let done = run(&Run::tract(), folder, arguments);
    let said = text(&done.stderr);
    assert!(!done.status.success() && said.lines().count() == 1, "{said}");
    for part in parts {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    names
}

fn inode(path: PathBuf) -> (u64, u64) {
    let metadata = fs::symlink_metadata(path).unwrap();
    (metadata.dev(), metadata.ino())
}

/// Puts a space into the header of a safetensors file, which moves all tensors by a byte.
fn misalign(path: &Path) {
    let bytes = fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let (header, data) = bytes[8..].split_at(length);
    let length = ((length + 1) as u64).to_le_bytes();
    fs::write(path, [&length[..], header, b" ", data].concat()).unwrap();
}

/// Verification after the export runs the model, and compares it with our own implementation.
#[test]
fn the_checkpoints_own_file_is_used() {
    for runtime in Run::all() {
        for case in ["llama-moh-tiny", "vit-tiny-b", "dit-tiny-75", "moa-dec-tiny"] {
            for misaligned in [false, true] {
                let root = folder(case);
                let weights = root.path().join("checkpoint/model.safetensors");
                if misaligned {
                    misalign(&weights);
                }
                let said = link(&runtime, root.path(), &[]);
                assert!(said.contains(&format!("verified      run with {}", runtime.name)), "{case}: {said}");
                assert!(said.contains("the weights stay in a file of the checkpoint"), "{case}: {said}");
                assert_eq!(inode(root.path().join("out").join(LINK)), inode(weights), "{case}");
                let copied = fs::metadata(root.path().join("out/model.onnx_data")).map_or(0, |data| data.len());
                let linked = fs::metadata(root.path().join("out").join(LINK)).unwrap().len();
                assert!(copied < linked / 2, "{case}: {copied} of {linked} bytes were copied");
            }
        }
    }
}

#[test]
fn the_same_export_again() {
    let root = folder("llama-moh-tiny");
    link(&Run::tract(), root.path(), &["--no-verify"]);
    let read = || fs::read(root.path().join("out/model.onnx")).unwrap();
    let (first, before) = (read(), names(&root.path().join("out")));
    assert!(before.iter().any(|name| name == LINK), "{before:?}");
    refused(root.path(), &["checkpoint", "-o", "out/model.onnx", "--weights", "link"], &["model.onnx exists already"]);
    link(&Run::tract(), root.path(), &["--no-verify", "--force"]);
    assert!(read() == first);
    assert_eq!(names(&root.path().join("out")), before);
    // The links of a model that is replaced go with it.
    let copy = ["checkpoint", "-o", "out/model.onnx", "--no-verify", "--force"];
    assert!(run(&Run::tract(), root.path(), &copy).status.success());
    assert!(!root.path().join("out").join(LINK).exists());
    assert!(root.path().join("checkpoint/model.safetensors").exists());

    // Unless one of them is what is exported: it may be all that is left of the checkpoint.
    link(&Run::tract(), root.path(), &["--no-verify", "--force"]);
    fs::remove_dir_all(root.path().join("checkpoint")).unwrap();
    let own = format!("out/{LINK}");
    let again = [&own, "-o", "out/model.onnx", "--no-verify", "--force"];
    let done = run(&Run::tract(), root.path(), &again);
    assert!(done.status.success(), "{}", text(&done.stderr));
    assert!(root.path().join(&own).exists() && root.path().join("out/model.onnx_data").exists());
    let done = run(&Run::tract(), root.path(), &[&again[..], &["--weights", "link"]].concat());
    assert!(done.status.success() && root.path().join(&own).exists(), "{}", text(&done.stderr));
}

/// Two files, behind the symbolic links of a snapshot of Hugging Face's hub.
#[test]
fn shards_behind_symbolic_links() {
    let root = folder("llama-moh-tiny");
    let (blobs, snapshot) = (root.path().join("blobs"), root.path().join("checkpoint"));
    fs::create_dir(&blobs).unwrap();
    let bytes = fs::read(snapshot.join("model.safetensors")).unwrap();
    fs::remove_file(snapshot.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let (mut all, mut map) = (tensors.tensors(), serde_json::Map::new());
    all.sort_by(|a, b| a.0.cmp(&b.0));
    let rest = all.split_off(all.len() / 2);
    for (i, part) in [all, rest].into_iter().enumerate() {
        let name = format!("model-0000{}-of-00002.safetensors", i + 1);
        map.extend(part.iter().map(|(tensor, _)| (tensor.clone(), name.clone().into())));
        fs::write(blobs.join(format!("{i}")), safetensors::serialize(part, None).unwrap()).unwrap();
        symlink(format!("../blobs/{i}"), snapshot.join(&name)).unwrap();
    }
    let index = serde_json::json!({ "weight_map": map });
    fs::write(snapshot.join("model.safetensors.index.json"), index.to_string()).unwrap();
    link(&Run::tract(), root.path(), &[]);
    for i in 0..2 {
        let link = format!("out/model.onnx_data-0000{}-of-00002.safetensors", i + 1);
        assert_eq!(inode(root.path().join(link)), inode(blobs.join(format!("{i}"))));
    }
    let verified = run(&Run::tract(), root.path(), &["verify", "out/model.onnx", "checkpoint"]);
    assert!(verified.status.success(), "{}", text(&verified.stderr));

    // A shard in the middle of which something is missing is found before anything is written.
    let first = fs::OpenOptions::new().write(true).open(blobs.join("0")).unwrap();
    first.set_len(first.metadata().unwrap().len() - 100).unwrap();
    for weights in ["copy", "link"] {
        let arguments = ["checkpoint", "-o", "new/model.onnx", "--weights", weights];
        refused(root.path(), &arguments, &["model-00001-of-00002.safetensors", "truncated"]);
        assert!(!root.path().join("new").exists());
    }
}

#[test]
fn a_file_that_changes_later() {
    let root = folder("llama-moh-tiny");
    link(&Run::tract(), root.path(), &["--no-verify", "--check"]);
    let (model, link) = (root.path().join("out/model.onnx"), root.path().join("out").join(LINK));
    let bytes = fs::read(&link).unwrap();
    let check = || run(&Run::tract(), root.path(), &["verify", "out/model.onnx", "--check"]);
    assert_eq!(text(&check().stdout), format!("{LINK}: header and contents are as they were\n"));

    let loaded = |expected: &str| {
        for runtime in [RuntimeChoice::Tract, RuntimeChoice::Ort] {
            if runtime == RuntimeChoice::Ort && std::env::var_os("ORT_DYLIB_PATH").is_none() {
                eprintln!("SKIPPED onnxruntime: ORT_DYLIB_PATH is not set");
                continue;
            }
            let error = Model::load(&model, &Options { runtime, ..Options::default() }).err().map(|e| e.to_string());
            match expected {
                "" => assert_eq!(error, None),
                _ => assert!(error.as_ref().is_some_and(|e| e.contains(expected) && e.contains(LINK)), "{error:?}"),
            }
        }
        let arguments = ["verify", "out/model.onnx", "checkpoint"];
        if !expected.is_empty() {
            refused(root.path(), &arguments, &[expected, LINK]);
        }
    };
    loaded("");
    // Another file in its place, with a byte of a tensor changed: nobody reads all of it at every load.
    let put = |bytes: &[u8]| {
        fs::remove_file(&link).unwrap();
        fs::write(&link, bytes).unwrap();
    };
    let mut changed = bytes.clone();
    *changed.last_mut().unwrap() ^= 1;
    put(&changed);
    loaded("");
    assert!(text(&check().stderr).contains("its bytes have changed: expected SHA-256"), "{}", text(&check().stderr));
    let renamed = String::from_utf8_lossy(&bytes[..64]).find("lm_head").map(|at| (at, b'x'));
    let (at, byte) = renamed.unwrap_or((20, b'x'));
    changed = bytes.clone();
    changed[at] = byte;
    put(&changed);
    loaded("its header is another one");
    put(&bytes[..bytes.len() - 4]);
    loaded("expected ");
    fs::remove_file(&link).unwrap();
    loaded("it is missing");
}

#[test]
fn a_file_with_the_name_of_a_link_stays() {
    let root = folder("llama-moh-tiny");
    fs::create_dir(root.path().join("out")).unwrap();
    fs::write(root.path().join("out").join(LINK), "mine").unwrap();
    let arguments = ["checkpoint", "-o", "out/model.onnx", "--weights", "link"];
    refused(root.path(), &arguments, &[LINK, "exists", "--force"]);
    assert_eq!(fs::read(root.path().join("out").join(LINK)).unwrap(), b"mine");
    assert_eq!(names(&root.path().join("out")), [LINK]);
    link(&Run::tract(), root.path(), &["--force"]);
    assert_ne!(fs::read(root.path().join("out").join(LINK)).unwrap(), b"mine");
}

#[test]
fn digests_of_what_was_written() {
    let root = folder("llama-moh-tiny");
    for (options, output) in [(&["--check"][..], "link"), (&[], "unread"), (&["--weights", "copy"], "copy")] {
        let target = format!("{output}/model.onnx");
        let arguments = ["checkpoint", "-o", &target, "--no-verify", "--json"];
        let links = if output == "copy" { &[][..] } else { &["--weights", "link"] };
        let done = run(&Run::tract(), root.path(), &[&arguments[..], links, options].concat());
        let report: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
        for file in report["files"].as_array().unwrap() {
            let path = file["path"].as_str().unwrap();
            let (digest, length) = Digest::of_file(&root.path().join(path), &mut |_| ()).unwrap();
            assert_eq!(file["bytes"], length, "{path}");
            match path.ends_with(".safetensors") && output == "unread" {
                true => assert!(file["sha256"].is_null(), "{path} was read"),
                false => assert_eq!(file["sha256"], digest.as_str(), "{path}"),
            }
        }
    }
}

#[test]
fn weights_that_cannot_be_used_as_they_are() {
    let root = folder("llama-moh-tiny");
    let at = |name: &str| root.path().join(name);
    let mut config: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(at("checkpoint/config.json")).unwrap()).unwrap();
    config["vocab_size"] = 20_000.into();
    fs::write(at("wide.json"), config.to_string()).unwrap();
    assert!(run(&Run::tract(), root.path(), &["random", "wide.json", "-o", "wide"]).status.success());
    let arguments = ["wide", "-o", "out/model.onnx", "--weights", "link", "--no-verify"];
    let with = |options: &[&'static str]| [&arguments[..], options].concat();
    let parts = ["model.safetensors: tensor", "is F32, and the model is to be f16", "--dtype"];
    refused(root.path(), &with(&["--dtype", "f16"]), &parts);

    // The largest tensor is one that stays in the file; small ones go into the model, and are looked at there.
    let mut spoiled = fs::read(at("wide/model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&spoiled).unwrap();
    let largest = tensors.iter().map(|(_, tensor)| tensor.data()).max_by_key(|data| data.len()).unwrap();
    let first = largest.as_ptr().addr() - spoiled.as_ptr().addr();
    spoiled[first..first + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(at("wide/model.safetensors"), &spoiled).unwrap();
    refused(root.path(), &with(&["--check"]), &["model.safetensors", "NaN"]);
    assert!(!at("out").exists());

    // Memory and disk are two file systems.
    let Ok(elsewhere) = tempfile::tempdir_in("/dev/shm") else { return eprintln!("SKIPPED: no /dev/shm") };
    if inode(elsewhere.path().to_owned()).0 == inode(root.path().to_owned()).0 {
        return eprintln!("SKIPPED: /dev/shm is the file system of temporary files");
    }
    let output = elsewhere.path().join("out/model.onnx");
    let parts = ["cannot become a hard link to", "wide/model.safetensors", LINK, "on one file system"];
    refused(root.path(), &["wide", "-o", output.to_str().unwrap(), "--weights", "link", "--no-verify"], &parts);
    assert_eq!(names(elsewhere.path()), Vec::<String>::new());
}
