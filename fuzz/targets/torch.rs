//! A file of torch.save, a zip archive or a bare pickle: opened, and every tensor read.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moh_fuzz::{folder, read_all};

fuzz_target!(|bytes: &[u8]| {
    folder().put("config.json", b"{}");
    read_all(&folder().put("model.pth", bytes));
});
