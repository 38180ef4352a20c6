//! Operator-set and IR versions of the written file.

use super::support::{Case, read, unverified};
use moh_export::{DEFAULT_OPSET, Error, Options, Versioned};
use moh_operators::DOMAIN;

/// Opset 21 and IR 10 are what onnxruntime 1.18 loads.
#[test]
fn a_default_export() {
    let case = Case::new("llama-moh-tiny");
    case.export(&unverified()).unwrap();
    let model = read(&case.output());
    assert_eq!(model.ir_version(), 10);
    let imports: Vec<(&str, i64)> = model.opset_import.iter().map(|set| (set.domain(), set.version())).collect();
    assert_eq!(imports, [("", 21), (DOMAIN, 1)]);
    assert_eq!(DEFAULT_OPSET, 21);
}

/// A runtime that inlines a function reads its nodes by the model's operator set.
#[test]
fn functions_import_the_operator_set_of_the_model() {
    for (opset, ir_version) in [(20, 9), (21, 10), (22, 10), (23, 11), (24, 12)] {
        let case = Case::new("dit-tiny-75");
        case.export(&Options { opset, ..unverified() }).unwrap();
        let model = read(&case.output());
        assert_eq!(model.ir_version(), ir_version, "of opset {opset}");
        assert_eq!((model.opset_import[0].domain(), model.opset_import[0].version()), ("", opset));
        assert!(!model.functions.is_empty());
        for function in &model.functions {
            let imports: Vec<(&str, i64)> =
                function.opset_import.iter().map(|set| (set.domain(), set.version())).collect();
            assert_eq!(imports, [("", opset)], "function {}", function.name());
        }
    }
}

#[test]
fn a_given_ir_version_is_written() {
    let case = Case::new("llama-moh-tiny");
    case.export(&Options { ir_version: Some(9), ..unverified() }).unwrap();
    let model = read(&case.output());
    assert_eq!((model.ir_version(), model.opset_import[0].version()), (9, DEFAULT_OPSET));
}

#[test]
fn versions_that_models_cannot_have() {
    let case = Case::new("llama-moh-tiny");
    let refused = |options: Options, expected: (Versioned, i64)| {
        match case.export(&options) {
            Err(Error::Version { what, found, .. }) => assert_eq!((what, found), expected),
            other => panic!("{expected:?}: {other:?}"),
        }
        assert!(!case.folder().exists());
    };
    for opset in [0, 17, 18, 19, 25] {
        refused(Options { opset, ..unverified() }, (Versioned::Opset, opset));
    }
    for ir_version in [0, 8, 14] {
        refused(Options { ir_version: Some(ir_version), ..unverified() }, (Versioned::Ir, ir_version));
    }
}
