//! A `tokenizer.json`: read, and used both ways.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moh_fuzz::{folder, panics_may_be_caught};
use moh_tasks::generate::{GenerationConfig, TextStream};
use moh_tasks::text::{encode, load_tokenizer};

fuzz_target!(|bytes: &[u8]| {
    panics_may_be_caught();
    folder().put("tokenizer.json", bytes);
    let Ok(tokenizer) = load_tokenizer(folder().path(), Some(100_000)) else { return };
    let config = GenerationConfig::default();
    for text in ["", "The quick  brown\nfox", "\u{e9}\u{1f600} <s> \0"] {
        let Ok(ids) = encode(&tokenizer, text, true, &config) else { continue };
        let Ok(mut stream) = TextStream::new(&tokenizer, &ids) else { continue };
        for id in ids.into_iter().chain([0, 1, 99_999]) {
            let _ = stream.push(id);
        }
        let _ = stream.finish();
    }
});
