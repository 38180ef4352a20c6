//! MoH-ViT on every path against the published code's data, and a trained classifier's accuracy.
//!
//! The repository holds one case; the folder that `MOH_GOLDEN` names may hold more, that of `MOH_CHECKPOINTS` the classifier.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use moh::{Table, Tensors, floats, gate_errors, golden, max_abs, read_tensors, ways};
use moh_export::Options;
use moh_kernels::tolerance;
use moh_runtime::Tensor;
use std::path::{Path, PathBuf};

fn check(folder: &Path) {
    let target = tempfile::tempdir().unwrap();
    let reference = read_tensors(&folder.join("reference.safetensors"));
    let inputs = Tensors::from([("pixel_values".to_owned(), reference["pixel_values"].clone())]);
    let mut table = Table::new(&format!("golden {}, f32", folder.file_name().unwrap().display()));
    let options = Options { output_gates: true, ..Options::default() };
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
fn elsewhere(variable: &str, name: &str) -> Option<PathBuf> {
    let folder = std::env::var_os(variable).map(|folder| Path::new(&folder).join(name)).filter(|path| path.is_dir());
    if folder.is_none() {
        eprintln!("SKIPPED {name}: {variable} does not name a folder that holds it");
    }
    folder
}

#[test]
fn routing_in_every_stage() {
    check(&golden("vit-tiny-b"));
}

#[test]
fn routing_in_late_stages() {
    if let Some(folder) = elsewhere("MOH_GOLDEN", "vit-tiny-a") {
        check(&folder);
    }
}

/// The largest logit's class.
fn best(logits: &[f32]) -> i64 {
    (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best }) as i64
}

#[test]
fn trained_digits() {
    let Some(folder) = elsewhere("MOH_CHECKPOINTS", "digits-moh-vit") else { return };
    let training: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(folder.join("training.json")).unwrap()).unwrap();
    let trained = training["val_accuracy"].as_f64().unwrap();
    let held_out = read_tensors(&folder.join("heldout.safetensors"));
    let (pixels, labels) = (floats(&held_out["pixel_values"]), held_out["labels"].as_slice::<i64>().unwrap());
    let image = pixels.len() / labels.len();
    let target = tempfile::tempdir().unwrap();
    let mut table = Table::new("digits-moh-vit, all held-out images");
    for (way, mut runner) in ways(&folder, target.path(), &Options::default()) {
        let mut right = 0;
        for (images, labels) in pixels.chunks(33 * image).zip(labels.chunks(33)) {
            // One channel is stored; the three are equal.
            let three: Vec<f32> = images.chunks(image).flat_map(|image| [image, image, image].concat()).collect();
            let shape = vec![labels.len(), 3, 64, 64];
            let inputs = Tensors::from([("pixel_values".to_owned(), Tensor::new(shape, three).unwrap())]);
            let logits = floats(&runner.run(&inputs)["logits"]);
            right += logits.chunks(10).zip(labels).filter(|(row, label)| best(row) == **label).count();
        }
        let accuracy = right as f64 / labels.len() as f64;
        table.add(&way, &format!("accuracy {accuracy:.4}, off by"), (accuracy - trained).abs(), 1e-6);
    }
    table.finish();
}
