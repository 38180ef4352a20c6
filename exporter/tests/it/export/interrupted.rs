//! Exports that fail in the middle: one error, nothing left, and the model that was there before is as it was.

use super::support::{Case, unverified};
use moh_export::quantize::{Bits, Quantize};
use moh_export::{Error, Options};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;

/// The files of the output's folder.
fn files(case: &Case) -> BTreeMap<String, Vec<u8>> {
    let read = |name: String| (name.clone(), fs::read(case.folder().join(name)).unwrap());
    case.left().into_iter().map(read).collect()
}

/// The shard that `cut` is to cut, and how often it was called.
static SHARD: Mutex<(Option<PathBuf>, usize)> = Mutex::new((None, 0));

/// Takes all of the shard away but its header, as soon as something is written.
fn cut(_: u64, _: u64) {
    let mut shard = SHARD.lock().unwrap();
    shard.1 += 1;
    if let Some(path) = shard.0.take() {
        let length = u64::from_le_bytes(fs::read(&path).unwrap()[..8].try_into().unwrap());
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(8 + length).unwrap();
    }
}

/// The checkpoint in two files: the second has the later layers.
fn sharded(case: &Case) -> PathBuf {
    let bytes = fs::read(case.weights()).unwrap();
    fs::remove_file(case.weights()).unwrap();
    let (first, second): (Vec<_>, Vec<_>) = SafeTensors::deserialize(&bytes)
        .unwrap()
        .tensors()
        .into_iter()
        .partition(|(name, _)| name.contains("embed_tokens") || name.contains("layers.0"));
    let mut map = serde_json::Map::new();
    for (name, part) in [("a.safetensors", first), ("b.safetensors", second)] {
        map.extend(part.iter().map(|(tensor, _)| (tensor.clone(), name.into())));
        fs::write(case.checkpoint().join(name), safetensors::serialize(part, None).unwrap()).unwrap();
    }
    let index = serde_json::json!({ "weight_map": map });
    fs::write(case.checkpoint().join("model.safetensors.index.json"), index.to_string()).unwrap();
    case.checkpoint().join("b.safetensors")
}

/// A shard that becomes shorter while weights are quantised and written.
#[test]
fn a_shard_that_is_cut_while_it_is_read() {
    let case = Case::new("llama-moh-tiny");
    let shard = sharded(&case);
    let whole = fs::read(&shard).unwrap();
    let options = || Options { quantize: Some(Quantize::new(Bits::Int4)), ..unverified() };
    for old_model in [false, true] {
        fs::write(&shard, &whole).unwrap();
        if old_model {
            case.export(&options()).unwrap();
        }
        let before = files(&case);
        assert_eq!(!before.is_empty(), old_model);
        *SHARD.lock().unwrap() = (Some(shard.clone()), 0);
        match case.export(&Options { force: true, progress: Some(cut), ..options() }) {
            Err(Error::Model(moh_models::Error::Changed { file, .. })) => assert_eq!(file, shard),
            other => panic!("{other:?}"),
        }
        assert!(SHARD.lock().unwrap().1 > 0, "it was not cut in the middle");
        assert!(files(&case) == before, "the old model was touched: {:?}", case.left());
    }
}

/// A disk that is full in the middle of the weights, whatever room there seemed to be: a limit on the size of files stands for it.
#[cfg(unix)]
#[test]
fn no_room_in_the_middle() {
    let case = Case::new("llama-moh-tiny");
    for (quantize, old_model) in [(&[][..], false), (&["--quantize", "int8"], false), (&["--quantize", "int8"], true)] {
        if old_model {
            case.export(&Options { quantize: Some(Quantize::new(Bits::Int4)), ..unverified() }).unwrap();
        }
        let before = files(&case);
        // More than the model file, less than its weights, in units of 512 bytes (or 1024). The signal that ends the program by default is ignored.
        let done = std::process::Command::new("sh")
            .args(["-c", "trap '' XFSZ; ulimit -f 200; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_moh-export")])
            .arg(case.checkpoint())
            .arg("-o")
            .arg(case.output())
            .args(["--no-verify", "--force"])
            .args(quantize)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(!done.status.success() && done.stdout.is_empty(), "{said}");
        let expected = format!("error: {}: File too large", case.data().display());
        assert!(said.starts_with(&expected) && said.lines().count() == 1, "{said}");
        assert!(files(&case) == before, "the old model was touched: {:?}", case.left());
        assert!(old_model || !case.folder().exists());
    }
}
