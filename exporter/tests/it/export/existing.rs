//! What is there already is replaced with `force` only, and the checkpoint never.

use super::support::{Case, FILES, unverified};
use moh_export::{Error, Options};
use std::fs;

#[test]
fn one_of_the_two_files_is_there() {
    for name in ["model.onnx", "model.onnx_data"] {
        let case = Case::new("llama-moh-tiny");
        case.place(name, "precious");
        let path = case.folder().join(name);
        match case.export(&unverified()) {
            Err(Error::Exists { path: found }) => assert_eq!(found, path),
            other => panic!("{name} was there: {other:?}"),
        }
        assert_eq!(case.left(), [name]);
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");

        case.export(&Options { force: true, ..unverified() }).unwrap();
        assert_eq!(case.left(), FILES);
        assert_ne!(fs::read(&path).unwrap(), b"precious");
    }
}

/// Download caches keep checkpoints as links to files of any name.
#[cfg(unix)]
#[test]
fn the_checkpoint_is_not_replaced() {
    for name in ["model.onnx", "model.onnx_data"] {
        for force in [false, true] {
            let case = Case::new("llama-moh-tiny");
            let before = fs::read(case.weights()).unwrap();
            let path = case.folder().join(name);
            fs::create_dir(case.folder()).unwrap();
            fs::rename(case.weights(), &path).unwrap();
            std::os::unix::fs::symlink(&path, case.weights()).unwrap();
            match case.export(&Options { force, ..unverified() }) {
                Err(Error::OverwritesInput { path: found }) => assert_eq!(found, path),
                other => panic!("{name} is the checkpoint, force: {force}: {other:?}"),
            }
            assert_eq!(case.left(), [name]);
            assert!(fs::read(&path).unwrap() == before, "{name} was changed");
        }
    }
}
