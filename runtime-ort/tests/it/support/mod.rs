//! Small models, written field by field, and the runtimes to run them in.
#![allow(dead_code, reason = "the tests of two crates use it, each a part")]

pub(crate) mod onnx;

use moh_runtime::{Error, Model, Options, RuntimeChoice};
use onnx::{DataType, Graph};
use std::path::PathBuf;
use std::sync::OnceLock;
use tempfile::TempDir;

/// Options for every runtime that is here; says so where onnxruntime is not, and fails where it has to be.
pub(crate) fn runtimes() -> Vec<Options> {
    let tract = Options { runtime: RuntimeChoice::Tract, threads: Some(2), ..Options::default() };
    let ort = Options { runtime: RuntimeChoice::Ort, threads: Some(2), ..Options::default() };
    if have_onnxruntime() { vec![tract, ort] } else { vec![tract] }
}

/// Whether onnxruntime can be tested here.
pub(crate) fn have_onnxruntime() -> bool {
    static FOUND: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let (_folder, path) = doubler();
        let options = Options { runtime: RuntimeChoice::Ort, ..Options::default() };
        match Model::load(path, &options) {
            Ok(_) => Ok(()),
            Err(Error::OrtMissing { reason }) => {
                eprintln!("SKIPPED onnxruntime: {reason}");
                Err(reason)
            }
            Err(other) => panic!("{other}"),
        }
    });
    if let Err(reason) = found {
        assert!(std::env::var_os("MOH_REQUIRE_ORT").is_none(), "MOH_REQUIRE_ORT is set, but: {reason}");
    }
    found.is_ok()
}

/// `y = x + x` for x (n, 3) float32, and `m` = mask, int64 of shape (n).
pub(crate) fn doubler() -> (TempDir, PathBuf) {
    let mut graph = Graph::new();
    graph.input("x", DataType::Float, &["n", "3"]);
    graph.input("mask", DataType::Int64, &["n"]);
    graph.node("Add", &["x", "x"], "y", &[]);
    graph.node("Identity", &["mask"], "m", &[]);
    graph.output("y", DataType::Float, &["n", "3"]);
    graph.output("m", DataType::Int64, &["n"]);
    graph.metadata("family", "doubler");
    write(&graph)
}

pub(crate) fn write(graph: &Graph) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    std::fs::write(&path, graph.encode()).unwrap();
    (folder, path)
}
