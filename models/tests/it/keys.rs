//! Keys of a configuration that nobody reads, defaults, and families that are missing or wrong.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use moh_models::families::NAMES;
use moh_models::presets::PRESETS;
use moh_models::{Checkpoint, Config, Error, Model, Warning};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(case)
}

const CASES: [&str; 6] =
    ["dit-tiny-75", "llama-moh-tiny", "moa-dec-tiny", "moa-enc-tiny", "switchhead-tiny", "vit-tiny-b"];

/// The values of a golden case's configuration, changed.
fn values(case: &str, changes: Value) -> Map<String, Value> {
    let text = std::fs::read_to_string(golden(case).join("config.json")).unwrap();
    let Value::Object(mut values) = serde_json::from_str(&text).unwrap() else { panic!("{case}") };
    values.extend(changes.as_object().unwrap().clone());
    values
}

fn plan(case: &str, changes: Value) -> Result<Model, Error> {
    Model::plan(&Config::new("config.json", values(case, changes)), None).map(|(model, _)| model)
}

fn refused(case: &str, changes: Value, parts: &[&str]) -> Error {
    let error = plan(case, changes.clone()).map(|_| ()).expect_err(&changes.to_string());
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{changes}: {part:?} is not in: {text}");
    }
    error
}

/// Also with what Hugging Face, fairseq and others write into their configurations.
#[test]
fn configurations_that_are_right_give_no_warning() {
    for case in CASES {
        let model = Model::load(&Checkpoint::open(&golden(case), None).unwrap(), None).unwrap();
        assert_eq!(model.warnings(), [], "{case}");
        let foreign = json!({
            "torch_dtype": "float32", "dtype": "float32", "_commit": 1, "mask_token_id": 4, "attention_dropout": 0.1,
            "attn_drop_rate": 0.1, "lr_scheduler": "cosine", "cvloss": 0.1, "image_mean": 0.5, "wandb_run": "x", "pruned_heads": {},
            "zork": null, "zork_list": [],
        });
        assert_eq!(plan(case, foreign).unwrap().warnings(), [], "{case}");
    }
    for preset in PRESETS {
        for part in ["encoder", "decoder"] {
            for mut config in [preset.config().unwrap(), preset.complete().unwrap().0] {
                if preset.name.starts_with("moa") {
                    config.set("part", json!(part));
                }
                let (model, _) = Model::plan(&config, None).unwrap();
                assert_eq!(model.warnings(), [], "{}", preset.name);
            }
        }
    }
}

#[test]
fn keys_of_heads_and_routing_that_are_misspelt() {
    for (case, key, meant) in [
        ("llama-moh-tiny", "moh_share_fraction", "moh_shared_fraction"),
        ("llama-moh-tiny", "moh-routed-fraction", "moh_routed_fraction"),
        ("llama-moh-tiny", "MOH_SharedFraction", "moh_shared_fraction"),
        ("llama-moh-tiny", "shared_fraction", "moh_shared_fraction"),
        ("llama-moh-tiny", "num_experts", "moe_num_experts"),
        ("llama-moh-tiny", "headdim", "head_dim"),
        ("dit-tiny-75", "sharedheads", "shared_heads"),
        ("vit-tiny-b", "moe_num_expert", "moe_num_experts"),
        ("switchhead-tiny", "Num-Experts", "num_experts"),
        ("vit-tiny-b", "numheads", "num_heads"),
        ("moa-enc-tiny", "renormalise_gates", "renormalize_gates"),
    ] {
        let error = refused(
            case,
            json!({key: 0.25}),
            &["config.json", &format!("{key:?}"), &format!("did you mean {meant:?}")],
        );
        assert!(matches!(error, Error::UnusedKeys { .. }));
    }
    refused("llama-moh-tiny", json!({"moh_share_fraction": 0.25}), &["which is 0.5 by default", "family moh-llama"]);
    for (case, key) in
        [("dit-tiny-75", "moh_shared_fraction"), ("vit-tiny-b", "moa_x"), ("llama-moh-tiny", "moh_layers")]
    {
        let error = refused(case, json!({key: 0.25}), &[&format!("{key:?}")]);
        assert!(matches!(error, Error::UnusedKeys { .. }));
    }
    // All at once.
    refused("llama-moh-tiny", json!({"moh_a": 1, "moh_b": 2}), &["\"moh_a\"", "\"moh_b\""]);
}

/// A LLaMA's tensors do not say how it routes.
#[test]
fn keys_of_the_routing_of_another_family() {
    for key in ["shared_head", "routed_head"] {
        refused("llama-moh-tiny", json!({key: 2}), &[&format!("{key:?}"), "moh-llm"]);
    }
    for key in ["group_top_k", "group_shared_heads"] {
        refused("llama-moh-tiny", json!({key: 2}), &[&format!("{key:?}"), "gqe-llama"]);
        refused("switchhead-tiny", json!({key: 2}), &[&format!("{key:?}"), "gqe-llama"]);
    }
    for key in ["shared_head", "routed_head", "shared_heads"] {
        refused("llama-moh-tiny", json!({"family": "llama", key: 2}), &[&format!("{key:?}")]);
        refused("switchhead-tiny", json!({key: 2}), &[&format!("{key:?}"), "heads are all on"]);
    }
    refused("llama-moh-tiny", json!({"family": "llama", "moh_shared_fraction": 0.5}), &["\"moh_shared_fraction\""]);
    let sets = json!([[0], [0], [0]]);
    plan("llama-moh-tiny", json!({"shared_heads": sets, "top_k": 2, "shared_head": 1})).unwrap();
    refused(
        "llama-moh-tiny",
        json!({"shared_heads": sets, "top_k": 2, "moh_shared_fraction": 0.5}),
        &["moh_shared_fraction"],
    );
}

#[test]
fn other_keys_that_nobody_reads() {
    let changes = json!({"window_size": null, "windowsize": 5, "zork": 1, "a\nb": 2});
    let model = plan("vit-tiny-b", changes).unwrap();
    let [Warning::SimilarKey { key, .. }, Warning::UnusedKeys { keys, .. }] = model.warnings() else {
        panic!("{:?}", model.warnings())
    };
    assert_eq!(
        (key.key.as_str(), key.meant.as_deref(), key.default.as_deref()),
        ("windowsize", Some("window_size"), Some("3"))
    );
    assert_eq!(keys, &["a\nb", "zork"]);
    let text = model.warnings().iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    for part in
        ["config.json", "moh-vit", "did you mean \"window_size\", which is 3 by default?", "\"a\\nb\", \"zork\""]
    {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
    let many: Map<String, Value> = (0..50).map(|i| (format!("zork{i}"), json!(i))).collect();
    let text = plan("vit-tiny-b", Value::Object(many)).unwrap().warnings()[0].to_string();
    assert!(text.ends_with("and 40 more") && text.len() < 400, "{text}");
}

/// The same inside an object, of which a kind of scaling reads some keys.
#[test]
fn inner_keys_that_nobody_reads() {
    let scaled = |more: Value| {
        let mut scaling = json!({"rope_type": "linear", "factor": 2.0});
        scaling.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        plan("llama-moh-tiny", json!({"rope_scaling": scaling})).unwrap()
    };
    assert!(scaled(json!({"attention_factor": null})).warnings().is_empty());
    let model = scaled(json!({"attention_factor": 1.5, "type_": "linear", "low_freq_factor": 1.0}));
    let [Warning::SimilarKey { key, .. }, Warning::UnusedKeys { keys, .. }] = model.warnings() else {
        panic!("{:?}", model.warnings())
    };
    assert_eq!((key.key.as_str(), key.meant.as_deref()), ("rope_scaling.type_", Some("rope_scaling.type")));
    assert_eq!(keys, &["rope_scaling.attention_factor", "rope_scaling.low_freq_factor"]);
}

/// A misspelt key that is required is named where it is missed.
#[test]
fn required_keys_that_are_misspelt() {
    for (case, required, found) in [
        ("dit-tiny-75", "hidden_size", "hiddensize"),
        ("vit-tiny-b", "img_size", "image_size"),
        ("llama-moh-tiny", "num_hidden_layers", "num_hiddenlayer"),
        ("moa-dec-tiny", "num_expert", "num_experts"),
    ] {
        let mut values = values(case, json!({}));
        let value = values.remove(required).unwrap();
        values.insert(found.to_owned(), value);
        let text = Model::plan(&Config::new("config.json", values), None).err().unwrap().to_string();
        for part in [format!("{required:?}"), format!("there is {found:?}: is it meant?")] {
            assert!(text.contains(&part), "{part:?} is not in: {text}");
        }
    }
}

#[test]
fn defaults_are_listed() {
    let defaults = |case: &str, changes: Value| {
        let model = plan(case, changes).unwrap();
        model.defaults().iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let llama = defaults("llama-moh-tiny", json!({}));
    assert_eq!(llama, ["head_dim = 8", "moh_shared_fraction = 0.5", "moh_routed_fraction = 0.25", "mlp_bias = false"]);
    let llama = defaults("llama-moh-tiny", json!({"moh_shared_fraction": 0.25, "rope_theta": null, "head_dim": 8}));
    assert_eq!(llama, ["moh_routed_fraction = 0.25", "mlp_bias = false", "rope_theta = 10000"]);
    assert_eq!(defaults("vit-tiny-b", json!({})), [""; 0]);
    let vit = defaults("vit-tiny-b", json!({"window_size": null, "mlp_ratios": null}));
    assert_eq!(vit, ["mlp_ratios = [8, 8, 4, 4]", "window_size = 3"]);
    assert_eq!(defaults("dit-tiny-75", json!({"mlp_ratio": null})), ["mlp_ratio = 4"]);
}

#[test]
fn a_family_that_is_missing_or_wrong() {
    for (case, fits) in [
        ("dit-tiny-75", "fit moh-dit"),
        ("vit-tiny-b", "fit moh-vit"),
        ("llama-moh-tiny", "fit moh-llama or llama"),
        ("moa-dec-tiny", "fit moa"),
        ("switchhead-tiny", "fit switchhead"),
    ] {
        let error = refused(case, json!({"family": null}), &["config.json", "\"family\" is missing", fits]);
        assert!(NAMES.iter().all(|name| error.to_string().contains(name)), "{error}");
        assert!(matches!(error, Error::NoFamily { .. }));
    }
    for (case, family, belongs) in [
        ("vit-tiny-b", "moh-dit", "belongs to moh-vit (it has img_size, "),
        ("dit-tiny-75", "moh-vit", "belongs to moh-dit (it has input_size, "),
        ("dit-tiny-75", "dit", "belongs to moh-dit (it has shared_head"),
        ("llama-moh-tiny", "moa", "belongs to moh-llama or llama (it has hidden_size, "),
        ("llama-moh-tiny", "moh-llm", "belongs to moh-llama or llama, not to moh-llm (\"shared_head\": expected "),
        ("moa-enc-tiny", "llama", "belongs to moa (it has "),
        ("switchhead-tiny", "gqe-llama", "belongs to switchhead (it has num_experts, moe_k, "),
    ] {
        let error = refused(case, json!({"family": family}), &["config.json", belongs, &format!("not to {family} (")]);
        assert!(matches!(error, Error::WrongFamily { .. }));
    }
    refused("vit-tiny-b", json!({"family": "resnet"}), &["no model family is called \"resnet\"", "moh-vit"]);
    // What is wrong with a value is not the family.
    assert!(matches!(refused("llama-moh-tiny", json!({"moh_routed_fraction": 2}), &["0 to 1"]), Error::Config { .. }));
    assert!(matches!(refused("dit-tiny-75", json!({"shared_head": 9}), &["router"]), Error::Config { .. }));
    // Nor is it another family that refuses the key.
    let half =
        refused("llama-moh-tiny", json!({"moh_routed_fraction": "half"}), &["\"moh_routed_fraction\"", "\"half\""]);
    assert!(matches!(half, Error::Config { .. }), "{half}");
    let missing = refused("llama-moh-tiny", json!({"family": null, "moh_routed_fraction": 0.5}), &["fit moh-llama"]);
    assert!(!missing.to_string().contains("or llama"), "{missing}");
}

/// From transformers 5 on, one key holds what two did.
#[test]
fn rotary_parameters() {
    let frequencies = |changes: Value| {
        let model = plan("llama-moh-tiny", changes).unwrap();
        let defaults: Vec<String> = model.defaults().iter().map(|default| default.key.clone()).collect();
        assert_eq!(model.warnings(), []);
        defaults.contains(&"rope_theta".to_owned())
    };
    let own = |parameters: Value| json!({"rope_theta": null, "rope_parameters": parameters});
    assert!(!frequencies(own(json!({"rope_theta": 5e5, "rope_type": "default"}))));
    assert!(!frequencies(own(json!({"rope_theta": 5e5}))));
    assert!(frequencies(own(json!({"rope_type": "linear", "factor": 2.0}))));
    refused("llama-moh-tiny", own(json!({"rope_theta": "x"})), &["rope_parameters", "rope_theta"]);
    refused("llama-moh-tiny", own(json!({"rope_type": "yarn"})), &["rope_parameters", "linear, dynamic or llama3"]);
}

/// No number makes a program panic, allocate without bounds or run without end.
#[test]
fn numbers_of_any_size() {
    let huge = [
        json!(0),
        json!(1 << 24),
        json!((1u64 << 24) + 1),
        json!(1u64 << 40),
        json!(u64::MAX),
        json!(1e300),
        json!(-1),
    ];
    for case in CASES {
        let keys: Vec<String> = values(case, json!({})).into_iter().map(|(key, _)| key).collect();
        for key in keys.iter().map(String::as_str).chain(MORE) {
            for number in &huge {
                let list = values(case, json!({})).get(key).and_then(Value::as_array).map(Vec::len);
                let lists = list.map(|length| Value::Array(vec![number.clone(); length]));
                for value in [Some(number.clone()), lists].into_iter().flatten() {
                    let started = std::time::Instant::now();
                    // Fine or refused, but soon; what is accepted can be counted, too.
                    if let Ok(model) = plan(case, json!({key: value})) {
                        let sizes = model.workload().sizes;
                        let _ = model.macs(&sizes);
                    }
                    assert!(started.elapsed().as_secs() < 20, "{case}: {key} = {value}");
                }
            }
        }
    }
    for (case, key) in [
        ("dit-tiny-75", "shared_head"),
        ("dit-tiny-75", "head_dim"),
        ("dit-tiny-75", "frequency_embedding_size"),
        ("dit-tiny-75", "depth"),
        ("dit-tiny-75", "mlp_ratio"),
        ("llama-moh-tiny", "num_hidden_layers"),
        ("llama-moh-tiny", "head_dim"),
        ("moa-dec-tiny", "layers"),
        ("moa-dec-tiny", "num_expert"),
        ("vit-tiny-b", "depths"),
        ("vit-tiny-b", "img_size"),
        ("vit-tiny-b", "cpb_hidden"),
    ] {
        let error = refused(case, json!({key: 1 << 24}), &["config.json", key]);
        assert!(matches!(error, Error::Config { .. }), "{error}");
    }
}

/// Keys that no golden case has.
const MORE: [&str; 14] = [
    "shared_heads",
    "top_k",
    "moe_num_experts",
    "moe_top_k",
    "moh_shared_fraction",
    "moh_routed_fraction",
    "vocab_size",
    "padding_idx",
    "max_target_positions",
    "max_source_positions",
    "fixed_pool_size",
    "pretrain_size",
    "head_dim",
    "encoder_layers",
];

#[test]
fn a_model_that_no_machine_holds() {
    let changes = json!({
        "hidden_size": 1 << 20, "intermediate_size": 1 << 20, "num_hidden_layers": 1 << 10, "num_attention_heads": 1 << 12,
        "num_key_value_heads": 1 << 12, "head_dim": 1 << 12,
    });
    assert!(matches!(refused("llama-moh-tiny", changes, &["parameters"]), Error::TooLarge { .. }));
}

/// fairseq leaves the last norm out of a decoder that asks for it, and of no encoder.
#[test]
fn a_translation_model_without_its_last_norm() {
    let norms = |case: &str, bare: bool| {
        let changes = json!({"normalize_before": true, "no_decoder_final_norm": bare});
        let tensors = Model::plan(&Config::new("config.json", values(case, changes)), None).unwrap().1;
        tensors.iter().filter(|(name, _)| name.ends_with("coder.layer_norm.weight")).count()
    };
    assert_eq!([norms("moa-dec-tiny", false), norms("moa-dec-tiny", true)], [1, 0]);
    assert_eq!([norms("moa-enc-tiny", false), norms("moa-enc-tiny", true)], [1, 1]);
}

/// Numbers with which a norm or an angle would be NaN, or a sequence empty.
#[test]
fn numbers_that_make_no_model() {
    refused("llama-moh-tiny", json!({"rms_norm_eps": -1}), &["rms_norm_eps", "a number from 0 to 1", "-1"]);
    refused("llama-moh-tiny", json!({"rms_norm_eps": 1e30}), &["rms_norm_eps", "a number from 0 to 1"]);
    refused("dit-tiny-75", json!({"norm_eps": -1e-6}), &["norm_eps", "a number from 0 to 1"]);
    for theta in [0, -5] {
        refused("llama-moh-tiny", json!({"rope_theta": theta}), &["rope_theta", "above 0", &theta.to_string()]);
        let parameters = json!({"rope_theta": null, "rope_parameters": {"rope_theta": theta}});
        refused("llama-moh-tiny", parameters, &["rope_parameters", "a rope_theta above 0"]);
    }
    refused(
        "llama-moh-tiny",
        json!({"max_position_embeddings": 0}),
        &["max_position_embeddings", "a number from 1 to "],
    );
}

/// transformers writes `top_k` among the settings of generation; alone, it is meant for routing.
#[test]
fn a_top_k_that_routes_nothing_is_told_of() {
    let warned = |changes: Value| plan("dit-tiny-75", changes).map(|model| model.warnings().len());
    assert_eq!(warned(json!({"top_k": 50, "temperature": 1.0})).unwrap(), 0);
    // A warning, or an error with the key that may be meant.
    assert_ne!(warned(json!({"top_k": 2})).unwrap_or(1), 0);
}

#[test]
fn empty_lists_and_objects_count_as_absent() {
    let with = |value: Value| plan("llama-moh-tiny", json!({"rope_scaling": value})).unwrap().warnings().len();
    assert_eq!([with(json!({})), with(json!([])), with(json!(null))], [0; 3]);
}
