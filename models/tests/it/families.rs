//! Families and options that no published data covers, held to formulas written out here.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use candle_core::{DType, Device, Tensor};
use moh_models::eager::Eager;
use moh_models::families::{Inputs, Model, NAMES, Sizes};
use moh_models::sample::{Rng, SampleData};
use moh_models::{Checkpoint, Config};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

pub(crate) fn llama_config(family: &str, extra: Value) -> Value {
    let mut config = json!({
        "family": family, "vocab_size": 40, "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3,
        "num_hidden_layers": 2, "intermediate_size": 20, "max_position_embeddings": 8, "rms_norm_eps": 1e-5,
    });
    config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    config
}

fn vit_config(extra: Value) -> Value {
    let mut config = json!({
        "family": "moh-vit", "img_size": 64, "num_classes": 5, "embed_dims": [8, 8, 12, 16], "num_heads": [2, 2, 3, 4],
        "depths": [1, 1, 2, 1], "sr_ratios": [8, 4, 2, 1], "mlp_ratios": [2, 2, 2, 2], "cpb_hidden": 8,
        "shared_head": [1, 2, 1, 2], "routed_head": [1, 0, 1, 1],
    });
    config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    config
}

/// Writes a checkpoint of random weights for `config`.
pub(crate) fn checkpoint(folder: &Path, config: &Value) -> Checkpoint {
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let (_, tensors) = Model::plan(&Config::read(&folder.join("config.json")).unwrap(), None).unwrap();
    let rng = &mut Rng::new(7);
    let weights = tensors.into_iter().map(|(name, shape)| {
        let SampleData::F32(values) = rng.normals(&name, &shape).data else { unreachable!() };
        let centre = if name.contains("norm") && name.ends_with("weight") { 1.0 } else { 0.0 };
        let values: Vec<f32> = values.iter().map(|v| centre + 0.3 * v).collect();
        (name, Tensor::from_vec(values, shape, &Device::Cpu).unwrap())
    });
    let weights: std::collections::HashMap<String, Tensor> = weights.collect();
    candle_core::safetensors::save(&weights, folder.join("model.safetensors")).unwrap();
    Checkpoint::open(folder, None).unwrap()
}

pub(crate) fn run(model: &Model) -> (Vec<Vec<Tensor>>, Vec<BTreeMap<String, Tensor>>) {
    let mut eager = Eager::new().with_taps();
    let samples = model.samples(&Sizes::default());
    let forward = |sample: &Vec<moh_models::sample::Sample>| {
        let inputs = sample.iter().map(|s| {
            let tensor = match &s.data {
                SampleData::F32(data) => Tensor::from_slice(data, s.shape.as_slice(), &Device::Cpu),
                SampleData::I64(data) => Tensor::from_slice(data, s.shape.as_slice(), &Device::Cpu),
            };
            (s.name.clone(), tensor.unwrap())
        });
        (model.forward(&mut eager, &Inputs::new(inputs)).unwrap(), eager.take_taps())
    };
    samples.iter().map(forward).unzip()
}

pub(crate) fn run_config(config: &Value) -> (Vec<Vec<Tensor>>, Vec<BTreeMap<String, Tensor>>) {
    let folder = tempfile::tempdir().unwrap();
    run(&Model::load(&checkpoint(folder.path(), config), None).unwrap())
}

pub(crate) fn rows(x: &Tensor) -> Vec<Vec<f32>> {
    let width = *x.dims().last().unwrap();
    x.flatten_all().unwrap().to_vec1::<f32>().unwrap().chunks(width).map(<[f32]>::to_vec).collect()
}

pub(crate) fn differ(a: &Tensor, b: &Tensor) -> f32 {
    (a - b).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
}

#[test]
fn every_family_finishes_finite() {
    let configs = [
        llama_config("llama", json!({})),
        llama_config("moh-llama", json!({})),
        llama_config("moh-llm", json!({"shared_head": 2, "routed_head": [1, 2]})),
        llama_config("gqe-llama", json!({"group_top_k": 1})),
        llama_config("switchhead", json!({"num_key_value_heads": 6, "num_experts": 3, "moe_k": 2})),
        vit_config(json!({})),
        vit_config(json!({"family": "vit", "shared_head": null, "routed_head": null})),
    ];
    for config in &configs {
        let (outputs, _) = run_config(config);
        for output in outputs.iter().flatten() {
            assert!(rows(output).concat().iter().all(|v| v.is_finite()), "{config}");
        }
    }
    assert!(configs.iter().all(|config| NAMES.contains(&config["family"].as_str().unwrap())));
}

#[test]
fn any_set_of_heads_may_be_shared() {
    let sets = json!({"shared_heads": [[0, 3, 5], [2]], "top_k": [1, 3]});
    for family in ["moh-llama", "moh-llm"] {
        let (_, taps) = run_config(&llama_config(family, sets.clone()));
        for (layer, shared, active) in [(0, vec![0, 3, 5], 4), (1, vec![2], 4)] {
            for row in rows(&taps[0][&format!("gates.model.layers.{layer}.self_attn")]) {
                assert!(shared.iter().all(|&head: &usize| row[head] != 0.0), "{row:?}");
                assert_eq!(row.iter().filter(|gate| **gate != 0.0).count(), active, "{row:?}");
            }
        }
    }
    let vit = vit_config(json!({"shared_heads": [[1], [0], [0, 2], [1], [0, 3]], "top_k": [1, 1, 1, 2, 1]}));
    let (_, taps) = run_config(&vit);
    assert!(rows(&taps[0]["gates.block3.1.attn"]).iter().all(|row| row.iter().filter(|g| **g != 0.0).count() == 3));
    assert!(rows(&taps[0]["gates.block4.0.attn"]).iter().all(|row| row[0] != 0.0 && row[3] != 0.0));
}

/// Naming the first heads as a set is what `shared_head` says; another set is another model.
#[test]
fn the_first_heads_as_a_set() {
    let counts = run_config(&llama_config("moh-llm", json!({"shared_head": 2, "routed_head": 2})));
    let set = run_config(&llama_config("moh-llm", json!({"shared_heads": [[1, 0], [0, 1]], "routed_head": 2})));
    let other = run_config(&llama_config("moh-llm", json!({"shared_heads": [[1, 2], [0, 1]], "routed_head": 2})));
    assert_eq!(differ(&counts.0[0][0], &set.0[0][0]), 0.0);
    assert!(differ(&counts.0[0][0], &other.0[0][0]) > 1e-3);
    let both = json!({"shared_heads": [[1, 0], [0, 1]], "routed_head": 2, "top_k": [2, 2]});
    assert_eq!(differ(&run_config(&llama_config("moh-llm", both)).0[0][0], &set.0[0][0]), 0.0);
}

#[test]
fn sets_that_make_no_router() {
    for (sets, part) in [
        (json!({"shared_head": 2, "routed_head": [1, 5]}), "layer 1"),
        (json!({"shared_heads": [[0, 0], [1]], "top_k": 1}), "different heads below 6"),
        (json!({"shared_heads": [[0, 6], [1]], "top_k": 1}), "different heads below 6"),
        (json!({"shared_heads": [[0]], "top_k": 1}), "2 lists"),
        (json!({"shared_heads": [[0], [1]], "top_k": 6}), "6 active"),
        (json!({"shared_heads": [[0], [1]]}), "top_k"),
        (json!({"shared_heads": [[0], [1]], "top_k": [2, 3], "routed_head": 2}), "what routed_head is"),
    ] {
        let config = llama_config("moh-llm", sets);
        let config = Config::new("config.json", config.as_object().unwrap().clone());
        let message = Model::plan(&config, None).err().unwrap().to_string();
        assert!(message.contains(part) && message.contains("config.json"), "{message}");
    }
}

/// Equation 6 and 7 of the paper on the gates of one row, from the module's own input.
#[test]
fn two_stage_gates_of_a_language_model() {
    let folder = tempfile::tempdir().unwrap();
    let config = llama_config("moh-llm", json!({"shared_heads": [[1, 4], [0]], "top_k": 2}));
    let checkpoint = checkpoint(folder.path(), &config);
    let (_, taps) = run(&Model::load(&checkpoint, None).unwrap());
    let weight = |name: &str| {
        let weight = checkpoint.get(&format!("model.layers.0.self_attn.{name}.weight")).unwrap();
        let (values, width) = (weight.to_f32().unwrap(), weight.shape()[1]);
        values.chunks(width).map(<[f32]>::to_vec).collect::<Vec<_>>()
    };
    let softmax = |x: &[f32], w: &[Vec<f32>]| -> Vec<f64> {
        let logits = w.iter().map(|w| w.iter().zip(x).map(|(a, b)| f64::from(a * b)).sum::<f64>());
        let exp: Vec<f64> = logits.map(f64::exp).collect();
        exp.iter().map(|e| e / exp.iter().sum::<f64>()).collect()
    };
    let inputs = rows(&taps[0]["attn_in.model.layers.0.self_attn"]);
    for (x, gates) in inputs.iter().zip(rows(&taps[0]["gates.model.layers.0.self_attn"])) {
        let (p, w, s) = (softmax(x, &weight("wg")), softmax(x, &weight("wg_0")), softmax(x, &weight("wg_1")));
        let mut order: Vec<usize> = (0..4).collect();
        order.sort_by(|&a, &b| p[b].total_cmp(&p[a]));
        let sum = p[order[0]] + p[order[1]];
        let mut expected = [0.0; 6];
        for (i, head) in [1, 4].into_iter().enumerate() {
            expected[head] = 2.0 * w[0] * 2.0 * s[i];
        }
        for &i in &order[..2] {
            expected[[0, 2, 3, 5][i]] = 2.0 * w[1] * 2.0 * p[i] / sum;
        }
        for (found, expected) in gates.iter().zip(expected) {
            assert!((f64::from(*found) - expected).abs() < 1e-5, "{gates:?} {expected:?}");
        }
    }
}

/// One expert that is always chosen with gate 1 is the dense layer.
#[test]
fn mixtures_of_experts() {
    let one = json!({"moe_num_experts": [2, 1], "moe_top_k": 1, "moe_renormalize": true});
    let (_, taps) = run_config(&llama_config("moh-llama", one));
    for row in rows(&taps[0]["gates.model.layers.0.mlp"]) {
        assert_eq!(row.iter().filter(|gate| **gate == 1.0).count(), 1, "{row:?}");
        assert_eq!(row.iter().sum::<f32>(), 1.0, "{row:?}");
    }
    assert!(!taps[0].contains_key("gates.model.layers.1.mlp"));

    let vit = vit_config(json!({"moe_num_experts": [2, 0, 0, 3, 2], "moe_top_k": [1, 1, 1, 2, 1]}));
    let (_, taps) = run_config(&vit);
    for (name, active) in [("gates.block1.0.mlp", 1), ("gates.block3.1.mlp", 2), ("gates.block4.0.mlp", 1)] {
        for row in rows(&taps[0][name]) {
            assert_eq!(row.iter().filter(|gate| **gate != 0.0).count(), active);
            assert!(row.iter().sum::<f32>() < 1.0);
        }
    }
    let config = Config::new(
        "c.json",
        llama_config("moh-llm", json!({"moe_num_experts": 2, "moe_top_k": 3, "shared_head": 6, "routed_head": 0}))
            .as_object()
            .unwrap()
            .clone(),
    );
    assert!(Model::plan(&config, None).err().unwrap().to_string().contains("moe_top_k"));
}

/// The logits of the first sample: positions 0 to 6, and 0 to 4 after padding.
fn logits(scaling: Value) -> Tensor {
    run_config(&llama_config("llama", json!({"rope_scaling": scaling}))).0[0][0].clone()
}

#[test]
fn scaled_rotary_embeddings() {
    let plain = logits(Value::Null);
    assert_eq!(differ(&plain, &logits(json!({"type": "linear", "factor": 1.0}))), 0.0);
    assert!(differ(&plain, &logits(json!({"rope_type": "linear", "factor": 2.0}))) > 1e-3);
    // Eight positions are within the length of training: dynamic scaling changes nothing.
    assert!(differ(&plain, &logits(json!({"type": "dynamic", "factor": 2.0}))) < 1e-5);
    // llama3: with thresholds below every wave length nothing is scaled, with thresholds above all everything is.
    let llama3 = |low: f64, high: f64| json!({"rope_type": "llama3", "factor": 4.0, "low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": 8});
    assert!(differ(&plain, &logits(llama3(1e-9, 2e-9))) < 1e-6);
    let linear = logits(json!({"type": "linear", "factor": 4.0}));
    assert!(differ(&linear, &logits(llama3(1e3, 2e3))) < 1e-6);
    for bad in
        [json!({"type": "yarn"}), json!({"type": "linear"}), json!({"type": "linear", "factor": -1}), llama3(2.0, 1.0)]
    {
        let config = llama_config("llama", json!({"rope_scaling": bad}));
        let config = Config::new("c.json", config.as_object().unwrap().clone());
        assert!(Model::plan(&config, None).err().unwrap().to_string().contains("rope_scaling"));
    }
}

/// "Dynamic NTK" beyond the length of training is a plain rotary embedding of another base: theta s^(d / (d - 2)).
#[test]
fn dynamic_scaling_changes_the_base() {
    let (factor, context, last) = (3.0f64, 4.0f64, 6.0f64);
    let s = factor * (last + 1.0) / context - (factor - 1.0);
    let theta = 10_000.0 * s.powf(4.0 / 2.0);
    let dynamic = json!({"max_position_embeddings": 4, "rope_scaling": {"type": "dynamic", "factor": factor}});
    let dynamic = run_config(&llama_config("llama", dynamic)).0[0][0].clone();
    let other = run_config(&llama_config("llama", json!({"rope_theta": theta}))).0[0][0].clone();
    assert!(differ(&dynamic, &other) < 1e-5, "{}", differ(&dynamic, &other));
}

#[test]
fn vit_options() {
    let plain = run_config(&vit_config(json!({}))).0[0][0].clone();
    for (option, changes) in [
        (json!({"qkv_bias": false}), true),
        (json!({"fixed_pool_size": 3}), true),
        (json!({"fixed_pool_size": 2}), false),
        (json!({"window_size": [5, 3, 7, null]}), true),
        (json!({"window_size": 3}), false),
        (json!({"pretrain_size": 128}), true),
        (json!({"shared_head": [0, 2, 0, 0], "routed_head": [1, 0, 2, 4]}), true),
        (json!({"img_size": 96}), true),
    ] {
        let (outputs, _) = run_config(&vit_config(option.clone()));
        let logits = &outputs[0][0];
        assert_eq!(logits.dims(), [2, 5]);
        assert!(rows(logits).concat().iter().all(|v| v.is_finite()), "{option}");
        assert_eq!(differ(&plain, logits) > 0.0, changes, "{option}");
    }
    for bad in [
        json!({"img_size": 32}),
        json!({"img_size": 100}),
        json!({"window_size": [2, 3, 3, null]}),
        json!({"fixed_pool_size": 17}),
        json!({"num_heads": [3, 2, 3, 4]}),
        json!({"shared_head": [1, 1, 1, 2]}),
    ] {
        let config = Config::new("c.json", vit_config(bad.clone()).as_object().unwrap().clone());
        assert!(Model::plan(&config, None).is_err(), "{bad}");
    }
}

/// Constant probabilities: every routed head is as good, the lowest ones are taken.
#[test]
fn ties_go_to_the_lowest_heads() {
    let folder = tempfile::tempdir().unwrap();
    checkpoint(folder.path(), &llama_config("moh-llm", json!({"shared_head": 1, "routed_head": 2})));
    let file = folder.path().join("model.safetensors");
    let mut weights = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    for (name, weight) in &mut weights {
        if name.ends_with("self_attn.wg.weight") {
            *weight = Tensor::zeros(weight.dims(), DType::F32, &Device::Cpu).unwrap();
        }
    }
    candle_core::safetensors::save(&weights, &file).unwrap();
    let (_, taps) = run(&Model::load(&Checkpoint::open(folder.path(), None).unwrap(), None).unwrap());
    for row in rows(&taps[0]["gates.model.layers.0.self_attn"]) {
        let on: Vec<bool> = row.iter().map(|gate| *gate != 0.0).collect();
        assert_eq!(on, [true, true, true, false, false, false]);
    }
}

pub(crate) fn planned(config: Value) -> Result<Model, moh_models::Error> {
    Model::plan(&Config::new("c.json", config.as_object().unwrap().clone()), None).map(|(model, _)| model)
}

/// As the published code's `int()` does.
#[test]
fn shares_of_the_heads_are_rounded_down() {
    for (shares, expected) in [
        (json!({}), (3, 1)),
        (json!({"moh_shared_fraction": 0.5, "moh_routed_fraction": 0.25}), (3, 1)),
        (json!({"moh_shared_fraction": 0.25, "moh_routed_fraction": 0.6}), (1, 3)),
        (json!({"moh_shared_fraction": 0.9, "moh_routed_fraction": 0.1}), (5, 0)),
    ] {
        for layer in planned(llama_config("moh-llama", shares.clone())).unwrap().layers() {
            assert_eq!((layer.heads.num_shared_heads, layer.heads.top_k), expected, "{shares}: 6 heads");
        }
    }
}

#[test]
fn activations_other_than_silu_are_refused() {
    let config = |family: &str, activation: Value| {
        let heads = match family {
            "moh-llm" => json!({"shared_head": 2, "routed_head": 2}),
            "gqe-llama" => json!({"group_top_k": 1}),
            "switchhead" => json!({"num_key_value_heads": 6, "num_experts": 3, "moe_k": 2}),
            _ => json!({}),
        };
        let mut config = llama_config(family, heads);
        config["hidden_act"] = activation;
        config
    };
    for family in ["llama", "moh-llama", "moh-llm", "gqe-llama", "switchhead"] {
        for known in [json!("silu"), Value::Null] {
            planned(config(family, known)).unwrap();
        }
        for unknown in ["gelu", "relu", "SiLU", ""] {
            let message = planned(config(family, json!(unknown))).err().unwrap().to_string();
            for part in ["c.json", "hidden_act", "silu", unknown] {
                assert!(message.contains(part), "{family}, {unknown:?}: {message}");
            }
        }
    }
}

/// Hugging Face's default, 1e-6.
#[test]
fn norms_without_an_epsilon() {
    let logits = |eps: Value| run_config(&llama_config("llama", json!({"rms_norm_eps": eps}))).0[0][0].clone();
    let default = logits(Value::Null);
    assert_eq!(differ(&default, &logits(json!(1e-6))), 0.0);
    for other in [0.0, 1e-5] {
        assert!(differ(&default, &logits(json!(other))) > 0.0, "{other}");
    }
}

/// Labels are dropped in training only where the probability is above 0: then there is a row for no label.
#[test]
fn a_null_class_needs_dropout() {
    for (dropout, rows) in [(json!(0.0), 3), (json!(0), 3), (json!(0.1), 4), (json!(1), 4), (Value::Null, 4)] {
        let config = json!({
            "family": "dit", "input_size": 4, "patch_size": 2, "in_channels": 1, "hidden_size": 8, "depth": 1,
            "num_heads": 2, "num_classes": 3, "class_dropout_prob": dropout,
        });
        let config = Config::new("c.json", config.as_object().unwrap().clone());
        let (_, tensors) = Model::plan(&config, None).unwrap();
        let table = tensors.iter().find(|(name, _)| *name == "y_embedder.embedding_table.weight").unwrap();
        assert_eq!(*table.1, [rows, 8], "{dropout}");
    }
}

/// As in Hugging Face's LLaMA, and for every family that is built like it.
#[test]
fn logits_are_not_made_with_the_embedding_unless_the_configuration_says_so() {
    let tensors = |extra: Value| {
        let config = llama_config("moh-llama", extra);
        Model::plan(&Config::new("config.json", config.as_object().unwrap().clone()), None).unwrap().1
    };
    let (silent, untied) = (tensors(json!({})), tensors(json!({"tie_word_embeddings": false})));
    assert_eq!(silent, untied);
    assert!(silent.iter().any(|(name, _)| name == "lm_head.weight"));
    assert!(!tensors(json!({"tie_word_embeddings": true})).iter().any(|(name, _)| name == "lm_head.weight"));
}

#[test]
fn a_token_beyond_the_vocabulary_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let config = llama_config("moh-llama", json!({}));
    let model = Model::load(&checkpoint(folder.path(), &config), None).unwrap();
    let rows = config["vocab_size"].as_i64().unwrap();
    for eager in [Eager::new(), Eager::new().forgetting()] {
        let mut eager = eager;
        for wrong in [rows, -1, i64::MAX] {
            let samples = model.samples(&Sizes::default()).swap_remove(0);
            let inputs = samples.iter().map(|sample| {
                let shape = sample.shape.as_slice();
                let tensor = match &sample.data {
                    SampleData::F32(data) => Tensor::from_slice(data, shape, &Device::Cpu),
                    SampleData::I64(data) if sample.name == "input_ids" => {
                        let ids: Vec<i64> =
                            data.iter().enumerate().map(|(i, id)| if i == 1 { wrong } else { *id }).collect();
                        Tensor::from_slice(&ids, shape, &Device::Cpu)
                    }
                    SampleData::I64(data) => Tensor::from_slice(data, shape, &Device::Cpu),
                };
                (sample.name.clone(), tensor.unwrap())
            });
            let error = model.forward(&mut eager, &Inputs::new(inputs)).err().unwrap().to_string();
            assert_eq!(error, format!("tensor \"model.embed_tokens.weight\": it has {rows} rows, and no row {wrong}"));
        }
    }
}

/// Matrices that were rounded to bfloat16 before make the same model in bfloat16. Norms and routers are computed in float32.
#[test]
fn in_bfloat16_every_matrix_is_rounded() {
    let experts = json!({"shared_head": 2, "routed_head": 2, "moe_num_experts": 3});
    let folder = tempfile::tempdir().unwrap();
    let model = Model::load(&checkpoint(folder.path(), &llama_config("moh-llm", experts)), None).unwrap();
    let samples = model.samples(&Sizes::default()).swap_remove(0);
    let inputs: Vec<(String, Tensor)> = samples
        .iter()
        .map(|sample| {
            let tensor = match &sample.data {
                SampleData::F32(data) => Tensor::from_slice(data, sample.shape.as_slice(), &Device::Cpu),
                SampleData::I64(data) => Tensor::from_slice(data, sample.shape.as_slice(), &Device::Cpu),
            };
            (sample.name.clone(), tensor.unwrap())
        })
        .collect();
    let logits = |eager: Eager| {
        let output = model.forward(&mut { eager }, &Inputs::new(inputs.clone())).unwrap().swap_remove(0);
        rows(&output.to_dtype(DType::F32).unwrap()).concat()
    };
    let rounded = logits(Eager::new().in_bf16().reading(Box::new(|weight| {
        let values = weight.to_f32()?;
        let exact = ["norm", "router", ".mlp.gate."].iter().any(|part| weight.name().contains(part));
        Ok(if exact { values } else { values.into_iter().map(|x| half::bf16::from_f32(x).to_f32()).collect() })
    })));
    let unlike = |other: &[f32]| other.iter().zip(&rounded).filter(|(a, b)| a != b).count();
    assert_eq!(unlike(&logits(Eager::new().in_bf16())), 0, "of {}", rounded.len());
    assert!(unlike(&logits(Eager::new())) > 0);
}

/// What is asked for is what there is at least.
#[test]
fn a_dit_of_another_number_of_tokens_has_a_whole_grid() {
    let config = json!({
        "family": "moh-dit", "input_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": 24, "depth": 1,
        "num_heads": 4, "num_classes": 3, "shared_head": 1, "routed_head": 1,
    });
    let (model, _) = Model::plan(&Config::new("config.json", config.as_object().unwrap().clone()), None).unwrap();
    let sizes = [1, 255, 256, 257, 4096].map(|tokens| model.resized(tokens).unwrap());
    assert_eq!(sizes, [2, 32, 32, 34, 128].map(|size| ("input_size", size)));
}
