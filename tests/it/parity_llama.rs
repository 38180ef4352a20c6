//! Language models that no published data covers: candle against every runtime, with weights of every kind and both caches.

use moh::{
    Candle, Runner, Table, Tensors, export, gate_errors, greedy, greedy_in, max_abs, runtimes, ways, with_gates,
};
use moh_export::quantize::{Bits, Form, Quantize};
use moh_export::{Cache, ElementType, Options};
use moh_models::sample::{Rng, SampleData};
use moh_models::{Config, Model};
use moh_operators::{DType, GATES, tolerance};
use moh_runtime::Tensor;
use serde_json::{Value, json};
use std::path::Path;

/// Four groups of query heads in one layer, two in the other model.
fn grouped(more: Value) -> Value {
    let mut config = json!({
        "family": "gqe-llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
        "group_top_k": [2, 1], "group_shared_heads": 1,
    });
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

/// Heads of unequal rotation and width, of which two of three experts are chosen.
fn switchhead(more: Value) -> Value {
    let mut config = json!({
        "family": "switchhead", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "head_dim": 32, "max_position_embeddings": 64, "num_experts": 3, "moe_k": 2,
    });
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

/// Writes a checkpoint whose scores are far apart.
fn checkpoint(folder: &Path, config: &Value) {
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let (_, tensors) = Model::plan(&Config::read(&folder.join("config.json")).unwrap(), None).unwrap();
    let rng = &mut Rng::new(7);
    let weight = |(name, shape): (String, Vec<usize>)| {
        let SampleData::F32(values) = rng.normals(&name, &shape).data else { unreachable!() };
        let (centre, deviation) = match shape.as_slice() {
            [_] => (1.0, 0.1),
            [.., width] => (0.0, (*width as f32).powf(-0.5)),
            [] => (0.0, 1.0),
        };
        let values: Vec<f32> = values.iter().map(|v| centre + deviation * v).collect();
        (name, candle_core::Tensor::from_vec(values, shape, &candle_core::Device::Cpu).unwrap())
    };
    let weights: std::collections::HashMap<String, candle_core::Tensor> = tensors.into_iter().map(weight).collect();
    candle_core::safetensors::save(&weights, folder.join("model.safetensors")).unwrap();
}

/// Prompts of nine tokens, the second padded on the left, and their mask.
fn prompts() -> [Tensor; 2] {
    let (ids, mask) = (
        (0..18).map(|i| i * 37 % 128).collect::<Vec<i64>>(),
        (0..18).map(|i| i64::from(!(9..12).contains(&i))).collect::<Vec<i64>>(),
    );
    [ids, mask].map(|values| Tensor::new(vec![2, 9], values).unwrap())
}

/// Logits, gates and caches for the unpadded prompt.
fn outputs(runner: &mut dyn Runner, half: bool) -> Tensors {
    let matrix = |value: &dyn Fn(i64) -> i64| Tensor::new(vec![1, 9], (0..9).map(value).collect::<Vec<i64>>()).unwrap();
    let inputs = [
        ("input_ids", matrix(&|i| i * 37 % 128)),
        ("attention_mask", matrix(&|_| 1)),
        ("position_ids", matrix(&|i| i)),
    ];
    let mut inputs: Tensors = inputs.map(|(name, tensor)| (name.to_owned(), tensor)).into();
    for (name, heads, dim) in runner.caches() {
        let shape = vec![1, heads, 0, dim];
        let empty =
            if half { Tensor::new(shape, Vec::<half::f16>::new()) } else { Tensor::new(shape, Vec::<f32>::new()) };
        inputs.insert(name, empty.unwrap());
    }
    runner.run(&inputs)
}

fn only_gates(outputs: &Tensors) -> Tensors {
    outputs
        .iter()
        .filter(|(name, _)| name.starts_with(GATES))
        .map(|(name, gates)| (name.clone(), gates.clone()))
        .collect()
}

fn agree(what: &str, config: &Value) {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("checkpoint");
    checkpoint(&source, config);
    let mut table = Table::new(what);
    let expected = outputs(&mut Candle::load(&source, None), false);
    let [ids, mask] = prompts();
    let (tokens, logits) = greedy(&mut Candle::load(&source, None), &ids, &mask, 8);
    for cache in [Cache::Concat, Cache::InPlace] {
        let options = Options { cache: Some(cache), ..with_gates() };
        for (way, mut runner) in ways(&source, &folder.path().join(format!("{cache:?}")), &options) {
            let way = format!("{way}, {cache:?}");
            let found = outputs(runner.as_mut(), false);
            table.add(&way, "logits", max_abs(&found["logits"], &expected["logits"]), tolerance::GOLDEN_F32);
            let (error, other) = gate_errors(&found, &only_gates(&expected));
            table.add(&way, "gates", error, tolerance::GOLDEN_F32);
            table.add(&way, "gates that are 0 otherwise", other as f64, 0.0);
            let rooms: &[usize] = if cache == Cache::InPlace { &[0, 40] } else { &[0] };
            for room in rooms {
                let (generated, scores) = greedy_in(runner.as_mut(), &ids, &mask, 8, *room);
                let other = generated.concat().iter().zip(tokens.concat()).filter(|(a, b)| **a != *b).count();
                table.add(&way, "greedy tokens that differ", other as f64, 0.0);
                let differences = scores
                    .iter()
                    .flatten()
                    .flatten()
                    .zip(logits.iter().flatten().flatten())
                    .map(|(a, b)| (a - b).abs());
                table.add(&way, "generated logits", differences.fold(0.0, f32::max), tolerance::GOLDEN_F32);
            }
        }
    }
    table.finish();
}

/// Weights in 8 and 4 bits against candle with weights that are rounded alike; float16 against float32.
fn agree_rounded(what: &str, config: &Value, operators: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("checkpoint");
    checkpoint(&source, config);
    let mut table = Table::new(what);
    for bits in [Bits::Int8, Bits::Int4] {
        let how = Quantize { form: Form::Moh, exact_routing: false, ..Quantize::new(bits) };
        let model =
            export(&source, &folder.path().join(bits.name()), &Options { quantize: Some(how.clone()), ..with_gates() });
        let text = std::fs::read(&model).unwrap();
        for name in operators {
            assert!(
                text.windows(name.len()).any(|part| part == name.as_bytes()),
                "{what}: no {name} in {}",
                bits.name()
            );
        }
        let expected = outputs(&mut Candle::quantized(&source, &how), false);
        for (way, options) in runtimes() {
            let mut model = moh_runtime::Model::load(&model, &options).unwrap();
            let found = outputs(&mut model, false);
            let way = format!("{way}, {}", bits.name());
            table.add(&way, "logits", max_abs(&found["logits"], &expected["logits"]), tolerance::GOLDEN_F32);
            let (_, other) = gate_errors(&found, &only_gates(&expected));
            table.add(&way, "gates that are 0 otherwise", other as f64, 0.0);
        }
    }
    let half = Options { dtype: Some(ElementType::F16), ..with_gates() };
    let model = export(&source, &folder.path().join("f16"), &half);
    let expected = outputs(&mut Candle::load(&source, None), false);
    let largest = moh::floats(&expected["logits"]).iter().fold(1f32, |max, v| max.max(v.abs()));
    for (way, options) in runtimes() {
        let found = outputs(&mut moh_runtime::Model::load(&model, &options).unwrap(), true);
        let way = format!("{way}, float16");
        let wide = Tensor::new(expected["logits"].shape(), moh::floats(&found["logits"])).unwrap();
        table.add(&way, "logits", max_abs(&wide, &expected["logits"]) / largest, tolerance::model_output(DType::F16));
        let (_, other) = gate_errors(&found, &only_gates(&expected));
        table.add(&way, "gates that are 0 otherwise", other as f64, 0.0);
    }
    table.finish();
}

#[test]
fn grouped_query_experts() {
    agree("gqe-llama, a shared head in each group", &grouped(json!({})));
    agree(
        "gqe-llama, four groups",
        &grouped(json!({"num_key_value_heads": 4, "group_top_k": [1, 2], "group_shared_heads": 0})),
    );
}

#[test]
fn switchheads() {
    agree("switchhead, one expert and whole rotation", &switchhead(json!({"moe_k": 1, "rotate_fraction": 1.0})));
}

#[test]
fn switchheads_rounded() {
    agree_rounded("switchhead", &switchhead(json!({})), &["RoutedProjectionNBits", "RoutedCombineNBits"]);
}

#[test]
fn grouped_query_experts_rounded() {
    agree_rounded("gqe-llama", &grouped(json!({})), &["RoutedProjectionNBits", "RoutedCombineNBits"]);
}
