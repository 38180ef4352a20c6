//! The index of a checkpoint in several files.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moh_fuzz::{folder, read_all};
use std::sync::OnceLock;

/// A file of one tensor.
fn shard(tensor: &str) -> Vec<u8> {
    let header = format!(r#"{{"{tensor}":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}}}"#);
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 8]].concat()
}

fuzz_target!(|bytes: &[u8]| {
    static SHARDS: OnceLock<()> = OnceLock::new();
    SHARDS.get_or_init(|| {
        folder().put("config.json", b"{}");
        folder().put("a.safetensors", &shard("x"));
        folder().put("b.safetensors", &shard("y"));
    });
    read_all(&folder().put("model.safetensors.index.json", bytes));
});
