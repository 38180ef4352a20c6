//! An ONNX file: loaded and run as `moh-run` does with tract.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moh_fuzz::{folder, panics_may_be_caught, run};

fuzz_target!(|bytes: &[u8]| {
    panics_may_be_caught();
    let path = folder().put("model.onnx", bytes);
    let _ = moh_runtime::links(&path);
    run(&path);
});
