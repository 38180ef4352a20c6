//! What quantised weights cost the trained checkpoints: loss, accuracy, and heads that are chosen otherwise.

use crate::parity::loss_seen;
use crate::parity_vit::{accuracy, digits};
use moh::{
    Candle, Runner, Table, Tensors, checkpoint, export, floats, golden, have_onnxruntime, ops_library, read_tensors,
    runtimes, with_gates,
};
use moh_export::quantize::{Activations, Bits, Form, Quantize};
use moh_export::verify::{Verification, verify_layers};
use moh_export::{ElementType, Options, Part};
use moh_models::{Checkpoint, Model};
use moh_operators::{DType, GATES, tolerance};
use moh_runtime::{RuntimeChoice, Tensor};
use std::path::{Path, PathBuf};

/// Nats per token.
const MOST_INT8: f64 = 0.002;
const MOST_INT4: f64 = 0.03;
/// Int8 activations besides: their rounding adds to that of the weights.
const MOST_ACTIVATIONS: f64 = 0.01;
/// Share of the rows whose heads are others than in float32, with int8.
const MOST_OTHER_HEADS: f64 = 0.005;
/// The same where what decides the heads is rounded as well: the query projections and the embedding.
const MOST_OTHER_HEADS_ROUNDED: f64 = 0.015;
const LEAST_ACCURACY: f64 = 0.99;

/// The ways to quantise, each with a name, with the blocks that are chosen where none are asked for.
fn recipes() -> Vec<(String, Quantize)> {
    let mut recipes = Vec::new();
    for bits in [Bits::Int8, Bits::Int4] {
        let of = |zero_points, form, activations| {
            let how = Quantize { zero_points, form, activations, ..Quantize::new(bits) };
            let zeros = if zero_points { ", zero points" } else { "" };
            (format!("{} {}, {} activations{zeros}", bits.name(), form.name(), activations.name()), how)
        };
        recipes.push(of(false, Form::Qdq, Activations::Float));
        recipes.push(of(true, Form::Qdq, Activations::Float));
        recipes.push(of(false, Form::Nbits, Activations::Float));
        recipes.push(of(true, Form::Nbits, Activations::Float));
        recipes.push(of(false, Form::Nbits, Activations::Int8));
        recipes.push(of(true, Form::Moh, Activations::Float));
        recipes.push(of(false, Form::Moh, Activations::Int8));
    }
    for (form, activations) in [(Form::Qdq, Activations::Float), (Form::Moh, Activations::Int8)] {
        let how = Quantize { reduce_range: true, form, activations, ..Quantize::new(Bits::Int8) };
        recipes.push((format!("int8 of 7 bits {}, {} activations", form.name(), activations.name()), how));
    }
    recipes
}

/// Candle with the weights rounded alike, and the exported model in every runtime.
fn ways(folder: &Path, target: &Path, how: &Quantize) -> Vec<(&'static str, Box<dyn Runner>)> {
    let options =
        Options { quantize: Some(how.clone()), dtype: Some(ElementType::F32), verify: Some(false), ..with_gates() };
    let model = export(folder, target, &options);
    let mut ways: Vec<(&'static str, Box<dyn Runner>)> = Vec::new();
    if how.form == Form::Qdq {
        ways.push(("candle", Box::new(Candle::quantized(folder, how))));
    }
    for (name, options) in runtimes() {
        ways.push((name, Box::new(moh_runtime::Model::load(&model, &options).unwrap())));
    }
    ways
}

/// Rows of gates, and those of them whose heads are others.
fn compare_heads(outputs: &Tensors, reference: &Tensors) -> (usize, usize) {
    let (mut rows, mut other) = (0, 0);
    for (name, expected) in reference.iter().filter(|(name, _)| name.starts_with(GATES)) {
        let heads = *expected.shape().last().unwrap();
        let (found, expected) = (floats(&outputs[name]), floats(expected));
        for (found, expected) in found.chunks(heads).zip(expected.chunks(heads)) {
            rows += 1;
            other += usize::from(found.iter().zip(expected).any(|(a, b)| (*a == 0.0) != (*b == 0.0)));
        }
    }
    (rows, other)
}

/// Rows of 344 numbers are no whole blocks: these matrices stay.
#[test]
fn shakespeare_keeps_its_loss() {
    let (folder, target) = (checkpoint("shakespeare-moh-llama"), tempfile::tempdir().unwrap());
    let held_out = read_tensors(&folder.join("heldout.safetensors"));
    let ids = held_out["val_ids"].as_slice::<i64>().unwrap();
    let windows = 64;
    let mut exact = Candle::load(&folder, None);
    let mut gates = Vec::new();
    let plain = loss_seen(&mut exact, ids, windows, false, &mut |_, outputs| {
        gates.push(
            outputs
                .iter()
                .filter(|(name, _)| name.starts_with(GATES))
                .map(|(n, t)| (n.clone(), t.clone()))
                .collect::<Tensors>(),
        );
    });
    let mut table = Table::new("shakespeare-moh-llama, quantised, against float32");
    let mut all = recipes();
    let rounded = Quantize { exact_routing: false, ..all[0].1.clone() };
    all.push((format!("{}, routing too", all[0].0), rounded));
    for (i, (recipe, how)) in all.into_iter().enumerate() {
        let most = if how.bits == Bits::Int8 { MOST_INT8 } else { MOST_INT4 };
        let most = if how.activations == Activations::Int8 { most + MOST_ACTIVATIONS } else { most };
        for (way, mut runner) in ways(&folder, &target.path().join(i.to_string()), &how) {
            let (mut rows, mut other, mut call) = (0, 0, 0);
            let found = loss_seen(runner.as_mut(), ids, windows, false, &mut |_, outputs| {
                let (some, others) = compare_heads(outputs, &gates[call]);
                (rows, other, call) = (rows + some, other + others, call + 1);
            });
            table.add(way, &format!("{recipe}: loss"), found - plain, most);
            let most = match (how.bits, how.exact_routing) {
                (Bits::Int4, _) => 1.0,
                (Bits::Int8, false) => MOST_OTHER_HEADS_ROUNDED,
                (Bits::Int8, true) => MOST_OTHER_HEADS,
            };
            table.add(way, &format!("{recipe}: other heads"), other as f64 / rows as f64, most);
        }
    }
    table.finish();
}

#[test]
fn digits_are_recognized() {
    let (folder, target) = (checkpoint("digits-moh-vit"), tempfile::tempdir().unwrap());
    let digits = digits(&folder);
    let mut table = Table::new("digits-moh-vit, quantised: share of the held-out images that are not recognized");
    for (i, (recipe, how)) in recipes().into_iter().enumerate() {
        for (way, mut runner) in ways(&folder, &target.path().join(i.to_string()), &how) {
            table.add(way, &recipe, 1.0 - accuracy(runner.as_mut(), &digits), 1.0 - LEAST_ACCURACY);
        }
    }
    table.finish();
}

/// The verification of exports, whole and layer by layer, takes the rounded weights into account: it is as tight as without them.
#[test]
fn exports_are_verified() {
    if !have_onnxruntime() {
        return;
    }
    for (folder, part) in [
        (golden("llama-moh-tiny"), None),
        (golden("vit-tiny-b"), None),
        (golden("moa-enc-tiny"), Some(Part::Encoder)),
        (golden("moa-dec-tiny"), Some(Part::Decoder)),
        (golden("dit-tiny-75"), None),
    ] {
        for (i, (recipe, how)) in recipes().into_iter().enumerate() {
            let target = tempfile::tempdir().unwrap();
            let output = target.path().join(format!("{i}.onnx"));
            let options = Options { quantize: Some(how.clone()), part, verify: Some(true), ..Options::default() };
            let name = folder.display();
            let report =
                moh_export::export(&folder, &output, &options).unwrap_or_else(|e| panic!("{name}, {recipe}: {e}"));
            let Verification::Agrees(agreement) = report.verification else { panic!("{name}, {recipe}: not run") };
            let float = how.activations == Activations::Float;
            assert!(!float || agreement.error < tolerance::model_output(DType::F32), "{name}, {recipe}: {agreement:?}");
            let mut checkpoint = Checkpoint::open(&folder, None).unwrap();
            if let Some(part) = part {
                checkpoint.configure("part", part.name());
            }
            let model = Model::load(&checkpoint, None).unwrap();
            let layers = verify_layers(&output, &model, false, target.path()).unwrap();
            assert!(layers.agrees, "{name}, {recipe}: {layers}");
        }
    }
}

/// The events of a profiled call of the model, with our library or without it.
fn events(model: &Path, dtype: ElementType, library: Option<PathBuf>) -> String {
    let folder = tempfile::tempdir().unwrap();
    let load = moh_runtime::Options {
        runtime: RuntimeChoice::Ort,
        profile: Some(folder.path().join("profile")),
        ops_library: library,
        ..moh_runtime::Options::default()
    };
    let mut model = moh_runtime::Model::load(model, &load).unwrap();
    let ids = |values: &[i64]| Tensor::new(vec![1, 3], values.to_vec()).unwrap();
    let mut inputs = vec![
        ("input_ids".to_owned(), ids(&[1, 2, 3])),
        ("attention_mask".to_owned(), ids(&[1, 1, 1])),
        ("position_ids".to_owned(), ids(&[0, 1, 2])),
    ];
    for (name, heads, dim) in Runner::caches(&model) {
        let shape = vec![1, heads, 0, dim];
        let empty = match dtype {
            ElementType::F16 => Tensor::new(shape, Vec::<half::f16>::new()),
            _ => Tensor::new(shape, Vec::<f32>::new()),
        };
        inputs.push((name, empty.unwrap()));
    }
    model.run(inputs.into_iter().map(|(name, tensor)| (name, tensor.into()))).unwrap();
    std::fs::read_to_string(model.end_profiling().unwrap()).unwrap()
}

/// onnxruntime makes one operator of DequantizeLinear and MatMul, for integers of every kind; ours is one.
#[test]
fn dense_layers_are_one_operator() {
    if !have_onnxruntime() {
        return;
    }
    for dtype in [ElementType::F32, ElementType::F16] {
        for (recipe, how) in recipes().into_iter().filter(|(_, how)| how.form != Form::Nbits) {
            let target = tempfile::tempdir().unwrap();
            let ours = how.form == Form::Moh;
            let options =
                Options { quantize: Some(how), dtype: Some(dtype), verify: Some(false), ..Options::default() };
            let model = export(&golden("llama-moh-tiny"), target.path(), &options);
            let events = events(&model, dtype, ours.then(ops_library));
            assert_eq!(events.contains("\"LinearNBits\""), ours, "{recipe}, {dtype}");
            assert_eq!(events.contains("\"MatMulNBits\""), !ours, "{recipe}, {dtype}");
            assert!(!events.contains("\"DequantizeLinear\""), "{recipe}, {dtype}");
        }
    }
}
