//! Files take their names one after the other: when one of them cannot, what was there stays.

use super::support::{Case, FILES, unverified};
use moh_export::staging::Staging;
use moh_export::{ElementType, Error, Options};
use std::fs;
use std::path::Path;

fn forced() -> Options {
    Options { force: true, ..unverified() }
}

fn assert_io(result: Result<impl std::fmt::Debug, Error>, expected: &Path) {
    match result {
        Err(Error::Io { path, .. }) => assert_eq!(path, expected),
        other => panic!("expected an error on {}, found {other:?}", expected.display()),
    }
}

#[test]
fn data_that_cannot_take_its_name() {
    for old_model in [false, true] {
        let case = Case::new("llama-moh-tiny");
        case.block("model.onnx_data");
        if old_model {
            case.place("model.onnx", "old");
        }
        assert_io(case.export(&forced()), &case.data());
        // Before anything was touched.
        assert_eq!(case.left(), [&["model.onnx"][..usize::from(old_model)], &["model.onnx_data"]].concat());
        assert_eq!(fs::read_to_string(case.data().join("kept")).unwrap(), "precious");
    }
}

#[test]
fn a_side_file_that_cannot_take_its_name() {
    for old_model in [false, true] {
        let case = Case::new("llama-moh-tiny");
        case.block("config.json");
        if old_model {
            case.place("model.onnx", "old");
            case.place("model.onnx_data", "old");
        }
        assert_io(case.export(&forced()), &case.folder().join("config.json"));
        let old = &["model.onnx", "model.onnx_data"][..if old_model { 2 } else { 0 }];
        assert_eq!(case.left(), [&["config.json"], old].concat());
        for name in old {
            assert_eq!(fs::read_to_string(case.folder().join(name)).unwrap(), "old");
        }
    }
}

#[test]
fn a_model_that_cannot_be_replaced() {
    let case = Case::new("llama-moh-tiny");
    case.place("model.onnx_data", "old");
    case.block("model.onnx");
    let staging = Staging::new(&case.output()).unwrap();
    for name in ["model.onnx", "model.onnx_data"] {
        fs::write(staging.path(name), "new").unwrap();
    }
    let turn = staging.turn();
    assert_io(staging.commit(turn, &[]), &case.output());
    assert_eq!(case.left(), ["model.onnx", "model.onnx_data"]);
    assert_eq!(fs::read_to_string(case.data()).unwrap(), "old");
}

#[test]
fn a_model_that_is_missing() {
    let case = Case::new("llama-moh-tiny");
    case.place("model.onnx", "old");
    let staging = Staging::new(&case.output()).unwrap();
    fs::write(staging.path("model.onnx_data"), "new").unwrap();
    let turn = staging.turn();
    assert_io(staging.commit(turn, &[]), &case.output());
    assert_eq!(case.left(), ["model.onnx"]);
    assert_eq!(fs::read_to_string(case.output()).unwrap(), "old");
}

#[test]
fn a_new_model_replaces_an_old_one() {
    let (fresh, case) = (Case::new("llama-moh-tiny"), Case::new("llama-moh-tiny"));
    let f16 = Options { dtype: Some(ElementType::F16), ..forced() };
    case.export(&unverified()).unwrap();
    case.export(&f16).unwrap();
    fresh.export(&f16).unwrap();
    assert_eq!(case.left(), FILES);
    for name in case.left() {
        let contents = |case: &Case| fs::read(case.folder().join(&name)).unwrap();
        assert!(contents(&case) == contents(&fresh), "{name}");
    }
}
