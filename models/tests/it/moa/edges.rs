//! Edges of the routing, and configurations that make no model.

use super::synthetic::{Case, Shapes, WIDTH, complete, config, random, stack};
use super::*;
use moh_models::Config;
use moh_models::count::Macs;
use serde_json::{Value, json};

fn encoder_inputs(x: &Tensor, padding: &[&[bool]]) -> Values {
    Values::from([("inputs_embeds".to_owned(), x.clone()), ("attention_mask".to_owned(), mask_of(padding))])
}

fn gates(taps: &Values, layer: usize) -> Vec<Vec<f32>> {
    let gates = &taps[&format!("gates.encoder.layers.{layer}.self_attn")];
    gates.flatten_to(1).unwrap().to_vec2().unwrap()
}

fn encoder(extra: Value, seed: u64, change: impl FnOnce(&mut HashMap<String, Tensor>)) -> Case {
    let config = config("encoder", extra);
    let mut tensors = random(&stack("encoder", &config), seed);
    change(&mut tensors);
    Case::new(&config, &tensors)
}

/// Equal probabilities: the first experts are chosen.
#[test]
fn constant_probabilities() {
    let zero = |tensors: &mut HashMap<String, Tensor>| {
        for (_, gate) in tensors.iter_mut().filter(|(name, _)| name.ends_with("w_gate")) {
            *gate = gate.zeros_like().unwrap();
        }
    };
    let case = encoder(json!({}), 1, zero);
    let (_, taps) = run(&case.model(), &encoder_inputs(&normals(1, &[1, 4, WIDTH]), &[&[false; 4]]));
    for row in gates(&taps, 0).into_iter().chain(gates(&taps, 1)) {
        assert!((row[0] - 1.0 / 6.0).abs() < 1e-7 && row[0] == row[1], "{row:?}");
        assert_eq!(row[2..], [0.0; 4]);
    }
}

/// A padded token has no experts, and its attention output is exactly 0: also where a whole row is padding, and whatever the
/// padded positions hold.
#[test]
fn padded_rows() {
    let case = encoder(json!({}), 2, |_| ());
    let padding: [&[bool]; 2] = [&[true; 5], &[false, true, false, true, false]];
    let x = normals(7, &[2, 5, WIDTH]);
    let (outputs, taps) = run(&case.model(), &encoder_inputs(&x, &padding));
    let all = outputs["last_hidden_state"].flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert!(all.iter().all(|v| v.is_finite()));
    for layer in 0..2 {
        let attended = taps[&format!("attn_out.encoder.layers.{layer}.self_attn")].flatten_to(1).unwrap();
        let rows = attended.to_vec2::<f32>().unwrap().into_iter().zip(gates(&taps, layer));
        for ((row, gates), padding) in rows.zip(padding.concat()) {
            assert_eq!(gates.iter().filter(|gate| **gate != 0.0).count(), if padding { 0 } else { 2 });
            assert_eq!(row.iter().all(|v| *v == 0.0), padding, "{row:?}");
        }
    }
    // Tokens that are seen do not depend on those that are not.
    let other = x.slice_assign(&[1..2, 1..2, 0..WIDTH], &normals(8, &[1, 1, WIDTH])).unwrap();
    let (changed, _) = run(&case.model(), &encoder_inputs(&other, &padding));
    for i in [0, 2, 4] {
        let at = |values: &Values| values["last_hidden_state"].narrow(0, 1, 1).unwrap().narrow(1, i, 1).unwrap();
        assert_eq!(max_abs(&at(&outputs), &at(&changed)), 0.0);
    }
}

/// As many active experts as there are, or more: all of them, with their probabilities.
#[test]
fn all_experts() {
    let x = normals(9, &[2, 3, WIDTH]);
    let padding: [&[bool]; 2] = [&[false; 3]; 2];
    let outputs = [6, 9].map(|k| {
        let case = encoder(json!({"attention_heads": k}), 3, |_| ());
        let model = case.model();
        assert_eq!(model.layers()[0].heads.top_k, 6);
        let (outputs, taps) = run(&model, &encoder_inputs(&x, &padding));
        for row in gates(&taps, 0) {
            assert!(row.iter().all(|gate| *gate > 0.0) && (row.iter().sum::<f32>() - 1.0).abs() < 1e-6, "{row:?}");
        }
        outputs["last_hidden_state"].clone()
    });
    assert_eq!(max_abs(&outputs[0], &outputs[1]), 0.0);
}

#[test]
fn one_token_and_one_expert() {
    for (experts, length) in [(1, 4), (6, 1), (1, 1)] {
        let case = encoder(json!({"num_expert": experts}), 4, |_| ());
        let padding = vec![false; length];
        let x = normals(10, &[1, length, WIDTH]);
        let (outputs, taps) = run(&case.model(), &encoder_inputs(&x, &[&padding]));
        let oracle = oracle::Oracle::new(&case.checkpoint, &case.config);
        let expected = stacked(&[oracle.encoder("encoder", rows_of(&x, 0), &padding)]);
        assert_close(&outputs["last_hidden_state"], &expected, &format!("{experts} experts, {length} tokens"));
        if experts == 1 {
            assert!(gates(&taps, 0).iter().all(|row| row == &[1.0]));
        }
    }
}

/// Renormalised gates are the published ones divided by their sum.
#[test]
fn renormalised_gates() {
    let x = encoder_inputs(&normals(11, &[2, 5, WIDTH]), &[&[false; 5], &[false, false, true, true, true]]);
    let run_with = |renormalize: bool| {
        let case = encoder(json!({"renormalize_gates": renormalize}), 5, |_| ());
        gates(&run(&case.model(), &x).1, 0)
    };
    for (published, found) in run_with(false).into_iter().zip(run_with(true)) {
        let sum: f32 = published.iter().sum();
        assert!(sum < 0.999);
        for (p, r) in published.iter().zip(found) {
            assert!(if sum == 0.0 { r == 0.0 } else { (p / sum - r).abs() < 1e-6 });
        }
    }
}

/// Work that follows from the number of active experts alone: the router's is all that grows.
#[test]
fn work_does_not_grow_with_the_number_of_experts() {
    let macs = |experts: usize| -> (Macs, u64) {
        let config = config("encoder", json!({"num_expert": experts, "attention_heads": 8, "ffd_type": "moe"}));
        let config = Config::new("config.json", config.as_object().unwrap().clone());
        let (model, _) = Model::plan(&config, None).unwrap();
        let tokens = 100;
        let macs = model.macs(&[("batch", 1), ("sequence", tokens)]).unwrap();
        // Two layers of two routers.
        let routers = 4 * tokens * WIDTH * experts;
        (macs, macs.routed - routers as u64)
    };
    let (few, routed) = macs(8);
    assert_eq!(
        few.dense - few.routed,
        2 * 100 * 2 * (WIDTH * WIDTH) as u64 * 4,
        "all heads of 8, 4 of 8 mixture experts"
    );
    for experts in [32, 64] {
        let (many, others) = macs(experts);
        assert_eq!(others, routed, "{experts} experts");
        assert!(many.dense > 3 * few.dense);
    }
}

#[test]
fn what_makes_no_model() {
    let refused = |part: &str, extra: Value| {
        let config = config(part, extra);
        Case::new(&config, &random(&stack(part, &config), 6)).refused()
    };
    for (part, extra, texts) in [
        ("encoder", json!({"part": "both"}), ["\"part\"", "found both"]),
        ("encoder", json!({"ffd_type": "dense"}), ["\"ffd_type\"", "normal or moe"]),
        ("encoder", json!({"activation_fn": "tanh"}), ["\"activation_fn\"", "relu or gelu"]),
        ("encoder", json!({"attention_heads": 0}), ["\"attention_heads\"", "found 0"]),
        ("encoder", json!({"num_expert": 0}), ["\"num_expert\"", "found 0"]),
        ("decoder", json!({"cross_self_attention": true}), ["\"cross_self_attention\"", "found true"]),
        ("decoder", json!({"adaptive_softmax_cutoff": [5, 9]}), ["\"adaptive_softmax_cutoff\"", "null"]),
        ("decoder", json!({"decoder_output_dim": 8}), ["\"decoder_output_dim\"", "found 8"]),
        ("decoder", json!({"encoder_embed_dim": null}), ["\"encoder_embed_dim\"", "found nothing"]),
        ("encoder", json!({"vocab_size": 9}), ["1 missing", "encoder.embed_tokens.weight"]),
    ] {
        let message = refused(part, extra);
        assert!(texts.iter().all(|text| message.contains(text)), "{texts:?} is not in: {message}");
    }
    let refused = |extra: Value, more: Shapes| {
        let config = config("encoder", extra);
        let mut shapes = complete("encoder", &config);
        shapes.extend(more);
        Case::new(&config, &random(&shapes, 6)).refused()
    };
    let message = refused(json!({"padding_idx": 23}), vec![]);
    assert!(message.contains("\"padding_idx\"") && message.contains("one of 23 tokens"), "{message}");
    let message = refused(json!({}), vec![("encoder.layers.0.attn_ln.weight".to_owned(), vec![WIDTH])]);
    assert!(message.contains("1 unexpected") && message.contains("attn_ln"), "{message}");
}

/// fairseq's keys may carry the part's name.
#[test]
fn keys_of_a_part() {
    let own = json!({
        "layers": 9, "decoder_layers": 2, "attention_heads": 1, "decoder_attention_heads": 3, "encoder_attention_heads": 5,
        "ffn_embed_dim": null, "decoder_ffn_embed_dim": 20, "normalize_before": true, "decoder_normalize_before": false,
    });
    let plain = config("decoder", json!({}));
    let case = Case::new(&config("decoder", own), &random(&stack("decoder", &plain), 7));
    let layers = case.model().layers();
    let paths: Vec<&str> = layers.iter().map(|layer| layer.path.as_str()).collect();
    let [a, b] = ["decoder.layers.0", "decoder.layers.1"];
    let modules = |layer: &str| [format!("{layer}.self_attn"), format!("{layer}.encoder_attn")];
    assert_eq!(paths, [modules(a), modules(b)].concat());
    assert!(layers.iter().all(|layer| layer.heads.top_k == 3 && layer.kv_num_heads == 1));
}

/// A plan names the tensors that a model needs, and nothing else.
#[test]
fn planned_models() {
    for (part, extra) in [("encoder", json!({"vocab_size": 23})), ("decoder", json!({"decoder_vocab_size": 23}))] {
        let config_values = config(part, extra);
        let config = Config::new("config.json", config_values.as_object().unwrap().clone());
        let (model, tensors) = Model::plan(&config, None).unwrap();
        assert_eq!(model.inputs()[0].name, "input_ids");
        let mut expected: Vec<String> = complete(part, &config_values).into_iter().map(|(name, _)| name).collect();
        let unused = ["version", "_float_tensor"];
        expected.retain(|name| !name.contains(".ffd.") && unused.iter().all(|unused| !name.ends_with(unused)));
        if part == "decoder" {
            expected.push("decoder.output_projection.weight".to_owned());
        }
        let mut names: Vec<String> = tensors.into_iter().map(|(name, _)| name).collect();
        expected.sort();
        names.sort();
        assert_eq!(names, expected);
    }
}
