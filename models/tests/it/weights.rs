//! Models from weights of every form: as PyTorch saves them, of every type, with tied embeddings.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[allow(dead_code)]
#[path = "../../src/checkpoint/tests/torch/write.rs"]
mod write;

use candle_core::{Device, Tensor};
use half::{bf16, f16};
use moh_models::eager::Eager;
use moh_models::families::{Inputs, Model, Sizes};
use moh_models::sample::SampleData;
use moh_models::{Checkpoint, Error, WeightType};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(case)
}

/// Shapes and elements by name.
type Weights = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn weights(case: &str) -> Weights {
    let checkpoint = Checkpoint::open(&golden(case), None).unwrap();
    let weight = |name: &str| {
        let weight = checkpoint.get(name).unwrap();
        (name.to_owned(), (weight.shape().to_vec(), weight.to_f32().unwrap()))
    };
    checkpoint.names().map(weight).collect()
}

fn config(case: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(golden(case).join("config.json")).unwrap()).unwrap()
}

/// A state dict whose tensors all share storage "0", and that storage. Every other matrix lies there transposed.
fn state_dict(weights: &Weights, class: &str, element: impl Fn(f32) -> Vec<u8>) -> (Vec<u8>, Vec<u8>) {
    let total = weights.values().map(|(_, values)| values.len() as i64).sum();
    let (mut pairs, mut data, mut offset) = (Vec::new(), Vec::new(), 0);
    for (i, (name, (shape, values))) in weights.iter().enumerate() {
        let sizes: Vec<i64> = shape.iter().map(|&n| n as i64).collect();
        let mut strides: Vec<i64> = (0..sizes.len()).map(|axis| sizes[axis + 1..].iter().product()).collect();
        match *shape.as_slice() {
            [rows, columns] if i % 2 == 1 => {
                strides = vec![1, rows as i64];
                data.extend((0..values.len()).flat_map(|at| element(values[at % rows * columns + at / rows])));
            }
            _ => data.extend(values.iter().flat_map(|&value| element(value))),
        }
        pairs.push((name.as_str(), write::tensor(write::storage(class, "0", total), offset, &sizes, &strides)));
        offset += values.len() as i64;
    }
    (write::dict(&pairs), data)
}

fn folder_of(config: &Value, file: &[u8]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    std::fs::write(folder.path().join("model.pth"), file).unwrap();
    folder
}

fn saved(config: &Value, weights: &Weights, class: &str, element: impl Fn(f32) -> Vec<u8>) -> TempDir {
    let (state, data) = state_dict(weights, class, element);
    folder_of(config, &write::saved(state, &[&data]))
}

/// The first output of every sample.
fn outputs(model: &Model) -> Vec<Vec<f32>> {
    let tensor = |shape: &[usize], data: &SampleData| match data {
        SampleData::F32(values) => Tensor::from_slice(values, shape, &Device::Cpu).unwrap(),
        SampleData::I64(values) => Tensor::from_slice(values, shape, &Device::Cpu).unwrap(),
    };
    let run = |samples: &Vec<moh_models::sample::Sample>| {
        let inputs = samples.iter().map(|sample| (sample.name.clone(), tensor(&sample.shape, &sample.data)));
        let output = model.forward(&mut Eager::new(), &Inputs::new(inputs)).unwrap().remove(0);
        output.flatten_all().unwrap().to_vec1().unwrap()
    };
    model.samples(&Sizes::default()).iter().map(run).collect()
}

fn model(folder: &TempDir) -> Model {
    Model::load(&Checkpoint::open(folder.path(), None).unwrap(), None).unwrap()
}

#[test]
fn models_that_pytorch_saved() {
    for case in ["dit-tiny-75", "llama-moh-tiny", "vit-tiny-b"] {
        let expected = outputs(&Model::load(&Checkpoint::open(&golden(case), None).unwrap(), None).unwrap());
        let folder = saved(&config(case), &weights(case), "FloatStorage", |v| v.to_le_bytes().to_vec());
        assert_eq!(outputs(&model(&folder)), expected, "{case}");
    }
}

#[test]
fn weights_of_every_floating_point_type() {
    let (case, weights) = ("dit-tiny-75", weights("dit-tiny-75"));
    let rounded = |round: fn(f32) -> f32| -> Weights {
        let round_all = |values: &[f32]| values.iter().map(|&v| round(v)).collect();
        weights.iter().map(|(name, (shape, values))| (name.clone(), (shape.clone(), round_all(values)))).collect()
    };
    let check = |class: &str, dtype: WeightType, round: fn(f32) -> f32, element: fn(f32) -> Vec<u8>| {
        let exact = saved(&config(case), &rounded(round), "FloatStorage", |v| v.to_le_bytes().to_vec());
        let folder = saved(&config(case), &weights, class, element);
        let checkpoint = Checkpoint::open(folder.path(), None).unwrap();
        assert!(checkpoint.names().all(|name| checkpoint.get(name).unwrap().dtype() == dtype));
        assert_eq!(outputs(&model(&folder)), outputs(&model(&exact)), "{dtype}");
    };
    check("HalfStorage", WeightType::F16, |v| f16::from_f32(v).to_f32(), |v| f16::from_f32(v).to_le_bytes().to_vec());
    check(
        "BFloat16Storage",
        WeightType::BF16,
        |v| bf16::from_f32(v).to_f32(),
        |v| bf16::from_f32(v).to_le_bytes().to_vec(),
    );
    check("DoubleStorage", WeightType::F64, |v| v, |v| f64::from(v).to_le_bytes().to_vec());
}

/// Every tensor is read as what it is, whatever the others are.
#[test]
fn weights_of_several_types_in_one_file() {
    type Form = (&'static str, WeightType, fn(f32) -> f32, fn(f32) -> Vec<u8>);
    let forms: [Form; 4] = [
        ("FloatStorage", WeightType::F32, |v| v, |v| v.to_le_bytes().to_vec()),
        ("HalfStorage", WeightType::F16, |v| f16::from_f32(v).to_f32(), |v| f16::from_f32(v).to_le_bytes().to_vec()),
        (
            "BFloat16Storage",
            WeightType::BF16,
            |v| bf16::from_f32(v).to_f32(),
            |v| bf16::from_f32(v).to_le_bytes().to_vec(),
        ),
        ("DoubleStorage", WeightType::F64, |v| v, |v| f64::from(v).to_le_bytes().to_vec()),
    ];
    let case = "llama-moh-tiny";
    let (mut rounded, mut pairs, mut storages, mut types) = (weights(case), Vec::new(), Vec::new(), Vec::new());
    let original = weights(case);
    for (i, (name, (shape, values))) in original.iter().enumerate() {
        let (class, dtype, round, element) = forms[i % forms.len()];
        let sizes: Vec<i64> = shape.iter().map(|&n| n as i64).collect();
        let strides: Vec<i64> = (0..sizes.len()).map(|axis| sizes[axis + 1..].iter().product()).collect();
        let storage = write::storage(class, &i.to_string(), values.len() as i64);
        pairs.push((name.as_str(), write::tensor(storage, 0, &sizes, &strides)));
        storages.push(values.iter().flat_map(|&v| element(v)).collect::<Vec<u8>>());
        types.push((name, dtype));
        rounded.get_mut(name).unwrap().1.iter_mut().for_each(|v| *v = round(*v));
    }
    let storages: Vec<&[u8]> = storages.iter().map(Vec::as_slice).collect();
    let mixed = folder_of(&config(case), &write::saved(write::dict(&pairs), &storages));
    let checkpoint = Checkpoint::open(mixed.path(), None).unwrap();
    for (name, dtype) in types {
        assert_eq!(checkpoint.get(name).unwrap().dtype(), dtype, "{name}");
    }
    let exact = saved(&config(case), &rounded, "FloatStorage", |v| v.to_le_bytes().to_vec());
    assert_eq!(outputs(&model(&mixed)), outputs(&model(&exact)));
}

#[test]
fn tied_embeddings() {
    let case = "llama-moh-tiny";
    let (mut weights, mut config) = (weights(case), config(case));
    let float = |v: f32| v.to_le_bytes().to_vec();
    let embeddings = weights["model.embed_tokens.weight"].clone();
    weights.insert("lm_head.weight".to_owned(), embeddings);
    let expected = outputs(&model(&saved(&config, &weights, "FloatStorage", float)));

    weights.remove("lm_head.weight");
    let untied = saved(&config, &weights, "FloatStorage", float);
    let error = Model::load(&Checkpoint::open(untied.path(), None).unwrap(), None).err().unwrap();
    assert!(matches!(error, Error::Tensors(_)) && error.to_string().contains("1 missing:\n  \"lm_head.weight\""));

    config["tie_word_embeddings"] = Value::Bool(true);
    assert_eq!(outputs(&model(&saved(&config, &weights, "FloatStorage", float))), expected);
    // PyTorch saves a tied tensor under both of its names.
    weights.insert("lm_head.weight".to_owned(), weights["model.embed_tokens.weight"].clone());
    let twice = saved(&config, &weights, "FloatStorage", float);
    assert_eq!(outputs(&model(&twice)), expected);
    // Which is one tensor of the model: what is trained, and what is counted.
    let twice = Checkpoint::open(twice.path(), None).unwrap();
    let loaded = Model::load(&twice, None).unwrap();
    assert!(loaded.tensors().iter().all(|(name, _)| name != "lm_head.weight"));
    let planned = Model::plan(twice.config(), None).unwrap().0;
    assert_eq!((loaded.parameters(), loaded.tensors().len()), (planned.parameters(), planned.tensors().len()));

    // safetensors' save_model keeps one of the names.
    weights.remove("model.embed_tokens.weight");
    assert_eq!(outputs(&model(&saved(&config, &weights, "FloatStorage", float))), expected);
}
