//! Checkpoints of random weights, with the tensors that fairseq's state dict of such a model has.

use candle_core::{Device, Tensor};
use moh_models::sample::{Rng, SampleData};
use moh_models::{Checkpoint, Model};
use serde_json::{Value, json};
use std::collections::HashMap;

pub(crate) const WIDTH: usize = 16;
pub(crate) const SOURCE_WIDTH: usize = 12;
pub(crate) const HEAD_DIM: usize = 8;
pub(crate) const FFN: usize = 20;
pub(crate) const VOCAB: usize = 23;

/// A configuration with every size, and `extra` keys.
pub(crate) fn config(part: &str, extra: Value) -> Value {
    let mut config = json!({
        "family": "moa", "part": part, "layers": 2, "head_dim": HEAD_DIM, "num_expert": 6, "attention_heads": 2,
        "ffn_embed_dim": FFN, "activation_fn": "relu", "normalize_before": false, "ffd_type": "normal", "gating": "normal",
        "encoder_embed_dim": if part == "encoder" { WIDTH } else { SOURCE_WIDTH }, "decoder_embed_dim": WIDTH,
    });
    config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    config
}

pub(crate) type Shapes = Vec<(String, Vec<usize>)>;

/// Names and shapes of a stack's tensors, those that evaluation does not use among them.
pub(crate) fn stack(root: &str, config: &Value) -> Shapes {
    let mut shapes = Shapes::new();
    let mut add = |name: String, shape: &[usize]| shapes.push((name, shape.to_vec()));
    let experts = config["num_expert"].as_u64().unwrap() as usize;
    let decoder = root.starts_with("decoder");
    for i in 0..config["layers"].as_u64().unwrap() {
        let layer = format!("{root}.layers.{i}");
        let attentions = [("self_attn", WIDTH), ("encoder_attn", SOURCE_WIDTH)];
        for (module, source) in &attentions[..if decoder { 2 } else { 1 }] {
            let path = format!("{layer}.{module}");
            add(format!("{path}.q_proj.w_gate"), &[WIDTH, experts]);
            add(format!("{path}.q_proj.experts.w"), &[experts, WIDTH, HEAD_DIM]);
            add(format!("{path}.q_proj.output_experts.w"), &[experts, HEAD_DIM, WIDTH]);
            if config["gating"] == "noisy" {
                add(format!("{path}.q_proj.w_noise"), &[WIDTH, experts]);
            }
            add(format!("{path}.k_proj.weight"), &[HEAD_DIM, *source]);
            add(format!("{path}.v_proj.weight"), &[HEAD_DIM, *source]);
            add(format!("{path}_layer_norm.weight"), &[WIDTH]);
            add(format!("{path}_layer_norm.bias"), &[WIDTH]);
        }
        if config["ffd_type"] == "moe" {
            add(format!("{layer}.ffd.w_gate"), &[WIDTH, experts]);
            add(format!("{layer}.ffd.experts.w"), &[experts, WIDTH, WIDTH]);
            add(format!("{layer}.ffd.output_experts.w"), &[experts, WIDTH, WIDTH]);
            add(format!("{layer}.ffd.w_noise"), &[WIDTH, experts]);
        } else {
            for (first, second) in [("fc1", "fc2"), ("ffd.0", if decoder { "ffd.2" } else { "ffd.3" })] {
                add(format!("{layer}.{first}.weight"), &[FFN, WIDTH]);
                add(format!("{layer}.{first}.bias"), &[FFN]);
                add(format!("{layer}.{second}.weight"), &[WIDTH, FFN]);
                add(format!("{layer}.{second}.bias"), &[WIDTH]);
            }
        }
        add(format!("{layer}.final_layer_norm.weight"), &[WIDTH]);
        add(format!("{layer}.final_layer_norm.bias"), &[WIDTH]);
    }
    if config["normalize_before"] == true {
        add(format!("{root}.layer_norm.weight"), &[WIDTH]);
        add(format!("{root}.layer_norm.bias"), &[WIDTH]);
    }
    shapes
}

/// A stack's tensors with those of its embedding.
pub(crate) fn complete(root: &str, config: &Value) -> Shapes {
    let mut shapes = stack(root, config);
    let mut add = |name: &str, shape: &[usize]| shapes.push((format!("{root}.{name}"), shape.to_vec()));
    add("version", &[1]);
    add("embed_tokens.weight", &[VOCAB, WIDTH]);
    match config["learned_pos"] == true {
        true => add("embed_positions.weight", &[20, WIDTH]),
        false => add("embed_positions._float_tensor", &[1]),
    }
    if config["layernorm_embedding"] == true {
        add("layernorm_embedding.weight", &[WIDTH]);
        add("layernorm_embedding.bias", &[WIDTH]);
    }
    shapes
}

/// The shapes with normal values: of variance 1/fan-in in matrices, around 1 for the factors of norms.
pub(crate) fn random(shapes: &Shapes, seed: u64) -> HashMap<String, Tensor> {
    let rng = &mut Rng::new(seed);
    let one = |(name, shape): &(String, Vec<usize>)| {
        let SampleData::F32(values) = rng.normals(name, shape).data else { unreachable!() };
        let (centre, factor) = match shape.as_slice() {
            [_] if name.ends_with("norm.weight") => (1.0, 0.2),
            [_] => (0.0, 0.2),
            [input, _] if name.ends_with("w_gate") => (0.0, 2.0 / (*input as f32).sqrt()),
            [.., input, _] if name.ends_with(".w") => (0.0, 1.0 / (*input as f32).sqrt()),
            [.., input] => (0.0, 1.0 / (*input as f32).sqrt()),
            [] => unreachable!(),
        };
        let values: Vec<f32> = values.iter().map(|v| centre + factor * v).collect();
        (name.clone(), Tensor::from_vec(values, shape.as_slice(), &Device::Cpu).unwrap())
    };
    shapes.iter().map(one).collect()
}

/// A checkpoint in a temporary folder.
pub(crate) struct Case {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) config: Value,
    _folder: tempfile::TempDir,
}

impl Case {
    pub(crate) fn new(config: &Value, tensors: &HashMap<String, Tensor>) -> Case {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        candle_core::safetensors::save(tensors, folder.path().join("model.safetensors")).unwrap();
        let checkpoint = Checkpoint::open(folder.path(), None).unwrap();
        Case { checkpoint, config: config.clone(), _folder: folder }
    }

    pub(crate) fn model(&self) -> Model {
        Model::load(&self.checkpoint, None).unwrap()
    }

    pub(crate) fn refused(&self) -> String {
        Model::load(&self.checkpoint, None).err().unwrap().to_string()
    }
}
