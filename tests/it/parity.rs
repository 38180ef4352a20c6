//! Every path against the data of the published code: candle, onnxruntime with and without the library, tract, and portable
//! exports; and against the trained checkpoints' own figures.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use moh::{
    Runner, Table, Tensors, checkpoint, floats, gate_errors, golden, greedy, max_abs, read_tensors, ways, with_gates,
};
use moh_export::{ElementType, Options};
use moh_operators::tolerance;
use moh_runtime::Tensor;

fn to_f32(ids: &Tensor) -> Tensor {
    let values: Vec<f32> = ids.as_slice::<i64>().unwrap().iter().map(|&v| v as f32).collect();
    Tensor::new(ids.shape(), values).unwrap()
}

fn named<const N: usize>(entries: [(&str, Tensor); N]) -> Tensors {
    entries.map(|(name, tensor)| (name.to_owned(), tensor)).into()
}

/// The published guidance: the first half of the images under both labels, and only three channels are guided.
fn guided(runner: &mut dyn Runner, reference: &Tensors) -> Tensor {
    let x = &reference["cfg.x"];
    let half = floats(x)[..x.data().len() / 2].to_vec();
    let images = Tensor::new(x.shape(), [half.clone(), half].concat()).unwrap();
    let (t, y) = (to_f32(&reference["cfg.t"]), reference["cfg.y"].clone());
    let out =
        &runner.run(&named([("hidden_states", images), ("timestep", t), ("class_labels", y)]))["out_hidden_states"];
    let (batch, channels) = (out.shape()[0], out.shape()[1]);
    let pixels: usize = out.shape()[2..].iter().product();
    let scale = floats(&reference["cfg.scale"])[0];
    let values = floats(out);
    let at = |image: usize, channel: usize, pixel: usize| values[(image * channels + channel) * pixels + pixel];
    let mut guided = Vec::with_capacity(values.len());
    for image in 0..batch {
        for channel in 0..channels {
            for pixel in 0..pixels {
                let (conditional, free) = (image % (batch / 2), image % (batch / 2) + batch / 2);
                guided.push(match channel {
                    0..3 => {
                        let free = at(free, channel, pixel);
                        free + scale * (at(conditional, channel, pixel) - free)
                    }
                    _ => at(image, channel, pixel),
                });
            }
        }
    }
    Tensor::new(out.shape(), guided).unwrap()
}

#[test]
fn golden_dit() {
    let (folder, target) = (golden("dit-tiny-75"), tempfile::tempdir().unwrap());
    let reference = read_tensors(&folder.join("reference.safetensors"));
    let inputs = named([
        ("hidden_states", reference["x"].clone()),
        ("timestep", to_f32(&reference["t"])),
        ("class_labels", reference["y"].clone()),
    ]);
    let mut table = Table::new("golden dit-tiny-75, f32");
    for (way, mut runner) in ways(&folder, target.path(), &with_gates()) {
        let outputs = runner.run(&inputs);
        let error = max_abs(&outputs["out_hidden_states"], &reference["out"]);
        table.add(&way, "out", error, tolerance::GOLDEN_DIT_F32);
        let (error, other) = gate_errors(&outputs, &reference);
        table.add(&way, "gates", error, tolerance::GOLDEN_DIT_F32);
        table.add(&way, "heads selected otherwise", other as f64, 0.0);
        let error = max_abs(&guided(runner.as_mut(), &reference), &reference["cfg.out"]);
        let scale = floats(&reference["cfg.scale"])[0];
        table.add(&way, "cfg.out", error, tolerance::GOLDEN_DIT_F32 * scale);
    }
    table.finish();
}

/// Positions whose mask is 1, of logits (batch, sequence, vocabulary).
fn seen(logits: &Tensor, mask: &Tensor) -> Tensor {
    let (width, mask) = (logits.shape()[2], mask.as_slice::<i64>().unwrap());
    let values = floats(logits);
    let rows = values.chunks(width).zip(mask).filter(|(_, m)| **m == 1);
    let kept: Vec<f32> = rows.flat_map(|(row, _)| row.to_vec()).collect();
    Tensor::new(vec![kept.len()], kept).unwrap()
}

#[test]
fn golden_llama() {
    golden_language_model("llama-moh-tiny");
}

#[test]
fn golden_switchhead() {
    golden_language_model("switchhead-tiny");
}

fn golden_language_model(case: &str) {
    let (folder, target) = (golden(case), tempfile::tempdir().unwrap());
    let reference = read_tensors(&folder.join("reference.safetensors"));
    let steps = reference["generated_logits"].shape()[1];
    let mut table = Table::new(&format!("golden {case}, f32"));
    for (way, mut runner) in ways(&folder, target.path(), &with_gates()) {
        for prefix in ["", "padded."] {
            let get = |name: &str| reference[&format!("{prefix}{name}")].clone();
            let (ids, mask) = (get("input_ids"), get("attention_mask"));
            let (batch, length) = (ids.shape()[0], ids.shape()[1]);
            let positions = match prefix {
                "" => Tensor::new(ids.shape(), (0..batch).flat_map(|_| 0..length as i64).collect()).unwrap(),
                _ => get("position_ids"),
            };
            let mut inputs =
                named([("input_ids", ids.clone()), ("attention_mask", mask.clone()), ("position_ids", positions)]);
            for (name, heads, dim) in runner.caches() {
                inputs.insert(name, Tensor::new(vec![batch, heads, 0, dim], Vec::<f32>::new()).unwrap());
            }
            let outputs = runner.run(&inputs);
            let error = max_abs(&seen(&outputs["logits"], &mask), &seen(&get("logits"), &mask));
            table.add(&way, &format!("{prefix}logits"), error, tolerance::GOLDEN_F32);
            if prefix.is_empty() {
                let (error, other) = gate_errors(&outputs, &reference);
                table.add(&way, "gates", error, tolerance::GOLDEN_F32);
                table.add(&way, "gates that are 0 otherwise", other as f64, 0.0);
            }
            let (generated, logits) = greedy(runner.as_mut(), &ids, &mask, steps);
            let expected = get("generated_ids");
            let other =
                generated.concat().iter().zip(expected.as_slice::<i64>().unwrap()).filter(|(a, b)| a != b).count();
            assert_eq!(generated.concat().len(), expected.data().len());
            table.add(&way, &format!("{prefix}greedy tokens that differ"), other as f64, 0.0);
            let expected = get("generated_logits");
            let logits = Tensor::new(expected.shape(), logits.concat().concat()).unwrap();
            table.add(&way, &format!("{prefix}generated_logits"), max_abs(&logits, &expected), tolerance::GOLDEN_F32);
        }
    }
    table.finish();
}

/// Mean negative log-likelihood per token over `windows` windows of 128 targets.
fn loss(runner: &mut dyn Runner, ids: &[i64], windows: usize, half: bool) -> f64 {
    loss_seen(runner, ids, windows, half, &mut |_, _| ())
}

/// The same, with each call's inputs and outputs shown.
pub(crate) fn loss_seen(
    runner: &mut dyn Runner,
    ids: &[i64],
    windows: usize,
    half: bool,
    seen: &mut dyn FnMut(&Tensors, &Tensors),
) -> f64 {
    const WINDOW: usize = 128;
    const BATCH: usize = 16;
    let mut total = 0.0;
    for first in (0..windows).step_by(BATCH) {
        let starts: Vec<usize> = (first..(first + BATCH).min(windows)).map(|w| w * WINDOW).collect();
        let batch = starts.len();
        let rows: Vec<i64> = starts.iter().flat_map(|&s| ids[s..s + WINDOW].to_vec()).collect();
        let matrix = |values: Vec<i64>| Tensor::new(vec![batch, WINDOW], values).unwrap();
        let mut inputs = named([
            ("input_ids", matrix(rows)),
            ("attention_mask", matrix(vec![1; batch * WINDOW])),
            ("position_ids", matrix((0..batch).flat_map(|_| 0..WINDOW as i64).collect())),
        ]);
        for (name, heads, dim) in runner.caches() {
            let shape = vec![batch, heads, 0, dim];
            let empty = match half {
                true => Tensor::new(shape, Vec::<half::f16>::new()),
                false => Tensor::new(shape, Vec::<f32>::new()),
            };
            inputs.insert(name, empty.unwrap());
        }
        let outputs = runner.run(&inputs);
        seen(&inputs, &outputs);
        let logits = floats(&outputs["logits"]);
        let width = logits.len() / batch / WINDOW;
        for (row, scores) in logits.chunks(width).enumerate() {
            let target = ids[starts[row / WINDOW] + row % WINDOW + 1] as usize;
            let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = scores.iter().map(|s| f64::from(s - max).exp()).sum();
            total += sum.ln() - f64::from(scores[target] - max);
        }
    }
    total / (windows * WINDOW) as f64
}

#[test]
fn shakespeare_speaks_as_trained() {
    let (folder, target) = (checkpoint("shakespeare-moh-llama"), tempfile::tempdir().unwrap());
    let text = std::fs::read_to_string(folder.join("training.json")).unwrap();
    let training: serde_json::Value = serde_json::from_str(&text).unwrap();
    let expected: Vec<i64> = training["greedy_ids"].as_array().unwrap().iter().map(|v| v.as_i64().unwrap()).collect();
    let trained = training["val_nats_per_token"].as_f64().unwrap();
    let windows = training["val_tokens"].as_u64().unwrap() as usize / 128;
    let held_out = read_tensors(&folder.join("heldout.safetensors"));
    let ids = held_out["val_ids"].as_slice::<i64>().unwrap();
    // "ROMEO:\n" is the first seven ids; 120 follow.
    let prompt = expected.len() - 120;
    let prompt_ids = Tensor::new(vec![1, prompt], expected[..prompt].to_vec()).unwrap();
    let prompt_mask = Tensor::new(vec![1, prompt], vec![1i64; prompt]).unwrap();

    let mut table = Table::new("shakespeare-moh-llama");
    for (way, mut runner) in ways(&folder, target.path(), &Options::default()) {
        let (generated, _) = greedy(runner.as_mut(), &prompt_ids, &prompt_mask, 120);
        let other = generated[0].iter().zip(&expected).filter(|(a, b)| a != b).count();
        table.add(&way, "greedy tokens that differ, of 120", other as f64, 0.0);
        let found = loss(runner.as_mut(), ids, windows, false);
        table.add(&way, "loss, f32 (nats)", (found - trained).abs(), tolerance::LOSS_F32);
    }
    let half = Options { dtype: Some(ElementType::F16), ..Options::default() };
    for (way, mut runner) in ways(&folder, &target.path().join("f16"), &half).into_iter().skip(1) {
        let found = loss(runner.as_mut(), ids, windows, true);
        table.add(&way, "loss, f16 (nats)", (found - trained).abs(), tolerance::LOSS_F16);
    }
    table.finish();
}
