//! Gradients reach every tensor of every family, and are those that finite differences give.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use candle_core::{DType, Device, Tensor, Var};
use moh_models::eager::Eager;
use moh_models::families::{Inputs, Sizes};
use moh_models::initial::seed_of;
use moh_models::routing::Routing;
use moh_models::sample::{Rng, Sample, SampleData};
use moh_models::{Config, Model, Parameters};
use serde_json::{Value, json};
use std::sync::Arc;

/// Distance of finite differences, in units of a tensor's typical number.
const STEP: f32 = 1e-2;

fn model(config: &Value) -> Model {
    let values = config.as_object().unwrap().clone();
    Model::plan(&Config::new("test.json", values), None).unwrap().0
}

/// Numbers that keep every part of a model alive.
fn parameters(model: &Model) -> Arc<Parameters> {
    let var = |(name, shape): &(String, Vec<usize>)| {
        let mut rng = Rng::new(seed_of(1, name));
        let vector = shape.len() < 2 || name.ends_with("temperature");
        let width = if vector { 100 } else { shape.last().copied().unwrap() };
        let centre = if name.contains("norm") && name.ends_with("weight") { 1.0 } else { 0.0 };
        let bound = scale(width);
        let values = (0..shape.iter().product()).map(|_| centre + bound * (2.0 * rng.uniform() - 1.0)).collect();
        (name.clone(), Var::from_vec(values, shape.as_slice(), &Device::Cpu).unwrap())
    };
    Arc::new(Parameters::new(model.tensors().iter().map(var), &[model], &Device::Cpu).unwrap())
}

fn scale(width: usize) -> f32 {
    2.0 / (width as f32).sqrt()
}

fn tensor(sample: &Sample) -> Tensor {
    match &sample.data {
        SampleData::F32(values) => Tensor::from_slice(values, sample.shape.as_slice(), &Device::Cpu).unwrap(),
        SampleData::I64(values) => Tensor::from_slice(values, sample.shape.as_slice(), &Device::Cpu).unwrap(),
    }
}

/// A loss of the first output and of the routing, and what was selected.
fn loss(model: &Model, eager: Eager) -> (Tensor, Vec<Routing>, Eager) {
    let mut eager = eager.with_routing();
    let samples = model.samples(&Sizes::default()).swap_remove(0);
    let inputs = Inputs::new(samples.iter().map(|sample| (sample.name.clone(), tensor(sample))));
    let output = model.forward(&mut eager, &inputs).unwrap().swap_remove(0).to_dtype(DType::F32).unwrap();
    let mut rng = Rng::new(5);
    let weights: Vec<f32> = (0..output.elem_count()).map(|_| rng.normal()).collect();
    let weights = Tensor::from_vec(weights, output.shape(), &Device::Cpu).unwrap();
    let mut total = (output * weights).unwrap().sum_all().unwrap();
    let routing = eager.take_routing();
    for layer in &routing {
        // Experts have losses of their own; heads the load balance.
        let added = match layer.experts() {
            Ok(losses) => ((losses.switch + losses.cv).unwrap() + losses.z).unwrap(),
            Err(_) => layer.load_balance().unwrap(),
        };
        total = (total + added).unwrap();
    }
    (total, routing, eager)
}

fn value(loss: &Tensor) -> f64 {
    f64::from(loss.to_scalar::<f32>().unwrap())
}

fn selections(routing: &[Routing]) -> Vec<Vec<f32>> {
    routing.iter().map(|layer| layer.choice.selected.flatten_all().unwrap().to_vec1().unwrap()).collect()
}

fn numbers(x: &Tensor) -> Vec<f32> {
    x.flatten_all().unwrap().to_vec1().unwrap()
}

fn check(what: &str, config: &Value) {
    let model = model(config);
    let parameters = parameters(&model);
    let eager = || Eager::new().with_parameters(parameters.clone());
    let (total, routing, interpreter) = loss(&model, eager());
    let selected = selections(&routing);
    let gradients = interpreter.backward(&total).unwrap();
    let mut compared = 0;
    for (name, var) in parameters.iter() {
        let gradient = gradients.get(name).unwrap_or_else(|| panic!("{what}: {name} has no gradient"));
        let gradient = numbers(gradient);
        // In full attention, a number that is added to all scores of a head changes no weight of its softmax.
        if name.ends_with("cpb_fc2.bias") && gradient.iter().all(|g| g.abs() < 1e-3) {
            continue;
        }
        let mut order: Vec<usize> = (0..gradient.len()).collect();
        order.sort_by(|&a, &b| gradient[b].abs().total_cmp(&gradient[a].abs()));
        assert!(gradient[order[0]].abs() > 1e-5, "{what}: {name} has a gradient of 0");
        let values = numbers(var);
        let width = if var.rank() < 2 { 100 } else { var.dims().last().copied().unwrap() };
        let step = STEP * scale(width);
        let moved = |index: usize, by: f32| {
            let mut values = values.clone();
            values[index] += by;
            var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu).unwrap()).unwrap();
            let (total, routing, _) = loss(&model, eager());
            (value(&total), selections(&routing) == selected)
        };
        // A selection that changes is a step in the loss, and no slope.
        for &index in order.iter().take(6) {
            let here = value(&total);
            // The slope, and how much steeper it is after the point than before.
            let slope = |step: f32| {
                let ((up, same_up), (down, same_down)) = (moved(index, step), moved(index, -step));
                let by = f64::from(step);
                (same_up && same_down).then_some(((up - down) / (2.0 * by), (up - 2.0 * here + down) / by))
            };
            let (Some((wide, bend)), Some((narrow, half_bend))) = (slope(step), slope(step / 2.0)) else { continue };
            // A smooth curve is nearly straight, and bends half as much over half the distance. Near a kink of a ReLU it does neither, and
            // differences say nothing.
            let rounding = 4e-6 * here.abs().max(1.0) / f64::from(step / 2.0);
            let kink = (wide - narrow).abs().max((half_bend - bend / 2.0).abs());
            if kink > 0.03 * narrow.abs() + 2.0 * rounding {
                continue;
            }
            let (found, expected) = (f64::from(gradient[index]), (4.0 * narrow - wide) / 3.0);
            assert!(
                (found - expected).abs() < 0.03 * expected.abs() + 2.0 * rounding,
                "{what}: {name}[{index}]: gradient {found}, finite differences {expected}"
            );
            compared += 1;
            break;
        }
        var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu).unwrap()).unwrap();
    }
    let tensors = parameters.iter().count();
    assert!(compared * 10 > tensors * 8, "{what}: only {compared} of {tensors} tensors were compared");
}

fn llama(family: &str, more: Value) -> Value {
    let mut config = json!({
        "family": family, "vocab_size": 11, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "max_position_embeddings": 32,
    });
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

#[test]
fn llamas() {
    check("llama", &llama("llama", json!({"attention_bias": true, "tie_word_embeddings": true})));
    check("moh-llama", &llama("moh-llama", json!({})));
    check(
        "a mixture of experts, any set of shared heads",
        &llama(
            "moh-llama",
            json!({"shared_heads": [[1, 4], [0, 5, 3]], "top_k": [2, 1], "moe_num_experts": [3, 0], "moe_top_k": 2}),
        ),
    );
    check("shared and routed heads", &llama("moh-llm", json!({"shared_head": [2, 1], "routed_head": [2, 2]})));
    check("no shared head", &llama("moh-llm", json!({"shared_head": [0, 3], "routed_head": [3, 3]})));
    let renormalized =
        json!({"shared_head": 6, "routed_head": 0, "moe_num_experts": 4, "moe_top_k": 2, "moe_renormalize": true});
    check("every head shared", &llama("moh-llm", renormalized));
    check("groups", &llama("gqe-llama", json!({"num_key_value_heads": 2, "group_top_k": 2})));
    check(
        "groups with shared heads",
        &llama(
            "gqe-llama",
            json!({"num_key_value_heads": 2, "group_top_k": [2, 1], "group_shared_heads": [0, 1], "moe_num_experts": 3, "moe_top_k": 2}),
        ),
    );
    check("a cache in place", &llama("moh-llama", json!({"cache": "in-place"})));
}

#[test]
fn switchheads() {
    let config = |more: Value| {
        let mut config = llama(
            "switchhead",
            json!({"num_key_value_heads": 3, "num_attention_heads": 3, "num_experts": 3, "moe_k": 2}),
        );
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    check("switchhead", &config(json!({})));
    check("one expert of two", &config(json!({"num_experts": 2, "moe_k": 1, "head_dim": 6, "rotate_fraction": 0.7})));
    check("all experts", &config(json!({"moe_k": 3, "rotate_fraction": 1.0, "cache": "in-place"})));
}

#[test]
fn vits() {
    let config = json!({
        "family": "moh-vit", "img_size": 64, "num_classes": 5, "mlp_ratios": [2, 2, 2, 2], "qkv_bias": true,
        "sr_ratios": [8, 4, 2, 1], "window_size": [3, 3, 3, null], "cpb_hidden": 6, "pretrain_size": 64,
        "embed_dims": [8, 12, 12, 16], "num_heads": [2, 3, 3, 4], "depths": [1, 1, 1, 1],
        "shared_head": [2, 1, 1, 1], "routed_head": [0, 1, 2, 2],
    });
    check("moh-vit", &config);
    let mut mixture = config.clone();
    mixture["moe_num_experts"] = json!([0, 0, 3, 2]);
    check("moh-vit with experts", &mixture);
}

#[test]
fn dits() {
    let config = json!({
        "family": "moh-dit", "input_size": 8, "patch_size": 2, "in_channels": 2, "hidden_size": 24, "depth": 2,
        "num_heads": 4, "head_dim": [6, 8], "mlp_ratio": 2.0, "num_classes": 3, "frequency_embedding_size": 16,
        "shared_head": [4, 2], "routed_head": [0, 1],
    });
    check("moh-dit", &config);
}

#[test]
fn mixtures_of_attention_heads() {
    let config = |more: Value| {
        let mut config = json!({
            "family": "moa", "layers": 2, "encoder_embed_dim": 16, "decoder_embed_dim": 16, "head_dim": 8, "num_expert": 4,
            "attention_heads": 2, "ffn_embed_dim": 20, "vocab_size": 9,
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    check("an encoder", &config(json!({"part": "encoder", "normalize_before": true, "learned_pos": true})));
    let experts = |activation: &str| {
        let more = json!({"ffd_type": "moe", "ffd_moe_k": 2, "task": "masked_lm", "activation_fn": activation});
        let mut config = config(more);
        config["part"] = "encoder".into();
        config
    };
    check("experts", &experts("relu"));
    check("smooth experts", &experts("gelu"));
    check("a decoder", &config(json!({"part": "decoder", "renormalize_gates": true})));
}

/// bfloat16 rounds, and reaches every tensor too.
#[test]
fn in_bfloat16() {
    for config in [
        llama("moh-llm", json!({"shared_head": 2, "routed_head": 2, "moe_num_experts": 3})),
        json!({
            "family": "moh-vit", "img_size": 64, "num_classes": 5, "mlp_ratios": [2, 2, 2, 2], "qkv_bias": true,
            "sr_ratios": [8, 4, 2, 1], "window_size": [3, 3, 3, null], "cpb_hidden": 6, "pretrain_size": 64,
            "embed_dims": [8, 12, 12, 16], "num_heads": [2, 3, 3, 4], "depths": [1, 1, 1, 1],
            "shared_head": [2, 1, 1, 2], "routed_head": [0, 1, 1, 1],
        }),
    ] {
        let model = model(&config);
        let parameters = parameters(&model);
        let eager = || Eager::new().with_parameters(parameters.clone());
        let (exact, ..) = loss(&model, eager());
        let (rounded, _, interpreter) = loss(&model, eager().in_bf16());
        let (exact, of_rounded) = (value(&exact), value(&rounded));
        assert!(exact != of_rounded && (exact - of_rounded).abs() < 0.3 * exact.abs().max(3.0), "{exact} {of_rounded}");
        let gradients = interpreter.backward(&rounded).unwrap();
        for (name, _) in parameters.iter() {
            let gradient = gradients.get(name).unwrap_or_else(|| panic!("{name} has no gradient"));
            assert!(numbers(gradient).iter().any(|g| *g != 0.0), "{name} has a gradient of 0");
        }
    }
}
