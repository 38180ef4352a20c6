//! The first sessions of a process, made on several threads at once, as a server makes them that loads its models in parallel.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use moh::{export, golden, have_onnxruntime, ops_library};
use moh_export::Options as Export;
use moh_runtime::{Model, Options, RuntimeChoice};
use std::sync::Barrier;

/// Alone in its program: no other session may come first.
#[test]
fn first_sessions_at_once() {
    if !have_onnxruntime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let options = Export { verify: Some(false), ..Export::default() };
    let path = export(&golden("vit-tiny-b"), folder.path(), &options);
    let options = Options { runtime: RuntimeChoice::Ort, ops_library: Some(ops_library()), ..Options::default() };
    let start = Barrier::new(8);
    std::thread::scope(|scope| {
        let load = || {
            start.wait();
            Model::load(&path, &options).map(drop).unwrap();
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(load)).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}
