//! Stacks of every kind against the formulas in f64, which the published data hold first.

use super::golden::Golden;
use super::oracle::Oracle;
use super::synthetic::{Case, SOURCE_WIDTH, WIDTH, config, random, stack};
use super::*;
use serde_json::{Value, json};

const NONE: &[bool] = &[false; 7];
const RIGHT: &[bool] = &[false, false, false, false, false, true, true];
const LEFT: &[bool] = &[true, true, false, false, false, false, false];

fn bools(mask: &Tensor) -> Vec<Vec<bool>> {
    mask.to_vec2::<i64>().unwrap().into_iter().map(|row| row.into_iter().map(|m| m == 0).collect()).collect()
}

#[test]
fn the_formulas_are_the_published_ones() {
    let golden = Golden::load("moa-enc-tiny");
    let oracle = Oracle::new(&golden.checkpoint, &golden.config);
    let (x, padding) = (golden.get("x"), bools(&golden.mask("padding_mask")));
    let out: Vec<_> = (0..3).map(|b| oracle.encoder("encoder", rows_of(&x, b), &padding[b])).collect();
    assert_close(&stacked(&out), &golden.get("out"), "encoder");

    let golden = Golden::load("moa-dec-tiny");
    let oracle = Oracle::new(&golden.checkpoint, &golden.config);
    let (x, source) = (golden.get("x"), golden.get("encoder_out"));
    let padding = bools(&golden.mask("encoder_padding_mask"));
    let decode = |b: usize| oracle.decoder(rows_of(&x, b), &[false; 9], &rows_of(&source, b), &padding[b]);
    assert_close(&stacked(&(0..3).map(decode).collect::<Vec<_>>()), &golden.get("out"), "decoder");
}

fn variants() -> Vec<Value> {
    vec![
        json!({}),
        json!({"normalize_before": true}),
        json!({"activation_fn": "gelu", "renormalize_gates": true}),
        json!({"gating": "noisy", "num_expert": 9, "attention_heads": 4}),
        json!({"ffd_type": "moe", "activation_fn": "gelu"}),
        json!({"ffd_type": "moe", "normalize_before": true, "renormalize_gates": true, "gating": "noisy"}),
        json!({"ffd_type": "moe", "num_expert": 3, "attention_heads": 3}),
    ]
}

#[test]
fn encoders() {
    for (i, extra) in variants().into_iter().enumerate() {
        let config = config("encoder", extra);
        let case = Case::new(&config, &random(&stack("encoder", &config), 20 + i as u64));
        let oracle = Oracle::new(&case.checkpoint, &config);
        let x = normals(1, &[3, 7, WIDTH]);
        let padding = [NONE, RIGHT, LEFT];
        let inputs =
            Values::from([("inputs_embeds".to_owned(), x.clone()), ("attention_mask".to_owned(), mask_of(&padding))]);
        let (outputs, taps) = run(&case.model(), &inputs);
        let expected: Vec<_> = (0..3).map(|b| oracle.encoder("encoder", rows_of(&x, b), padding[b])).collect();
        assert_close(&outputs["last_hidden_state"], &stacked(&expected), &config.to_string());
        assert_eq!(taps.contains_key("gates.encoder.layers.1.ffd"), config["ffd_type"] == "moe");
    }
}

#[test]
fn decoders() {
    for (i, extra) in variants().into_iter().enumerate() {
        let config = config("decoder", extra);
        let case = Case::new(&config, &random(&stack("decoder", &config), 40 + i as u64));
        let oracle = Oracle::new(&case.checkpoint, &config);
        let (x, source) = (normals(2, &[3, 5, WIDTH]), normals(3, &[3, 7, SOURCE_WIDTH]));
        let padding = [NONE, RIGHT, LEFT];
        let decode = |b: usize| oracle.decoder(rows_of(&x, b), &[false; 5], &rows_of(&source, b), padding[b]);
        let expected = stacked(&(0..3).map(decode).collect::<Vec<_>>());
        for lengths in [vec![5], vec![2, 1, 1, 1]] {
            let found = decode_in_steps(&case.model(), &x, &source, &mask_of(&padding), &lengths);
            assert_close(&found, &expected, &format!("{lengths:?} {config}"));
        }
    }
}
