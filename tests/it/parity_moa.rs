//! MoA on every path: the layers against the published code's data, complete models against candle.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use moh::{Runner, Table, Tensors, floats, gate_errors, golden, max_abs, read_tensors, runtimes, ways, with_gates};
use moh_export::{Options, Part};
use moh_models::sample::{Rng, SampleData};
use moh_models::{Config, Model};
use moh_operators::{GATES, tolerance};
use moh_runtime::{Dim, Tensor};
use moh_tasks::translate::{BeamOptions, TranslationModel};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;

/// (time, batch, channels) with the batch first.
fn batch_first(x: &Tensor) -> Tensor {
    let &[time, batch, width] = x.shape() else { panic!("{:?}", x.shape()) };
    let values = floats(x);
    let row = |b: usize, t: usize| &values[(t * batch + b) * width..][..width];
    let rows: Vec<&[f32]> = (0..batch).flat_map(|b| (0..time).map(move |t| row(b, t))).collect();
    Tensor::new(vec![batch, time, width], rows.concat()).unwrap()
}

/// The golden data, batch first; masks as the models take them, 1 where a token is to be seen.
fn reference(case: &str) -> Tensors {
    let tensors = read_tensors(&golden(case).join("reference.safetensors")).into_iter().map(|(name, tensor)| {
        let value = match tensor.as_slice::<i64>() {
            Some(padding) => Tensor::new(tensor.shape(), padding.iter().map(|p| 1 - p).collect::<Vec<i64>>()).unwrap(),
            None if tensor.shape().len() == 3 && !name.starts_with(GATES) => batch_first(&tensor),
            None => tensor,
        };
        (name, value)
    });
    tensors.collect()
}

/// Part of a tensor's second axis.
fn narrow(x: &Tensor, start: usize, length: usize) -> Tensor {
    let (shape, axis) = (x.shape(), x.shape()[1]);
    let inner: usize = shape[2..].iter().product();
    let shape = [&[shape[0], length], &shape[2..]].concat();
    let range = start * inner..(start + length) * inner;
    match x.as_slice::<i64>() {
        Some(ids) => {
            Tensor::new(shape, ids.chunks(axis).flat_map(|row| row[range.clone()].to_vec()).collect()).unwrap()
        }
        None => {
            let rows = floats(x);
            let part = rows.chunks(axis * inner).flat_map(|row| row[range.clone()].to_vec());
            Tensor::new(shape, part.collect::<Vec<_>>()).unwrap()
        }
    }
}

fn join(parts: &[Tensor]) -> Tensor {
    let (batch, width) = (parts[0].shape()[0], parts[0].shape()[2]);
    let length = parts.iter().map(|part| part.shape()[1]).sum();
    let values: Vec<Vec<f32>> = parts.iter().map(floats).collect();
    let row =
        |b: usize| parts.iter().zip(&values).map(move |(p, v)| &v[b * p.shape()[1] * width..][..p.shape()[1] * width]);
    let rows: Vec<&[f32]> = (0..batch).flat_map(row).collect();
    Tensor::new(vec![batch, length, width], rows.concat()).unwrap()
}

/// A target and the source that it is made from.
struct Translation {
    tokens: (&'static str, Tensor),
    source: Tensor,
    mask: Tensor,
}

impl Translation {
    /// The decoder's first output of calls of these lengths. The source is given in the first call; then its keys and values
    /// are in the cache.
    fn decode(&self, runner: &mut dyn Runner, lengths: &[usize]) -> Tensor {
        let batch = self.source.shape()[0];
        let empty = |(name, heads, dim): (String, usize, usize)| {
            (name, Tensor::new(vec![batch, heads, 0, dim], Vec::<f32>::new()).unwrap())
        };
        let mut cache: Tensors = runner.caches().into_iter().map(empty).collect();
        let (mut start, mut parts) = (0, Vec::new());
        for &length in lengths {
            let known = if start == 0 { self.source.shape()[1] } else { 0 };
            let mut inputs = cache;
            inputs.insert(self.tokens.0.to_owned(), narrow(&self.tokens.1, start, length));
            inputs.insert("encoder_hidden_states".to_owned(), narrow(&self.source, 0, known));
            inputs.insert("encoder_attention_mask".to_owned(), self.mask.clone());
            let outputs = runner.run(&inputs);
            let (present, first): (Tensors, Tensors) = outputs
                .into_iter()
                .filter(|(name, _)| !name.starts_with(GATES))
                .partition(|(name, _)| name.starts_with("present."));
            parts.extend(first.into_values());
            cache = present.into_iter().map(|(name, v)| (name.replacen("present", "past_key_values", 1), v)).collect();
            start += length;
        }
        assert_eq!(parts.len(), lengths.len());
        join(&parts)
    }
}

#[test]
fn golden_encoder() {
    let (reference, target) = (reference("moa-enc-tiny"), tempfile::tempdir().unwrap());
    let inputs = Tensors::from([
        ("inputs_embeds".to_owned(), reference["x"].clone()),
        ("attention_mask".to_owned(), reference["padding_mask"].clone()),
    ]);
    let mut table = Table::new("golden moa-enc-tiny, f32");
    for (way, mut runner) in ways(&golden("moa-enc-tiny"), target.path(), &with_gates()) {
        let outputs = runner.run(&inputs);
        let error = max_abs(&outputs["last_hidden_state"], &reference["out"]);
        table.add(&way, "out", error, tolerance::GOLDEN_F32);
        let (error, other) = gate_errors(&outputs, &reference);
        table.add(&way, "gates", error, tolerance::GOLDEN_F32);
        table.add(&way, "experts selected otherwise", other as f64, 0.0);
    }
    table.finish();
}

#[test]
fn golden_decoder() {
    let (reference, target) = (reference("moa-dec-tiny"), tempfile::tempdir().unwrap());
    let translation = Translation {
        tokens: ("inputs_embeds", reference["x"].clone()),
        source: reference["encoder_out"].clone(),
        mask: reference["encoder_padding_mask"].clone(),
    };
    let mut table = Table::new("golden moa-dec-tiny, f32");
    for (way, mut runner) in ways(&golden("moa-dec-tiny"), target.path(), &with_gates()) {
        for (what, expected, lengths) in [
            ("out", "out", vec![9]),
            ("step by step", "incremental.out", vec![1; 9]),
            ("in parts", "out", vec![4, 2, 3]),
        ] {
            let out = translation.decode(runner.as_mut(), &lengths);
            table.add(&way, what, max_abs(&out, &reference[expected]), tolerance::GOLDEN_F32);
        }
        let mut inputs: Tensors = runner
            .caches()
            .into_iter()
            .map(|(name, heads, dim)| (name, Tensor::new(vec![3, heads, 0, dim], Vec::<f32>::new()).unwrap()))
            .collect();
        inputs.insert("inputs_embeds".to_owned(), translation.tokens.1.clone());
        inputs.insert("encoder_hidden_states".to_owned(), translation.source.clone());
        inputs.insert("encoder_attention_mask".to_owned(), translation.mask.clone());
        let (error, other) = gate_errors(&runner.run(&inputs), &reference);
        table.add(&way, "gates", error, tolerance::GOLDEN_F32);
        table.add(&way, "experts selected otherwise", other as f64, 0.0);
    }
    table.finish();
}

/// A translation model of random weights: both parts in one checkpoint, embeddings shared.
fn translation_model(folder: &Path, extra: Value) {
    let mut config = json!({
        "family": "moa", "layers": 2, "encoder_embed_dim": 32, "decoder_embed_dim": 32, "head_dim": 16, "num_expert": 6,
        "attention_heads": 2, "ffn_embed_dim": 48, "share_all_embeddings": true, "vocab_size": 50,
    });
    config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    let mut tensors = Vec::new();
    for part in ["encoder", "decoder"] {
        let mut values = config.as_object().unwrap().clone();
        values.insert("part".to_owned(), part.into());
        tensors.extend(Model::plan(&Config::new("config.json", values), None).unwrap().1);
    }
    let stored_once = ["decoder.embed_tokens.weight", "decoder.output_projection.weight"];
    let rng = &mut Rng::new(3);
    let tensors = tensors.into_iter().filter(|(name, _)| !stored_once.contains(&name.as_str())).map(|(name, shape)| {
        let SampleData::F32(values) = rng.normals(&name, &shape).data else { unreachable!() };
        let centre = if name.ends_with("norm.weight") { 1.0 } else { 0.0 };
        let values: Vec<f32> = values.iter().map(|v| centre + 0.2 * v).collect();
        (name, candle_core::Tensor::from_vec(values, shape, &candle_core::Device::Cpu).unwrap())
    });
    let tensors: HashMap<String, candle_core::Tensor> = tensors.collect();
    config.as_object_mut().unwrap().remove("vocab_size");
    std::fs::create_dir(folder).unwrap();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
}

const SOURCES: [[i64; 5]; 3] = [[7, 30, 12, 49, 2], [8, 21, 2, 1, 1], [1, 1, 1, 14, 2]];
const TARGETS: [[i64; 4]; 3] = [[2, 5, 19, 40], [2, 33, 6, 1], [2, 2, 1, 1]];

/// Both parts of a translation model, on padded sources and targets.
fn translation(name: &str, extra: Value) {
    let target = tempfile::tempdir().unwrap();
    let folder = target.path().join("checkpoint");
    translation_model(&folder, extra);
    let part = |part: Part| {
        let options = Options { part: Some(part), ..Options::default() };
        ways(&folder, &target.path().join(part.name()), &options)
    };
    let matrix = |ids: Vec<i64>| Tensor::new(vec![3, ids.len() / 3], ids).unwrap();
    let mask = matrix(SOURCES.concat().iter().map(|&id| i64::from(id != 1)).collect());
    let inputs = Tensors::from([
        ("input_ids".to_owned(), matrix(SOURCES.concat())),
        ("attention_mask".to_owned(), mask.clone()),
    ]);
    let mut expected: Tensors = Tensors::new();
    let mut table = Table::new(&format!("{name}, f32, against candle"));
    for ((way, mut encoder), (_, mut decoder)) in part(Part::Encoder).into_iter().zip(part(Part::Decoder)) {
        let states = encoder.run(&inputs)["last_hidden_state"].clone();
        let tokens = ("input_ids", matrix(TARGETS.concat()));
        let translation = Translation { tokens, source: states.clone(), mask: mask.clone() };
        let at_once = translation.decode(decoder.as_mut(), &[4]);
        let steps = translation.decode(decoder.as_mut(), &[1; 4]);
        for (what, output, found) in [
            ("encoder: last_hidden_state", "states", states),
            ("decoder: logits", "logits", at_once),
            ("decoder: logits, step by step", "logits", steps),
        ] {
            let expected = expected.entry(output.to_owned()).or_insert_with(|| found.clone());
            table.add(&way, what, max_abs(&found, expected), tolerance::GOLDEN_F32);
        }
    }
    table.finish();
}

#[test]
fn translation_models() {
    translation("a translation model", json!({}));
    let variant =
        json!({"normalize_before": true, "learned_pos": true, "activation_fn": "gelu", "renormalize_gates": true});
    translation("pre-norm, learned positions, GELU, renormalised gates", variant);
}

#[test]
fn translation_models_with_mixtures() {
    translation("mixtures of feed-forward experts", json!({"ffd_type": "moe", "gating": "noisy"}));
}

/// Sums of log-probabilities, by a decoder that gets the whole target each time, and nothing in its caches.
struct Uncached {
    decoder: moh_runtime::Model,
    states: moh_runtime::Value,
}

impl Uncached {
    /// Log-probabilities of what follows a target.
    fn next(&mut self, target: &[i64]) -> Vec<f64> {
        let source = self.states.shape()[1];
        let empty = |info: &moh_runtime::TensorInfo| {
            let [_, Dim::Fixed(heads), _, Dim::Fixed(width)] = info.dims[..] else { panic!("{info}") };
            (info.name.clone(), Tensor::new(vec![1, heads, 0, width], Vec::<f32>::new()).unwrap().into())
        };
        let caches = self.decoder.inputs().iter().filter(|info| info.name.starts_with("past_key_values."));
        let mut inputs: Vec<(String, moh_runtime::Value)> = caches.map(empty).collect();
        inputs.push(("input_ids".to_owned(), Tensor::new([1, target.len()], target.to_vec()).unwrap().into()));
        inputs.push(("encoder_hidden_states".to_owned(), self.states.clone()));
        inputs
            .push(("encoder_attention_mask".to_owned(), Tensor::new([1, source], vec![1i64; source]).unwrap().into()));
        let logits = floats(&self.decoder.run(inputs).unwrap()[0].to_tensor().unwrap());
        let last: Vec<f64> = logits[logits.len() - VOCABULARY..].iter().map(|&x| f64::from(x)).collect();
        let sum = last.iter().map(|x| x.exp()).sum::<f64>().ln();
        last.iter().map(|x| x - sum).collect()
    }

    /// The log-probability of a whole hypothesis.
    fn sum(&mut self, tokens: &[i64]) -> f64 {
        let target = [&[END][..], tokens].concat();
        (1..target.len()).map(|n| self.next(&target[..n])[target[n] as usize]).sum()
    }
}

const VOCABULARY: usize = 6;
const END: i64 = 2;

#[test]
fn translations_are_those_of_an_exhaustive_search() {
    let target = tempfile::tempdir().unwrap();
    let checkpoint = target.path().join("checkpoint");
    translation_model(&checkpoint, json!({ "vocab_size": VOCABULARY }));
    for part in [Part::Encoder, Part::Decoder] {
        let output = target.path().join(format!("{}.onnx", part.name()));
        moh_export::export(&checkpoint, &output, &Options { part: Some(part), ..Options::default() }).unwrap();
    }
    for (runtime, options) in runtimes() {
        let load = |name: &str| moh_runtime::Model::load(target.path().join(name), &options).unwrap();
        let mut model = TranslationModel::new(load("encoder.onnx"), load("decoder.onnx")).unwrap();
        assert_eq!(model.vocabulary(), Some(VOCABULARY));
        for source in [[4i64, 3, 5, 3, 2], [5, 5, 0, 4, 2]] {
            let tensor = |ids: Vec<i64>| moh_runtime::Value::from(Tensor::new([1, ids.len()], ids).unwrap());
            let inputs = [("input_ids", tensor(source.to_vec())), ("attention_mask", tensor(vec![1; 5]))];
            let states = load("encoder.onnx").run(inputs).unwrap().swap_remove(0);
            let mut uncached = Uncached { decoder: load("decoder.onnx"), states };
            let search = |beams: usize, max_tokens: usize| BeamOptions {
                beams,
                length_penalty: 0.6,
                max_tokens,
                start: END,
                end: END,
                padding: Some(1),
            };
            // Every hypothesis of up to three tokens.
            let mut all: Vec<Vec<i64>> = vec![Vec::new()];
            for _ in 0..3 {
                let longer = |tokens: &Vec<i64>| match tokens.last() {
                    Some(&END) => vec![tokens.clone()],
                    _ => [0, 2, 3, 4, 5].map(|token| [&tokens[..], &[token]].concat()).to_vec(),
                };
                all = all.iter().flat_map(longer).collect();
            }
            // A translation has a token beside the one that ends it.
            all.retain(|tokens| *tokens != [END]);
            let score = |sum: f64, tokens: &[i64]| sum / (tokens.len() as f64).powf(0.6);
            let mut scored: Vec<(f64, Vec<i64>)> =
                all.into_iter().map(|tokens| (score(uncached.sum(&tokens), &tokens), tokens)).collect();
            scored.sort_by(|a, b| b.0.total_cmp(&a.0));
            let found = model.translate(&source, &search(200, 3)).unwrap();
            assert_eq!(found.len(), scored.len(), "{runtime}");
            for (found, (expected, _)) in found.iter().zip(&scored) {
                assert!((found.score - expected).abs() < 1e-3, "{runtime}: {found:?}, expected {expected}");
            }
            assert_eq!(found[0].tokens, scored[0].1, "{runtime}");
            // Hypotheses that beams drop, take up again and reorder.
            for found in model.translate(&source, &search(3, 12)).unwrap() {
                let expected = score(uncached.sum(&found.tokens), &found.tokens);
                assert!((found.score - expected).abs() < 1e-3, "{runtime}: {found:?}, expected {expected}");
            }
            let mut greedy = vec![END];
            while greedy.len() < 10 && (greedy.len() == 1 || greedy.last() != Some(&END)) {
                let next = uncached.next(&greedy);
                let ends = greedy.len() > 1;
                let possible = (0..VOCABULARY).filter(|&token| token != 1 && (ends || token != END as usize));
                greedy.push(possible.max_by(|&a, &b| next[a].total_cmp(&next[b])).unwrap() as i64);
            }
            assert_eq!(model.translate(&source, &search(1, 9)).unwrap()[0].tokens, greedy[1..], "{runtime}");
        }
    }
}
