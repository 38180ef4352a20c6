//! Conversions that fail: what they say, and that they leave nothing.

use super::{Case, INDEX, SHARDS, names};
use crate::support::golden;
use moh_export::Error;
use moh_export::convert::{Options, convert};
use safetensors::SafeTensors;
use serde_json::json;
use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;

#[test]
fn shares() {
    let case = Case::new();
    let cases: [(&[&str], &str); 4] = [
        (
            &["--shared", "1.5"],
            "share of shared heads: expected a number from 0 to 1, found 1.5; choose it with --shared",
        ),
        (
            &["--shared", "-0.1"],
            "share of shared heads: expected a number from 0 to 1, found -0.1; choose it with --shared",
        ),
        (
            &["--active", "0.5"],
            "share of active heads: expected more than the shared ones, 0.5, and up to 1, found 0.5; choose it with --active",
        ),
        (
            &["--shared", "1"],
            "share of active heads: expected 1, as all heads are shared, found 0.75; choose it with --active",
        ),
    ];
    for (arguments, expected) in cases {
        assert_eq!(case.refused(arguments), expected);
    }
}

#[test]
fn what_is_there_stays() {
    let case = Case::new();
    let expected = "moh exists already, and a conversion replaces nothing; choose another folder";
    fs::create_dir(case.at("moh")).unwrap();
    assert_eq!(case.refused(&[]), expected);
    fs::remove_dir(case.at("moh")).unwrap();
    fs::write(case.at("moh"), "precious").unwrap();
    assert_eq!(case.refused(&[]), expected);
    assert_eq!(fs::read_to_string(case.at("moh")).unwrap(), "precious");
    for nameless in ["", "..", "missing/.."] {
        let refused = convert(&case.at("dense"), nameless.as_ref(), &Options::default());
        assert!(matches!(refused, Err(Error::FolderExists { .. })), "{nameless:?}: {refused:?}");
    }
}

/// The configuration of something else than a dense LLaMA.
#[test]
fn other_models() {
    let cases = [
        (
            "family",
            json!("moh-llama"),
            r#"dense/config.json: "family": expected llama, a dense model, found moh-llama"#,
        ),
        (
            "model_type",
            json!("mistral"),
            r#""model_type": expected llama, a dense model, found mistral; if it computes what a LLaMA does"#,
        ),
        ("model_type", json!("qwen2"), r#""model_type": expected llama, a dense model, found qwen2"#),
        ("hidden_act", json!("gelu"), r#"dense/config.json: "hidden_act": expected silu, found gelu"#),
        ("shared_head", json!(4), "shared_head"),
        ("moh_shared_fraction", json!(0.5), "not read by family llama"),
        (
            "num_key_value_heads",
            json!(3),
            r#""num_key_value_heads": expected a divisor of num_attention_heads = 8, found 3"#,
        ),
        ("vocab_size", json!(50), "model.embed_tokens.weight"),
        ("attention_bias", json!(true), "model.layers.0.self_attn.q_proj.bias"),
        ("num_hidden_layers", json!(3), "model.layers.2.self_attn.q_proj.weight"),
        ("num_hidden_layers", json!(1), "model.layers.1.self_attn.q_proj.weight"),
    ];
    for (key, value, expected) in cases {
        let case = Case::new();
        case.set(key, value);
        let said = case.refused(&[]);
        assert!(said.contains(expected), "{key}: {said}");
    }
    let case = Case::new();
    fs::remove_dir_all(case.at("dense")).unwrap();
    assert!(case.refused(&[]).starts_with("dense: no such file or folder"));
    fs::create_dir(case.at("dense")).unwrap();
    fs::copy(golden("llama-moh-tiny").join("model.safetensors"), case.at("dense/model.safetensors")).unwrap();
    assert!(case.refused(&[]).starts_with("dense/config.json: No such file"));
    fs::copy(golden("dit-tiny-75").join("model.safetensors"), case.at("dense/model.safetensors")).unwrap();
    fs::copy(golden("dit-tiny-75").join("config.json"), case.at("dense/config.json")).unwrap();
    assert!(case.refused(&[]).contains("found moh-dit"));
}

/// A family in the configuration is the user's word.
#[test]
fn another_architecture_with_the_key() {
    let case = Case::new();
    case.set("model_type", json!("mistral"));
    case.set("family", json!("llama"));
    case.converted(&[]);
    assert_eq!(super::object(&case.at("moh/config.json"))["family"], "moh-llama");
}

#[test]
fn broken_shards() {
    let case = Case::new();
    let shard = case.at("dense").join(SHARDS[1]);
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes[..bytes.len() - 1]).unwrap();
    let said = case.refused(&[]);
    assert!(said.starts_with(&format!("dense/{}: tensor ", SHARDS[1])), "{said}");
    fs::write(&shard, &bytes[..20]).unwrap();
    assert!(case.refused(&[]).starts_with(&format!("dense/{}", SHARDS[1])));
    fs::remove_file(&shard).unwrap();
    let said = case.refused(&[]);
    assert!(said.contains(INDEX) && said.contains(SHARDS[1]), "{said}");
}

/// A shard of the name that the routers' file has: nothing of it is lost.
#[test]
fn the_name_of_the_routers() {
    let case = Case::new();
    fs::rename(case.at("dense").join(SHARDS[1]), case.at("dense/router.safetensors")).unwrap();
    let index = fs::read_to_string(case.at("dense").join(INDEX)).unwrap();
    fs::write(case.at("dense").join(INDEX), index.replace(SHARDS[1], "router.safetensors")).unwrap();
    let said = case.refused(&["--router", "two-stage"]);
    let expected = "dense/router.safetensors: the router's weights cannot be put beside it: it has the name";
    assert!(said.starts_with(expected), "{said}");
    case.converted(&[]);
}

/// The shard that [`cut`] is to cut.
static SHARD: Mutex<Option<PathBuf>> = Mutex::new(None);

fn cut(_: u64, _: u64) {
    if let Some(path) = SHARD.lock().unwrap().take() {
        let bytes = fs::read(&path).unwrap();
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(bytes.len() as u64 / 2).unwrap();
    }
}

#[test]
fn a_shard_that_is_cut_while_another_is_copied() {
    let case = Case::new();
    let shard = case.at("dense").join(SHARDS[1]);
    *SHARD.lock().unwrap() = Some(shard.clone());
    let options = Options { progress: Some(cut), ..Options::default() };
    match convert(&case.at("dense"), &case.at("below/moh"), &options) {
        Err(Error::Model(moh_models::Error::Changed { file, .. })) => assert_eq!(file, shard),
        other => panic!("{other:?}"),
    }
    assert!(SHARD.lock().unwrap().is_none(), "it was not cut");
    assert_eq!(names(case.root.path()), ["dense"]);
}

/// A limit on the size of files stands in for a full disk.
#[cfg(unix)]
#[test]
fn no_room() {
    let case = Case::new();
    let done = std::process::Command::new("sh")
        // Blocks of 512 bytes (or 1024); without a handler the signal of the limit would end the program.
        .args(["-c", "trap '' XFSZ; ulimit -f 20; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_moh-export")])
        .args(["convert", "dense", "-o", "moh"])
        .current_dir(case.root.path())
        .output()
        .unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert!(!done.status.success() && said.starts_with("error: moh/model-0000"), "{said}");
    assert!(said.contains("File too large") && said.lines().count() == 1, "{said}");
    assert_eq!(names(case.root.path()), ["dense"]);
}

/// Whatever becomes of the shards, they are those of the source.
#[test]
fn the_source_is_not_touched() {
    let case = Case::new();
    let all = || names(&case.at("dense")).into_iter().map(|name| fs::read(case.at("dense").join(name)).unwrap());
    let before: Vec<_> = all().collect();
    case.converted(&["--router", "two-stage", "--link"]);
    assert!(all().eq(before));
    assert!(SafeTensors::deserialize(&fs::read(case.at("moh/router.safetensors")).unwrap()).is_ok());
}
