//! Grouped Query Experts, of which no code is published, held to formulas written out here.

use crate::families::{checkpoint, differ, llama_config, planned, rows, run, run_config};
use candle_core::{D, Tensor};
use moh_models::eager::{Eager, GAPS};
use moh_models::families::{Inputs, Sizes};
use moh_models::sample::SampleData;
use moh_models::{Checkpoint, Model};
use serde_json::json;

/// Six heads in two groups of three: the first is shared, one or both of the others are chosen.
fn config() -> serde_json::Value {
    llama_config("gqe-llama", json!({"num_key_value_heads": 2, "group_top_k": [1, 2], "group_shared_heads": 1}))
}

#[test]
fn gates_of_each_group() {
    let folder = tempfile::tempdir().unwrap();
    for (of_layer, shared) in [([1, 2], 1), ([2, 3], 0), ([1, 1], 0)] {
        let mut config = config();
        (config["group_top_k"], config["group_shared_heads"]) = (json!(of_layer), json!(shared));
        let checkpoint = checkpoint(folder.path(), &config);
        let (_, taps) = run(&Model::load(&checkpoint, None).unwrap());
        for (layer, top_k) in of_layer.into_iter().enumerate() {
            let path = format!("model.layers.{layer}.self_attn");
            let weight = checkpoint.get(&format!("{path}.router.weight")).unwrap();
            let routed = 3 - shared;
            assert_eq!(weight.shape(), [2 * routed, 24]);
            let weight: Vec<Vec<f32>> = weight.to_f32().unwrap().chunks(24).map(<[f32]>::to_vec).collect();
            let inputs = rows(&taps[0][&format!("attn_in.{path}")]);
            for (x, gates) in inputs.iter().zip(rows(&taps[0][&format!("gates.{path}")])) {
                let score = |row: &Vec<f32>| row.iter().zip(x).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
                let scores: Vec<f64> = weight.iter().map(score).collect();
                for (scores, gates) in scores.chunks(routed).zip(gates.chunks(3)) {
                    assert_eq!(gates[..shared], [1.0][..shared]);
                    let larger = |i: usize| scores.iter().filter(|score| **score > scores[i]).count();
                    let selected = |i: &usize| larger(*i) < top_k;
                    let sum: f64 = (0..routed).filter(selected).map(|i| scores[i].exp()).sum();
                    for (i, gate) in gates[shared..].iter().enumerate() {
                        let expected = if selected(&i) { scores[i].exp() / sum } else { 0.0 };
                        assert!((f64::from(*gate) - expected).abs() < 1e-5, "{gates:?}, expected {expected} for {i}");
                        assert_eq!(*gate != 0.0, selected(&i));
                    }
                }
            }
        }
    }
}

/// Groups whose heads are all shared have no router, and are a LLaMA's.
#[test]
fn all_heads_shared() {
    let mut config = config();
    (config["group_top_k"], config["group_shared_heads"]) = (json!(0), json!(3));
    let routed = run_config(&config);
    config["family"] = json!("llama");
    for key in ["group_top_k", "group_shared_heads"] {
        config.as_object_mut().unwrap().remove(key);
    }
    let dense = run_config(&config);
    for (a, b) in routed.0.iter().flatten().zip(dense.0.iter().flatten()) {
        assert_eq!(differ(a, b), 0.0);
    }
}

/// The gates multiply the heads: where one head of each group is chosen, the others' query and output matrices do not matter.
#[test]
fn heads_that_are_never_chosen_do_not_matter() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config();
    (config["group_top_k"], config["group_shared_heads"]) = (json!(1), json!(0));
    checkpoint(folder.path(), &config);
    let file = folder.path().join("model.safetensors");
    let mut weights = candle_core::safetensors::load(&file, &candle_core::Device::Cpu).unwrap();
    // Of equal scores the first head's is taken.
    for (name, weight) in &mut weights {
        if name.ends_with("router.weight") {
            *weight = weight.zeros_like().unwrap();
        }
    }
    let run_with = |weights: &std::collections::HashMap<String, Tensor>| {
        candle_core::safetensors::save(weights, &file).unwrap();
        run(&Model::load(&Checkpoint::open(folder.path(), None).unwrap(), None).unwrap()).0[0][0].clone()
    };
    let before = run_with(&weights);
    for head in 0..6 {
        let mut changed = weights.clone();
        let queries = &weights["model.layers.1.self_attn.q_proj.weight"];
        let kept = Tensor::from_iter((0..24).map(|i| f32::from(u8::from(i / 4 != head))), queries.device()).unwrap();
        let queries = queries.broadcast_mul(&kept.unsqueeze(1).unwrap()).unwrap();
        changed.insert("model.layers.1.self_attn.q_proj.weight".to_owned(), queries);
        assert_eq!(differ(&before, &run_with(&changed)) > 0.0, head % 3 == 0, "head {head}");
    }
}

/// The balance of a layer is the mean of its groups' balances; a token's margin is the smallest of its groups'.
#[test]
fn the_balance_of_all_groups() {
    let folder = tempfile::tempdir().unwrap();
    let model = Model::load(&checkpoint(folder.path(), &config()), None).unwrap();
    let mut eager = Eager::new().with_routing().with_taps();
    let sample = model.samples(&Sizes::default()).swap_remove(0);
    let inputs = sample.iter().map(|s| {
        let device = &candle_core::Device::Cpu;
        let tensor = match &s.data {
            SampleData::F32(data) => Tensor::from_slice(data, s.shape.as_slice(), device),
            SampleData::I64(data) => Tensor::from_slice(data, s.shape.as_slice(), device),
        };
        (s.name.clone(), tensor.unwrap())
    });
    model.forward(&mut eager, &Inputs::new(inputs)).unwrap();
    let (routing, taps) = (eager.take_routing(), eager.take_taps());
    assert_eq!(routing.len(), 2);
    let layer = &routing[0];
    // Two samples of seven tokens, of two groups of two routed heads.
    let of_group = |x: &Tensor, group: usize| {
        let x = x.reshape((14, 2, 2)).unwrap().narrow(1, group, 1).unwrap().squeeze(1).unwrap();
        rows(&x)
    };
    let mean = |rows: &[Vec<f32>], head: usize| rows.iter().map(|row| row[head]).sum::<f32>() / 14.0;
    let mut expected = 0.0;
    for group in 0..2 {
        let (p, on) = (of_group(&layer.choice.probabilities, group), of_group(&layer.choice.selected, group));
        let gates = rows(&layer.gates);
        for (row, gates) in on.iter().zip(&gates) {
            let of_heads = [gates[3 * group + 1], gates[3 * group + 2]].map(|gate| f32::from(u8::from(gate != 0.0)));
            assert_eq!(row[..], of_heads);
        }
        // R^2 / R sum_i, and half of it for each group.
        expected += (0..2).map(|head| mean(&p, head) * mean(&on, head)).sum::<f32>();
    }
    let found = layer.load_balance().unwrap().to_scalar::<f32>().unwrap();
    assert!((found - expected).abs() < 1e-6, "{found}, expected {expected}");
    assert!(layer.experts().is_err());

    let gaps = &taps[&format!("{GAPS}model.layers.0.self_attn")];
    assert_eq!(gaps.dims(), [2, 7]);
    let p = layer.choice.probabilities.reshape((14, 2, 2)).unwrap();
    let gap = |p: &[f32]| (p[0] - p[1]).abs() / p[0].max(p[1]);
    for (found, p) in rows(gaps).concat().iter().zip(p.to_vec3::<f32>().unwrap()) {
        assert!((found - gap(&p[0]).min(gap(&p[1]))).abs() < 1e-5, "{found} {p:?}");
    }
    assert_eq!(layer.gates.dim(D::Minus1).unwrap(), 6);
}

#[test]
fn counts_that_make_no_router() {
    for (changes, parts) in [
        (json!({"group_top_k": 3}), ["group_shared_heads, group_top_k", "each group of 3 heads"]),
        (json!({"group_top_k": [1, 0]}), ["layer 1: no active routed head", "3 heads"]),
        (json!({"group_shared_heads": 4}), ["4 shared heads of 3 heads", "layer 0"]),
        (json!({"group_top_k": [1, 2, 1]}), ["\"group_top_k\"", "a list of 2"]),
        (json!({"group_top_k": null}), ["\"group_top_k\"", "nothing"]),
        (json!({"routed_head": 1}), ["\"routed_head\"", "group_top_k"]),
        (json!({"moh_shared_fraction": 0.5}), ["\"moh_shared_fraction\"", "gqe-llama"]),
        (
            json!({"group_shared_head": 1, "group_shared_heads": null}),
            ["did you mean \"group_shared_heads\"", "0 by default"],
        ),
    ] {
        let mut config = config();
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let message = planned(config).err().unwrap().to_string();
        for part in parts.into_iter().chain(["c.json"]) {
            assert!(message.contains(part), "{changes}: {part:?} is not in: {message}");
        }
    }
    let layers = planned(config()).unwrap().layers();
    assert_eq!(
        layers.iter().map(|layer| (layer.heads.num_shared_heads, layer.heads.top_k)).collect::<Vec<_>>(),
        [(2, 2), (2, 4)]
    );
}
