//! `moh-export inspect`: lengths that a model can have, and whether it gains.

use crate::support::{Run, text};
use serde_json::Value;

fn inspect(arguments: &[&str]) -> (bool, String) {
    let done = Run::tract().command().arg("inspect").args(arguments).output().unwrap();
    (done.status.success(), text(&done.stdout) + &text(&done.stderr))
}

fn json(arguments: &[&str]) -> Value {
    let (success, said) = inspect(&[arguments, &["--json"]].concat());
    assert!(success, "{said}");
    serde_json::from_str(&said).unwrap()
}

/// A diffusion transformer for images of another size: four times the tokens are sixteen times the products of attention.
#[test]
fn a_diffusion_model_at_another_resolution() {
    let (small, large) =
        (json(&["--preset", "moh-dit-xl-90"]), json(&["--preset", "moh-dit-xl-90", "--tokens", "4096"]));
    let macs = |of: &Value| of["macs_dense"].as_u64().unwrap();
    assert!(macs(&large) > 16 * macs(&small), "{} at 256 tokens, {} at 4096", macs(&small), macs(&large));
    assert_eq!((&small["tokens"], &large["tokens"]), (&256.into(), &4096.into()));
    let (_, said) = inspect(&["--preset", "moh-dit-xl-90", "--tokens", "4096"]);
    assert!(said.starts_with("moh-dit, counted at batch = 1, 4096 tokens\n"), "{said}");
    assert_eq!(json(&["--preset", "moh-dit-xl-90", "--tokens", "256"]), small);
    let share = |of: &Value| of["gain"]["macs_saved_share"].as_f64().unwrap();
    assert!(share(&small) < 0.03 && share(&large) > 1.5 * share(&small), "{} and {}", share(&small), share(&large));
    // A checkpoint has a table of positions for its own resolution.
    let checkpoint = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/dit-tiny-75");
    let (own, other) = (json(&[checkpoint]), json(&[checkpoint, "--tokens", "64"]));
    assert!(macs(&other) > 4 * macs(&own));
}

#[test]
fn lengths_that_a_model_cannot_have() {
    let fails = |arguments: &[&str], parts: &[&str]| {
        let (success, said) = inspect(arguments);
        assert!(!success, "{said}");
        for part in parts {
            assert!(said.contains(part), "{arguments:?}: {part:?} is not in:\n{said}");
        }
    };
    let square = "a moh-dit takes 4096 tokens, not 4000: its images are square; choose another --tokens";
    fails(&["--preset", "moh-dit-xl-90", "--tokens", "4000"], &[square]);
    let fixed = "a moh-vit takes 3136 tokens, not 4096: its configuration fixes the size of images";
    fails(&["--preset", "moh-vit-small-75", "--tokens", "4096"], &[fixed]);
    fails(
        &["--preset", "moh-dit-s-75", "--past", "7"],
        &["this moh-dit has no dimension past; it has batch", "leave out --past"],
    );
    let encoder = ["--preset", "moa-base", "--part", "encoder", "--source", "7"];
    fails(&encoder, &["this moa has no dimension encoder_sequence; it has batch, sequence", "leave out --source"]);
    for preset in ["moh-dit-s-75", "moh-llm-s"] {
        for (option, value) in
            [("--tokens", "0"), ("--tokens", "1048577"), ("--tokens", "-3"), ("--past", "1048577"), ("--source", "0")]
        {
            fails(
                &["--preset", preset, &format!("{option}={value}")],
                &[option, value, "expected a whole number from ", " to 1048576"],
            );
        }
    }
}

#[test]
fn whether_a_model_gains() {
    let says = |arguments: &[&str], parts: &[&str]| {
        let (success, said) = inspect(arguments);
        assert!(success, "{said}");
        for part in parts {
            assert!(said.contains(part), "{arguments:?}: {part:?} is not in:\n{said}");
        }
        let gain = &json(arguments)["gain"];
        for key in ["routing", "kernels"] {
            assert!(said.contains(gain[key].as_str().unwrap()), "{gain}");
        }
    };
    let kernels = "The library may be faster still than the file without it";
    let little = "Do I gain? Routing cannot help much at these lengths: it saves 2.8 % of the MACs";
    says(&["--preset", "moh-vit-small-75"], &[little, "tokens use 7", "% of the heads.", kernels]);
    says(&["--preset", "moh-dit-s-75"], &["Do I gain? Routing saves 6.2 % of the MACs at these lengths.", kernels]);
    let checkpoint = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/llama-moh-tiny");
    says(&[checkpoint, "--family", "llama"], &["Do I gain? Routing saves nothing: tokens use every head.", kernels]);
}

/// A decoder's source may have another length than its target, and is in the cache where the target is.
#[test]
fn a_source_of_another_length() {
    let decoder = |arguments: &[&str]| json(&[&["--preset", "moa-base", "--part", "decoder"], arguments].concat());
    let macs = |of: &Value| of["macs_routed"].as_u64().unwrap();
    let usual = decoder(&["--tokens", "10"]);
    assert_eq!(decoder(&["--tokens", "10", "--source", "512"]), usual);
    let short = decoder(&["--tokens", "10", "--source", "10"]);
    assert!(macs(&short) < macs(&usual), "{} and {}", macs(&short), macs(&usual));
    let sizes = |of: &Value| of["sizes"].to_string();
    assert_eq!(
        sizes(&short),
        r#"[["batch",1],["sequence",10],["past",0],["past+sequence",10],["encoder_past",0],["encoder_sequence",10],["encoder_past+encoder_sequence",10]]"#
    );
    let step = decoder(&["--tokens", "1", "--past", "9", "--source", "10"]);
    assert_eq!(
        sizes(&step),
        r#"[["batch",1],["sequence",1],["past",9],["past+sequence",10],["encoder_past",10],["encoder_sequence",0],["encoder_past+encoder_sequence",10]]"#
    );
    // Keys and values of the source are not computed again.
    assert!(10 * macs(&step) < macs(&short), "{} and {}", macs(&step), macs(&short));
}

/// Millions of multiply-accumulates of models of (heads of a token, experts, width of a head), in the tables of arXiv 2210.05144, counted there
/// by ptflops.
const TRANSLATION: [([usize; 3], f64); 8] = [
    ([8, 8, 128], 628.0),
    ([8, 8, 256], 841.0),
    ([8, 16, 256], 841.0),
    ([8, 32, 64], 524.0),
    ([8, 32, 128], 631.0),
    ([8, 32, 256], 841.0),
    ([4, 32, 256], 654.0),
    ([16, 32, 256], 1220.0),
];
/// Of masked language models with 128 tokens. That code is not published, and what was counted is not known: the paper's 6.55 G of a dense Transformer
/// are those of its dense layers alone, and these here are 5 to 7 % more than dense layers, projections and attention come to by hand.
const MASKED: [([usize; 3], f64); 5] = [
    ([8, 8, 128], 7270.0),
    ([8, 8, 256], 8970.0),
    ([8, 16, 256], 8970.0),
    ([8, 32, 256], 8980.0),
    ([8, 64, 256], 8980.0),
];

#[test]
fn the_papers_counts_of_mixtures_of_attention_heads() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.json");
    let preset = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/src/presets/moa-base.json");
    let preset: Value = serde_json::from_slice(&std::fs::read(preset).unwrap()).unwrap();
    let macs = |changes: &Value, lengths: &[&str]| {
        let mut changed = preset.clone();
        changed.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        std::fs::write(&config, changed.to_string()).unwrap();
        json(&[&[config.to_str().unwrap()], lengths].concat())["macs_routed"].as_u64().unwrap() as f64 / 1e6
    };
    let near = |what: &str, [heads, experts, width]: [usize; 3], found: f64, expected: f64, tolerance: f64| {
        let off = (found / expected - 1.0).abs();
        assert!(
            off < tolerance,
            "{what}, {heads} of {experts} heads of {width}: {found:.0} million, the paper has {expected}"
        );
    };
    for (shape, expected) in TRANSLATION {
        let [heads, experts, width] = shape;
        let changes = serde_json::json!({ "num_expert": experts, "head_dim": width, "vocab_size": 32768,
            "encoder_attention_heads": heads, "decoder_attention_heads": heads });
        let encoder = macs(&changes, &["--part", "encoder", "--tokens", "10"]);
        let decoder = macs(&changes, &["--part", "decoder", "--tokens", "10", "--source", "10"]);
        near("translation", shape, encoder + decoder, expected, 0.02);
    }
    let mut counts = Vec::new();
    for (shape, expected) in MASKED {
        let [heads, experts, width] = shape;
        let changes = serde_json::json!({ "num_expert": experts, "head_dim": width, "vocab_size": 50265, "encoder_layers": 8,
            "encoder_attention_heads": heads, "task": "masked_lm" });
        let found = macs(&changes, &["--part", "encoder", "--tokens", "128"]);
        near("masked language model", shape, found, expected, 0.07);
        counts.push(found);
    }
    // By hand, for 8 of 8 heads of 128: queries and outputs, keys and values, attention, MLP and router of a layer; the vocabulary.
    let layer = 2 * 8 * 512 * 128 + 2 * 512 * 128 + 2 * 8 * 128 * 128 + 2 * 512 * 2048 + 512 * 8;
    let by_hand = 128.0 * (8 * layer + 512 * 50265) as f64 / 1e6;
    near("by hand", MASKED[0].0, counts[0], by_hand, 1e-3);
    // More experts of a width cost their router only.
    assert!(counts[4] / counts[1] < 1.005, "{counts:?}");
}
