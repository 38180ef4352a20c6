//! SwitchHead beyond its golden data: what is chosen, what is computed of it, and configurations that make no model.

use crate::families::{checkpoint, differ, llama_config, planned, rows, run};
use candle_core::{Device, Tensor};
use moh_models::{Checkpoint, Model};
use serde_json::{Value, json};

/// Two heads with three experts each.
fn config(more: Value) -> Value {
    let mut config = llama_config(
        "switchhead",
        json!({"num_attention_heads": 2, "num_key_value_heads": null, "head_dim": 8, "num_experts": 3, "moe_k": 2}),
    );
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

/// Of each head the experts with the largest sigmoids, whose gates these are. Of equal ones, such as those rounded to 1, the first.
#[test]
fn gates_are_sigmoids() {
    let folder = tempfile::tempdir().unwrap();
    for (top_k, factor) in [(1, 1.0), (2, 1.0), (3, 1.0), (2, 50.0)] {
        checkpoint(folder.path(), &config(json!({"moe_k": top_k})));
        let file = folder.path().join("model.safetensors");
        let mut weights = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
        for (name, weight) in &mut weights {
            if name.contains("sel_") {
                *weight = (&*weight * factor).unwrap();
            }
        }
        candle_core::safetensors::save(&weights, &file).unwrap();
        let (_, taps) = run(&Model::load(&Checkpoint::open(folder.path(), None).unwrap(), None).unwrap());
        for name in ["sel_v", "sel_o"] {
            let path = "model.layers.1.self_attn";
            let weight = rows(&weights[&format!("{path}.{name}")]);
            assert_eq!((weight.len(), weight[0].len()), (6, 24));
            let gates = rows(&taps[0][&format!("gates.{path}.{name}")]);
            for (x, gates) in rows(&taps[0][&format!("attn_in.{path}")]).iter().zip(gates) {
                let score = |row: &Vec<f32>| row.iter().zip(x).map(|(a, b)| a * b).sum::<f32>();
                let sigmoids: Vec<f32> = weight.iter().map(|row| 1.0 / (1.0 + (-score(row)).exp())).collect();
                for (gates, sigmoids) in gates.chunks(3).zip(sigmoids.chunks(3)) {
                    assert!(gates.iter().filter(|gate| **gate != 0.0).count() <= top_k, "{gates:?}");
                    let mut order = [0, 1, 2];
                    order.sort_by(|&a, &b| sigmoids[b].total_cmp(&sigmoids[a]));
                    for (place, i) in order.into_iter().enumerate() {
                        let expected = if place < top_k { sigmoids[i] } else { 0.0 };
                        assert!((gates[i] - expected).abs() < 1e-4, "{gates:?} {sigmoids:?}");
                    }
                }
            }
        }
    }
}

/// Matrices of experts that no token chooses may be anything.
#[test]
fn experts_that_are_not_chosen_are_not_computed() {
    let folder = tempfile::tempdir().unwrap();
    checkpoint(folder.path(), &config(json!({})));
    let file = folder.path().join("model.safetensors");
    let mut weights = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    // Equal scores: the first two of each head's three.
    for (name, weight) in &mut weights {
        if name.contains("sel_") {
            *weight = weight.zeros_like().unwrap();
        }
    }
    let run_with = |weights: &std::collections::HashMap<String, Tensor>| {
        candle_core::safetensors::save(weights, &file).unwrap();
        run(&Model::load(&Checkpoint::open(folder.path(), None).unwrap(), None).unwrap()).0[0][0].clone()
    };
    let before = run_with(&weights);
    for name in ["v", "o"] {
        let name = format!("model.layers.0.self_attn.{name}");
        for expert in 0..6 {
            let mut changed = weights.clone();
            let kept = Tensor::from_iter((0..6).map(|i| f32::from(u8::from(i != expert))), &Device::Cpu).unwrap();
            let matrices = weights[&name].broadcast_mul(&kept.reshape((6, 1, 1)).unwrap()).unwrap();
            changed.insert(name.clone(), matrices);
            assert_eq!(differ(&before, &run_with(&changed)) > 0.0, expert % 3 != 2, "{name}, expert {expert}");
        }
    }
}

#[test]
fn multiply_accumulates_of_chosen_experts() {
    let macs = |top_k: usize| {
        let model = planned(config(json!({"moe_k": top_k}))).unwrap();
        model.count(&model.workload().sizes).unwrap().below("model.layers.0.self_attn")
    };
    // Eight tokens of 24 channels; two heads of 8 channels; causal attention sees 36 pairs.
    let (tokens, width, heads, dim, experts) = (8, 24, 2, 8, 3);
    let fixed = tokens * width * (2 * heads * dim + 2 * heads * experts) + 36 * heads * 2 * dim;
    let of_experts = |n: u64| 2 * tokens * width * heads * dim * n;
    for top_k in 1..=3 {
        let found = macs(top_k as usize);
        assert_eq!((found.dense, found.routed), (fixed + of_experts(3), fixed + of_experts(top_k)));
    }
    let layer = &planned(config(json!({}))).unwrap().layers()[0];
    assert_eq!((layer.heads.num_heads, layer.heads.active(), layer.kv_num_heads), (2, 2, 2));
}

#[test]
fn configurations_that_make_no_model() {
    for (changes, parts) in [
        (json!({"num_experts": 1}), ["\"num_experts\"", "at least 2"]),
        (json!({"num_experts": 3000}), ["\"num_experts\"", "at most 4096 experts in all 2 heads"]),
        (json!({"num_experts": null}), ["\"num_experts\"", "nothing"]),
        (json!({"moe_k": 0}), ["\"moe_k\"", "1 to 3 experts"]),
        (json!({"moe_k": 4}), ["\"moe_k\"", "1 to 3 experts"]),
        (json!({"rotate_fraction": 0.2}), ["\"rotate_fraction\"", "an even number of the 8 channels"]),
        (json!({"rotate_fraction": 0.4}), ["\"rotate_fraction\"", "0.4"]),
        (json!({"rotate_fraction": 1.5}), ["\"rotate_fraction\"", "1.5"]),
        (json!({"num_key_value_heads": 1}), ["\"num_key_value_heads\"", "not shared"]),
        (json!({"attention_bias": true}), ["\"attention_bias\"", "no biases"]),
    ] {
        let message = planned(config(changes.clone())).err().unwrap().to_string();
        for part in parts.into_iter().chain(["c.json"]) {
            assert!(message.contains(part), "{changes}: {part:?} is not in: {message}");
        }
    }
}
