#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod adapter;
mod config;
mod container;
mod loader;
mod shards;
mod torch;
mod weight;

use std::path::PathBuf;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;

/// A folder with files made by a test.
struct Folder(TempDir);

impl Folder {
    /// Holds an empty `config.json`.
    fn new() -> Folder {
        let folder = Folder(tempfile::tempdir().unwrap());
        folder.write("config.json", b"{}");
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        path
    }

    fn write_json(&self, name: &str, value: &Value) -> PathBuf {
        self.write(name, value.to_string().as_bytes())
    }

    fn open(&self) -> Result<Checkpoint, Error> {
        Checkpoint::open(self.0.path(), None)
    }

    /// Opens the folder, which must fail with a text that holds all of `parts`.
    fn refused(&self, parts: &[&str]) -> Error {
        let error = self.open().expect_err("the checkpoint should be refused");
        assert_says(&error, parts);
        error
    }
}

fn assert_says(error: &Error, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

/// All elements as they are stored.
fn bytes_of(weight: &Weight) -> Vec<u8> {
    let mut bytes = vec![7];
    weight.read(0..weight.elements(), &mut bytes).unwrap();
    bytes
}

/// A safetensors file with that header, whatever it says.
fn raw(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header, data].concat()
}

fn raw_json(header: &Value, data: &[u8]) -> Vec<u8> {
    raw(header.to_string().as_bytes(), data)
}

/// A well-formed file of F32 tensors: names, shapes, and the value of all their elements.
fn file_of(tensors: &[(&str, &[usize], f32)]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, shape, value) in tensors {
        let begin = data.len();
        let elements = shape.iter().product();
        data.extend(std::iter::repeat_n(value.to_le_bytes(), elements).flatten());
        let entry = json!({ "dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()] });
        header.insert((*name).to_owned(), entry);
    }
    raw_json(&Value::Object(header), &data)
}

#[test]
fn a_folder_holds_config_and_weights() {
    let folder = Folder::new();
    folder.write_json("config.json", &json!({ "depth": 3 }));
    let file = folder.write("model.safetensors", &file_of(&[("b", &[2, 3], 2.0), ("a", &[], 1.0)]));
    for path in [folder.0.path(), file.as_path()] {
        let checkpoint = Checkpoint::open(path, None).unwrap();
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(checkpoint.config().usize("depth").unwrap(), 3);
        assert_eq!(checkpoint.files().collect::<Vec<_>>(), [&file]);
        assert_eq!(checkpoint.path(), file);
        assert_eq!(checkpoint.folder(), folder.0.path());
        assert_eq!(checkpoint.get("a").unwrap().shape(), [0usize; 0]);
        assert_eq!(checkpoint.get("b").unwrap().to_f32().unwrap(), [2.0; 6]);
        assert!(checkpoint.get("c").is_none());
    }
}

#[test]
fn another_configuration_may_be_given() {
    let folder = Folder::new();
    std::fs::remove_file(folder.path("config.json")).unwrap();
    folder.write("model.safetensors", &file_of(&[("a", &[1], 1.0)]));
    let config = folder.write_json("other/my.json", &json!({ "depth": 4 }));
    let checkpoint = Checkpoint::open(folder.0.path(), Some(&config)).unwrap();
    assert_eq!(checkpoint.config().usize("depth").unwrap(), 4);
    assert_eq!(checkpoint.config().path(), config);
    folder.refused(&["config.json", "No such file"]);
}

#[test]
fn a_symlink_is_followed_but_the_configuration_is_beside_it() {
    let folder = Folder::new();
    folder.write("blobs/0123", &file_of(&[("a", &[1], 5.0)]));
    folder.write_json("snapshot/config.json", &json!({ "depth": 5 }));
    std::os::unix::fs::symlink("../blobs/0123", folder.path("snapshot/model.safetensors")).unwrap();
    let checkpoint = Checkpoint::open(&folder.path("snapshot"), None).unwrap();
    assert_eq!(checkpoint.config().usize("depth").unwrap(), 5);
    assert_eq!(checkpoint.get("a").unwrap().to_f32().unwrap(), [5.0]);
    assert_eq!(checkpoint.folder(), folder.path("snapshot"));
}

#[test]
fn paths_that_hold_no_checkpoint() {
    let folder = Folder::new();
    let error = folder.refused(&["model.safetensors, model.safetensors.index.json"]);
    assert!(matches!(error, Error::NoWeights { .. }));

    std::fs::create_dir(folder.path("x.safetensors")).unwrap();
    let error = Checkpoint::open(&folder.path("x.safetensors"), None).unwrap_err();
    assert!(matches!(error, Error::NoWeights { .. }));

    std::fs::create_dir(folder.path("model.safetensors")).unwrap();
    let error = folder.refused(&["model.safetensors: not a file"]);
    assert!(matches!(error, Error::NotAFile { .. }));

    let error = Checkpoint::open(&folder.path("nothing.safetensors"), None).unwrap_err();
    assert!(matches!(error, Error::NoCheckpoint { .. }));
    assert_says(
        &error,
        &["nothing.safetensors: no such file or folder", "a folder with weights", "*.safetensors, *.pth"],
    );

    let error = Checkpoint::open(&folder.write("model.h5", b"PK"), None).unwrap_err();
    assert!(matches!(error, Error::UnknownFormat { .. }));
    assert_says(&error, &["model.h5", "*.safetensors, *.pth"]);
}
