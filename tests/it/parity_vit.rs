//! MoH-ViT on every path against the published code's data, and a trained classifier's accuracy.
//!
//! The repository holds one case. Another one is too large for it: its test is ignored, and runs with `--ignored` where `MOH_GOLDEN`
//! names a folder that holds it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use moh::{Runner, Table, Tensors, checkpoint, floats, gate_errors, golden, max_abs, read_tensors, ways, with_gates};
use moh_export::{ElementType, Options};
use moh_models::sample::Rng;
use moh_models::{Config, Model};
use moh_operators::tolerance;
use moh_runtime::Tensor;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

fn check(folder: &Path) {
    let target = tempfile::tempdir().unwrap();
    let reference = read_tensors(&folder.join("reference.safetensors"));
    let inputs = Tensors::from([("pixel_values".to_owned(), reference["pixel_values"].clone())]);
    let mut table = Table::new(&format!("golden {}, f32", folder.file_name().unwrap().display()));
    let options = with_gates();
    for (way, mut runner) in ways(folder, target.path(), &options) {
        let outputs = runner.run(&inputs);
        let error = max_abs(&outputs["logits"], &reference["logits"]);
        table.add(&way, "logits", error, tolerance::GOLDEN_F32);
        let (error, other) = gate_errors(&outputs, &reference);
        table.add(&way, "gates", error, tolerance::GOLDEN_F32);
        table.add(&way, "heads selected otherwise", other as f64, 0.0);
    }
    table.finish();
}

/// A folder that is too large for the repository, below the one that `variable` names.
fn elsewhere(variable: &str, name: &str) -> PathBuf {
    let folder = std::env::var_os(variable).map(|folder| Path::new(&folder).join(name)).filter(|path| path.is_dir());
    folder.unwrap_or_else(|| panic!("{variable} does not name a folder that holds {name}"))
}

#[test]
fn routing_in_every_stage() {
    check(&golden("vit-tiny-b"));
}

#[test]
#[ignore = "needs MOH_GOLDEN, a folder with vit-tiny-a, which is too large to be shipped"]
fn routing_in_late_stages() {
    check(&elsewhere("MOH_GOLDEN", "vit-tiny-a"));
}

/// A checkpoint of random weights, whose first two stages use all heads.
fn generated(folder: &Path) {
    let config = serde_json::json!({
        "family": "moh-vit", "img_size": 64, "num_classes": 10, "embed_dims": [16, 16, 24, 32], "num_heads": [2, 2, 3, 4],
        "depths": [1, 1, 2, 1], "sr_ratios": [8, 4, 2, 1], "mlp_ratios": [2, 2, 2, 2], "cpb_hidden": 16,
        "shared_head": [2, 2, 1, 2], "routed_head": [0, 0, 1, 1],
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let (_, tensors) = Model::plan(&Config::read(&folder.join("config.json")).unwrap(), None).unwrap();
    let rng = &mut Rng::new(11);
    let mut weights = HashMap::new();
    for (name, shape) in tensors {
        let center = if name.contains("norm") && name.ends_with("weight") { 1.0 } else { 0.0 };
        let values = (0..shape.iter().product()).map(|_| center + 0.3 * rng.normal()).collect();
        let weight = candle_core::Tensor::from_vec::<_, f32>(values, shape, &candle_core::Device::Cpu).unwrap();
        weights.insert(name, weight);
    }
    candle_core::safetensors::save(&weights, folder.join("model.safetensors")).unwrap();
}

/// What nothing published covers: candle is the reference of the runtimes.
#[test]
fn generated_with_routing_in_late_stages() {
    let (folder, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    generated(folder.path());
    let pixels = (0..2 * 3 * 64 * 64).map(|i: usize| (i * i % 251) as f32 / 125.0 - 1.0).collect();
    let inputs = Tensors::from([("pixel_values".to_owned(), Tensor::new([2, 3, 64, 64], pixels).unwrap())]);
    let mut ways = ways(folder.path(), target.path(), &with_gates()).into_iter();
    let (_, mut candle) = ways.next().unwrap();
    let reference = candle.run(&inputs);
    let largest = floats(&reference["logits"]).into_iter().fold(1.0, |most: f32, x| most.max(x.abs()));
    let mut table = Table::new("generated MoH-ViT, routing in late stages, f32, against candle");
    for (way, mut runner) in ways {
        let outputs = runner.run(&inputs);
        let error = max_abs(&outputs["logits"], &reference["logits"]) / largest;
        table.add(&way, "logits, relative", error, tolerance::GOLDEN_F32);
        let (error, other) = gate_errors(&outputs, &reference);
        table.add(&way, "gates", error, tolerance::GOLDEN_F32);
        table.add(&way, "heads selected otherwise", other as f64, 0.0);
    }
    table.finish();
}

/// The largest logit's class.
fn best(logits: &[f32]) -> usize {
    (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best })
}

/// A digit of 8 x 8 pixels from 0 to 16 as it was in training: from -1 to 1, bilinear to 64 x 64, in three equal channels.
fn pixels(digit: &[u8]) -> Vec<f32> {
    let at = |y: usize, x: usize| f32::from(digit[8 * y + x]) / 8.0 - 1.0;
    // The two old pixels that a new one lies between, and how much of the second it takes.
    let between = |i: usize| {
        let place = ((i as f32 + 0.5) / 8.0 - 0.5).clamp(0.0, 7.0);
        (place as usize, (place as usize + 1).min(7), place.fract())
    };
    let row = |y: usize, x: usize| {
        let (left, right, part) = between(x);
        at(y, left) * (1.0 - part) + at(y, right) * part
    };
    let pixel = |i: usize| {
        let (above, below, part) = between(i / 64);
        row(above, i % 64) * (1.0 - part) + row(below, i % 64) * part
    };
    (0..64 * 64).map(pixel).collect::<Vec<_>>().repeat(3)
}

/// The held-out images with their labels, in batches.
pub(crate) fn digits(folder: &Path) -> Vec<(Tensor, Vec<u8>)> {
    let file = std::fs::read(folder.join("heldout.safetensors")).unwrap();
    let held_out = safetensors::SafeTensors::deserialize(&file).unwrap();
    let (digits, labels) = (held_out.tensor("digits").unwrap().data(), held_out.tensor("labels").unwrap().data());
    let batch = |(digits, labels): (&[u8], &[u8])| {
        let images = digits.chunks(64).flat_map(pixels).collect();
        (Tensor::new(vec![labels.len(), 3, 64, 64], images).unwrap(), labels.to_vec())
    };
    digits.chunks(33 * 64).zip(labels.chunks(33)).map(batch).collect()
}

/// The share of the held-out images that the model recognizes.
pub(crate) fn accuracy(runner: &mut dyn Runner, digits: &[(Tensor, Vec<u8>)]) -> f64 {
    let (mut right, mut all) = (0, 0);
    for (images, labels) in digits {
        let logits = floats(&runner.run(&Tensors::from([("pixel_values".to_owned(), images.clone())]))["logits"]);
        right += logits.chunks(10).zip(labels).filter(|(row, label)| best(row) == usize::from(**label)).count();
        all += labels.len();
    }
    right as f64 / all as f64
}

#[test]
fn trained_digits() {
    let folder = checkpoint("digits-moh-vit");
    let training: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(folder.join("training.json")).unwrap()).unwrap();
    let trained = training["val_accuracy"].as_f64().unwrap();
    let (digits, target) = (digits(&folder), tempfile::tempdir().unwrap());
    let mut table = Table::new("digits-moh-vit, all held-out images");
    // The weights are stored as float16; PyTorch's figure is float32's.
    for (way, mut runner) in
        ways(&folder, target.path(), &Options { dtype: Some(ElementType::F32), ..Options::default() })
    {
        let accuracy = accuracy(runner.as_mut(), &digits);
        table.add(&way, &format!("accuracy {accuracy:.4}, off by"), (accuracy - trained).abs(), 1e-6);
    }
    table.finish();
}
