//! Searched shared heads, from a training to the file: the sets are in its nodes, and every runtime shares them.

use moh::{Table, Tensors, floats, gate_errors, max_abs, ways, with_gates};
use moh_export::proto::ModelProto;
use moh_models::eager::Eager;
use moh_models::families::{Inputs, Sizes};
use moh_models::sample::{Rng, Sample, SampleData};
use moh_models::{Config, Model, Parameters, initial, sharing};
use moh_operators::{GATES, tolerance};
use moh_runtime::Tensor;
use moh_train::{Loss, Options, Result, Task, Trainer};
use prost::Message;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;

/// Random numbers where a training would have data: the mean of the squares of what the model gives.
struct Search(Model);

impl Task for Search {
    fn loss(&mut self, ops: &mut Eager, rng: &mut Rng) -> Result<Loss> {
        ops.search_shared_heads(Some(rng.bits()))?;
        let sample = self.0.samples(&Sizes::default()).swap_remove(0);
        let inputs = Inputs::new(sample.iter().map(|sample| (sample.name.clone(), in_candle(sample))));
        let output = self.0.forward(ops, &inputs)?.swap_remove(0);
        Loss::sum(vec![("squares", 1.0, output.sqr()?.mean_all()?)])
    }
}

fn in_candle(sample: &Sample) -> candle_core::Tensor {
    let device = &candle_core::Device::Cpu;
    match &sample.data {
        SampleData::F32(values) => candle_core::Tensor::from_slice(values, sample.shape.as_slice(), device).unwrap(),
        SampleData::I64(values) => candle_core::Tensor::from_slice(values, sample.shape.as_slice(), device).unwrap(),
    }
}

/// Numbers that keep every part of a model alive, and scores far apart.
fn start(model: &Model) -> Parameters {
    let weights = model.tensors().iter().map(|(name, shape)| {
        let mut rng = Rng::new(initial::seed_of(9, name));
        let (centre, deviation) = match shape.as_slice() {
            [_] => (1.0, 0.1),
            [.., width] => (0.0, (*width as f32).powf(-0.5)),
            [] => (0.0, 1.0),
        };
        let values = (0..shape.iter().product()).map(|_| centre + deviation * rng.normal()).collect();
        let var = candle_core::Var::from_vec::<_, f32>(values, shape.as_slice(), &candle_core::Device::Cpu);
        (name.clone(), var.unwrap())
    });
    let weights = Parameters::new(weights, &[model], &candle_core::Device::Cpu).unwrap();
    sharing::parameters(model, &weights).unwrap()
}

/// Trains a search for some steps, and writes the checkpoint of what it chose. Gives the sets.
fn searched(config: &Value, folder: &Path) -> Vec<Vec<i64>> {
    let config = Config::new("config.json", config.as_object().unwrap().clone());
    let model = Model::plan(&config, None).unwrap().0;
    let options = Options { steps: 6, learning_rate: 0.02, warmup: 0, seed: 2, ..Options::default() };
    let mut trainer = Trainer::open(&folder.join("search"), start(&model), Vec::new(), options).unwrap();
    let mut task = Search(model);
    trainer.train(&mut task, |_| ()).unwrap();
    let chosen = sharing::chosen(&config, &task.0, trainer.parameters()).unwrap();
    let sets = serde_json::from_value(chosen.config["shared_heads"].clone()).unwrap();
    let tensors: HashMap<&str, candle_core::Tensor> =
        chosen.parameters.iter().map(|(name, var)| (name, var.as_detached_tensor())).collect();
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
    std::fs::write(folder.join("config.json"), serde_json::to_vec(&chosen.config).unwrap()).unwrap();
    sets
}

fn agree(what: &str, config: Value) {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("chosen");
    std::fs::create_dir(&folder).unwrap();
    let sets = searched(&config, &folder);
    // A set that the first heads of a layer are not.
    assert!(sets.iter().any(|set| set.iter().zip(0..).any(|(head, i)| *head != i)), "{what}: {sets:?}");
    let model = Model::load(&moh_models::Checkpoint::open(&folder, None).unwrap(), None).unwrap();
    let inputs: Tensors = model.samples(&Sizes::default())[0]
        .iter()
        .map(|sample| {
            let tensor = match &sample.data {
                SampleData::F32(values) => Tensor::new(sample.shape.clone(), values.clone()),
                SampleData::I64(values) => Tensor::new(sample.shape.clone(), values.clone()),
            };
            (sample.name.clone(), tensor.unwrap())
        })
        .collect();
    let output = model.outputs()[0].name.clone();
    let mut table = Table::new(&format!("{what}: {sets:?}"));
    let mut expected = Tensors::new();
    for (way, mut runner) in ways(&folder, root.path(), &with_gates()) {
        let found = runner.run(&inputs);
        if expected.is_empty() {
            let shown = |name: &str| name == output || name.starts_with(GATES);
            expected = found.clone().into_iter().filter(|(name, _)| shown(name)).collect();
        }
        table.add(&way, &output, max_abs(&found[&output], &expected[&output]), tolerance::GOLDEN_DIT_F32);
        let gates = expected.iter().filter(|(name, _)| name.starts_with(GATES));
        let gates = gates.map(|(name, value)| (name.clone(), value.clone())).collect();
        let (error, other) = gate_errors(&found, &gates);
        table.add(&way, "gates", error, tolerance::GOLDEN_F32);
        table.add(&way, "gates that are 0 otherwise", other as f64, 0.0);
        for (layer, set) in model.layers().iter().zip(&sets) {
            let gates = floats(&found[&format!("{GATES}{}", layer.path)]);
            let on = |head: &i64| gates.chunks(layer.heads.num_heads).all(|gates| gates[*head as usize] != 0.0);
            assert!(set.iter().all(on), "{way}: {} does not share {set:?}", layer.path);
        }
    }
    table.finish();

    let file = ModelProto::decode(std::fs::read(root.path().join("routed/model.onnx")).unwrap().as_slice()).unwrap();
    let routers = file.graph.unwrap().node.into_iter().filter(|node| node.op_type.as_deref() == Some("TopKRouter"));
    let of_nodes = routers.map(|node| {
        let shared = node.attribute.into_iter().find(|attribute| attribute.name.as_deref() == Some("shared_heads"));
        shared.map(|attribute| attribute.ints).unwrap_or_default()
    });
    let routed = model.layers().into_iter().zip(&sets).filter(|(layer, _)| layer.heads.top_k > 0);
    assert_eq!(of_nodes.collect::<Vec<_>>(), routed.map(|(_, set)| set.clone()).collect::<Vec<_>>());
}

fn llama(more: Value) -> Value {
    let mut config = json!({
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "max_position_embeddings": 64,
    });
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

#[test]
fn language_models() {
    agree(
        "query norms",
        llama(json!({"family": "moh-llama", "moh_shared_fraction": 0.0, "moh_routed_fraction": 0.75})),
    );
    agree("two-stage router", llama(json!({"family": "moh-llm", "shared_head": 0, "routed_head": 6})));
}

#[test]
fn diffusion_transformer() {
    let config = json!({
        "family": "moh-dit", "input_size": 8, "patch_size": 2, "in_channels": 2, "hidden_size": 48, "depth": 3, "num_heads": 6,
        "mlp_ratio": 2.0, "num_classes": 3, "shared_head": [6, 0, 0], "routed_head": [0, 4, 5],
    });
    agree("DiT", config);
}
