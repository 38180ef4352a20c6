//! Searches for shared heads: what they compute, their gradients, what they end with, and what they refuse.

use crate::families::{differ, llama_config, planned, rows};
use candle_core::{Device, Tensor, Var};
use moh_models::eager::Eager;
use moh_models::families::{Inputs, Sizes};
use moh_models::initial::seed_of;
use moh_models::router::HeadSet;
use moh_models::sample::{Rng, Sample, SampleData};
use moh_models::sharing::{self, SCORES, SLOPE};
use moh_models::{Config, Model, Parameters, routing};
use moh_operators::tolerance;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

fn config(value: &Value) -> Config {
    Config::new("c.json", value.as_object().unwrap().clone())
}

/// Random weights, and scores of 0.
fn start(model: &Model) -> Parameters {
    let var = |(name, shape): &(String, Vec<usize>)| {
        let mut rng = Rng::new(seed_of(3, name));
        let centre = if name.contains("norm") && name.ends_with("weight") { 1.0 } else { 0.0 };
        let values = (0..shape.iter().product()).map(|_| centre + 0.3 * rng.normal()).collect();
        (name.clone(), Var::from_vec(values, shape.as_slice(), &Device::Cpu).unwrap())
    };
    let weights = Parameters::new(model.tensors().iter().map(var), &[model], &Device::Cpu).unwrap();
    sharing::parameters(model, &weights).unwrap()
}

fn set(parameters: &Parameters, layer: &str, scores: &[f32]) {
    let var = parameters.get(&format!("{SCORES}{layer}")).unwrap();
    var.set(&Tensor::new(scores, &Device::Cpu).unwrap()).unwrap();
}

fn inputs(samples: &[Sample]) -> Inputs<Tensor> {
    Inputs::new(samples.iter().map(|sample| {
        let tensor = match &sample.data {
            SampleData::F32(values) => Tensor::from_slice(values, sample.shape.as_slice(), &Device::Cpu),
            SampleData::I64(values) => Tensor::from_slice(values, sample.shape.as_slice(), &Device::Cpu),
        };
        (sample.name.clone(), tensor.unwrap())
    }))
}

fn llm(more: Value) -> Value {
    let mut config = llama_config("moh-llm", json!({"shared_head": 0, "routed_head": 4}));
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

/// Four of six heads on.
fn norms(more: Value) -> Value {
    let mut config = llama_config("moh-llama", json!({"moh_shared_fraction": 0.0, "moh_routed_fraction": 0.67}));
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

fn vit() -> Value {
    json!({
        "family": "moh-vit", "img_size": 64, "num_classes": 5, "embed_dims": [8, 12, 12, 16], "num_heads": [2, 3, 3, 4],
        "depths": [1, 1, 2, 1], "sr_ratios": [8, 4, 2, 1], "mlp_ratios": [2, 2, 2, 2], "cpb_hidden": 8,
        "shared_head": [2, 0, 0, 0], "routed_head": [0, 3, 2, 3],
    })
}

fn dit() -> Value {
    json!({
        "family": "moh-dit", "input_size": 8, "patch_size": 2, "in_channels": 2, "hidden_size": 24, "depth": 2,
        "num_heads": 4, "head_dim": [6, 8], "mlp_ratio": 2.0, "num_classes": 3, "frequency_embedding_size": 16,
        "shared_head": [4, 0], "routed_head": [0, 3],
    })
}

/// Without noise, a search computes what the model does that it ends with, whatever the sets.
#[test]
fn a_search_computes_what_it_ends_with() {
    let layer = |i: usize| format!("model.layers.{i}.self_attn");
    let llama = |a: [f32; 6], b: [f32; 6]| vec![(layer(0), a.to_vec()), (layer(1), b.to_vec())];
    let several = llama([-0.1, 0.2, -0.3, 0.0, 0.4, -0.1], [-1.0, -1.0, -1.0, 0.1, -1.0, -1.0]);
    let most = llama([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [-1.0; 6]);
    let sets = json!([[1, 4], [3]]);
    let cases = [
        (llm(json!({})), several.clone(), sets.clone(), json!([2, 3])),
        (llm(json!({})), most.clone(), json!([[3, 4, 5], []]), json!([1, 4])),
        (norms(json!({})), several, sets, json!([2, 3])),
        (norms(json!({"cache": "in-place"})), most, json!([[3, 4, 5], []]), json!([1, 4])),
        (
            vit(),
            vec![
                ("block3.1.attn".to_owned(), vec![-0.1, 0.1, 0.2]),
                ("block4.0.attn".to_owned(), vec![0.1, -0.1, 0.0, 0.3]),
            ],
            json!([[0, 1], [], [], [2], [0, 3]]),
            json!([0, 3, 2, 1, 1]),
        ),
        (
            dit(),
            vec![("blocks.1.attn".to_owned(), vec![-0.1, 0.1, 0.2, -0.3])],
            json!([[0, 1, 2, 3], [1, 2]]),
            json!([0, 1]),
        ),
    ];
    for (values, scores, shared_heads, top_k) in cases {
        let model = planned(values.clone()).unwrap();
        let parameters = start(&model);
        scores.iter().for_each(|(layer, scores)| set(&parameters, layer, scores));
        let chosen = sharing::chosen(&config(&values), &model, &parameters).unwrap();
        assert_eq!((&chosen.config["shared_heads"], &chosen.config["top_k"]), (&shared_heads, &top_k), "{values}");
        assert!(!chosen.config.contains_key("routed_head") && !chosen.config.contains_key("moh_routed_fraction"));
        let found: Vec<HeadSet> = sharing::sets(&model, &parameters).unwrap();
        assert_eq!(json!(found.iter().map(HeadSet::shared).collect::<Vec<_>>()), shared_heads);

        let ended = Arc::new(chosen.parameters);
        assert!(ended.iter().all(|(name, _)| !name.starts_with(SCORES)));
        let searching = Arc::new(parameters);
        for sample in model.samples(&Sizes::default()) {
            let mut search = Eager::new().with_parameters(searching.clone()).with_routing().with_taps();
            search.search_shared_heads(None).unwrap();
            let mut ordinary = Eager::new().with_parameters(ended.clone()).with_routing().with_taps();
            let outputs = model.forward(&mut search, &inputs(&sample)).unwrap();
            let expected = chosen.model.forward(&mut ordinary, &inputs(&sample)).unwrap();
            for (found, expected) in outputs.iter().zip(&expected) {
                let largest = rows(expected).concat().iter().fold(0f32, |largest, x| largest.max(x.abs()));
                let error = differ(found, expected) / largest.max(f32::MIN_POSITIVE);
                assert!(error <= tolerance::SAME_MODEL_F32, "{values}: {error}");
            }
            let (found, expected) = (search.take_taps(), ordinary.take_taps());
            let gates = expected.iter().filter(|(name, _)| name.starts_with("gates."));
            for (name, expected) in gates {
                let same = |x: &Tensor| rows(x).concat().iter().map(|gate| *gate == 0.0).collect::<Vec<_>>();
                assert_eq!(same(&found[name]), same(expected), "{name}");
            }
            let balance =
                |eager: &Eager| routing::load_balance(eager.routing()).unwrap().unwrap().to_scalar::<f32>().unwrap();
            let (found, expected) = (balance(&search), balance(&ordinary));
            assert!((found - expected).abs() < 1e-5, "{values}: {found}, expected {expected}");
        }
    }
}

/// The weights that a search ends with are copies: the search may go on.
#[test]
fn rows_of_the_router() {
    let values = llm(json!({}));
    let model = planned(values.clone()).unwrap();
    let parameters = start(&model);
    set(&parameters, "model.layers.0.self_attn", &[-0.1, 0.2, -0.3, 0.0, 0.4, -0.1]);
    set(&parameters, "model.layers.1.self_attn", &[-0.1, -0.2, 0.3, 0.0, -0.4, -0.1]);
    let chosen = sharing::chosen(&config(&values), &model, &parameters).unwrap();
    let weight = |parameters: &Parameters, name: &str| rows(parameters.get(name).unwrap().as_tensor());
    let of =
        |layer: usize, name: &str| weight(&chosen.parameters, &format!("model.layers.{layer}.self_attn.{name}.weight"));
    let all = weight(&parameters, "model.layers.0.self_attn.wg.weight");
    assert_eq!(of(0, "wg"), [0, 2, 3, 5].map(|head| all[head].clone()));
    assert_eq!(of(0, "wg_1"), [1, 4].map(|head| all[head].clone()));
    assert_eq!(of(0, "wg_0"), [vec![0.0; 24], vec![0.0; 24]]);
    // A shared head alone has no scores.
    assert!(chosen.parameters.get("model.layers.1.self_attn.wg_1.weight").is_none());
    let norm = parameters.get("model.norm.weight").unwrap();
    norm.set(&norm.zeros_like().unwrap()).unwrap();
    assert!(weight(&chosen.parameters, "model.norm.weight")[0].iter().all(|x| *x != 0.0));
}

/// In a whole model and through both graphs of gradients, the scores' gradient is what the gates' gradients say.
#[test]
fn gradients_of_scores() {
    for values in [llm(json!({"num_hidden_layers": 1})), norms(json!({"num_hidden_layers": 1}))] {
        let model = planned(values.clone()).unwrap();
        let parameters = Arc::new(start(&model));
        let (path, scores) = ("model.layers.0.self_attn", [-0.1f32, 0.02, -0.3, 0.0, 0.04, -0.1]);
        set(&parameters, path, &scores);
        let sample = inputs(&model.samples(&Sizes::default())[0]);
        let loss = |eager: &mut Eager| {
            let logits = model.forward(eager, &sample).unwrap().swap_remove(0);
            let mut rng = Rng::new(8);
            let weights: Vec<f32> = (0..logits.elem_count()).map(|_| rng.normal()).collect();
            let weights = Tensor::from_vec(weights, logits.shape(), &Device::Cpu).unwrap();
            (logits * weights).unwrap().sum_all().unwrap()
        };
        // Logits of all heads.
        let mut plain = Eager::new().with_parameters(parameters.clone()).with_routing();
        loss(&mut plain);
        let logits = rows(&plain.take_routing()[0].choice.logits);

        let mut search = Eager::new().with_parameters(parameters.clone()).with_taps();
        search.search_shared_heads(None).unwrap();
        let total = loss(&mut search);
        let gates = search.take_taps()[&format!("gates.{path}")].clone();
        let found = rows(&search.backward(&total).unwrap()[&format!("{SCORES}{path}")]).concat();

        // The same gates as a parameter.
        let given = Var::from_tensor(&gates).unwrap();
        let all = parameters.iter().map(|(name, var)| (name.to_owned(), var.clone()));
        let all = all.chain([("given".to_owned(), given.clone())]);
        let all = Arc::new(Parameters::new(all, &[&model], &Device::Cpu).unwrap());
        let gates_by_name = BTreeMap::from([(format!("gates.{path}"), given.as_tensor().clone())]);
        let mut fixed = Eager::new().with_parameters(all).with_gates(gates_by_name);
        let total = loss(&mut fixed);
        let of_gates = rows(&fixed.backward(&total).unwrap()["given"]);

        let shared = [1, 4];
        let mut expected = [0f64; 6];
        for ((gates, logits), of_gates) in rows(&gates).iter().zip(&logits).zip(&of_gates) {
            assert_eq!(gates.iter().filter(|gate| **gate != 0.0).count(), 4);
            let routed = (0..6).filter(|head| !shared.contains(head) && gates[*head] != 0.0);
            let last = routed.min_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
            let gain = |head: usize| f64::from(gates[head]) * f64::from(of_gates[head]);
            for head in shared.into_iter().filter(|&head| logits[head] < logits[last]) {
                expected[head] += gain(head) - gain(last);
            }
        }
        let largest = shared.map(|head| expected[head].abs()).into_iter().fold(0.0, f64::max);
        for head in 0..6 {
            let soft = 1.0 / (1.0 + (-SLOPE * f64::from(scores[head])).exp());
            let expected = expected[head] * SLOPE * soft * (1.0 - soft);
            let error = (f64::from(found[head]) - expected).abs();
            assert!(error < 1e-4 * largest.max(1.0), "{values}: head {head}: {}, expected {expected}", found[head]);
            assert_eq!(found[head] != 0.0, shared.contains(&head), "{found:?}");
        }
    }
}

/// Noise is a layer's own and the same in every forward of an interpreter; another seed shares other heads.
#[test]
fn noise_depends_on_seed_and_layer() {
    let model = planned(llm(json!({}))).unwrap();
    let parameters = Arc::new(start(&model));
    let sample = inputs(&model.samples(&Sizes::default())[0]);
    let gates = |eager: &mut Eager| {
        model.forward(eager, &sample).unwrap();
        let taps = eager.take_taps();
        [0, 1].map(|i| rows(&taps[&format!("gates.model.layers.{i}.self_attn")]))
    };
    let eager = |seed: Option<u64>| {
        let mut eager = Eager::new().with_parameters(parameters.clone()).with_taps();
        eager.search_shared_heads(seed).unwrap();
        eager
    };
    let always =
        |gates: &[Vec<f32>]| (0..6).map(|head| gates.iter().all(|gates| gates[head] != 0.0)).collect::<Vec<_>>();
    let mut one = eager(Some(5));
    let first = gates(&mut one);
    assert_eq!(first, gates(&mut one));
    assert_eq!(first, gates(&mut eager(Some(5))));
    let seen: Vec<[Vec<bool>; 2]> =
        (0..8).map(|seed| gates(&mut eager(Some(seed))).map(|gates| always(&gates))).collect();
    assert!(seen.iter().any(|sets| sets[0] != sets[1]) && seen.iter().any(|sets| sets[0] != seen[0][0]), "{seen:?}");
    for gates in (0..8).flat_map(|seed| gates(&mut eager(Some(seed)))) {
        assert!(gates.iter().all(|gates| gates.iter().filter(|gate| **gate != 0.0).count() == 4), "{gates:?}");
    }
}

#[test]
fn models_without_a_search_are_refused() {
    let refused = |values: Value| {
        let model = planned(values).unwrap();
        let weights = Parameters::initial(&[&model], 1, &Device::Cpu).unwrap();
        sharing::parameters(&model, &weights).err().unwrap().to_string()
    };
    let family = "a search for shared heads: the family: expected one of moh-dit, moh-vit, moh-llm, moh-llama, found ";
    let layer = "a search for shared heads: model.layers.0.self_attn: expected no shared heads before a search, found ";
    let nothing =
        "a search for shared heads: the layers: expected one with at least 2 active heads, and fewer than all, found ";
    let moa = json!({
        "family": "moa", "part": "encoder", "layers": 1, "encoder_embed_dim": 16, "head_dim": 8, "num_expert": 4, "attention_heads": 2,
        "ffn_embed_dim": 20, "vocab_size": 9,
    });
    assert_eq!(refused(llama_config("gqe-llama", json!({"group_top_k": 1}))), format!("{family}gqe-llama"));
    assert_eq!(refused(moa), format!("{family}moa"));
    assert_eq!(refused(llm(json!({"shared_head": [1, 0]}))), format!("{layer}1 of 6 heads shared"));
    assert_eq!(refused(llama_config("moh-llama", json!({}))), format!("{layer}3 of 6 heads shared"));
    assert_eq!(refused(llm(json!({"routed_head": [1, 6]}))), format!("{nothing}1 of 6, 6 of 6"));

    let values = llm(json!({}));
    let model = planned(values.clone()).unwrap();
    let weights = Parameters::initial(&[&model], 1, &Device::Cpu).unwrap();
    let none = "a search for shared heads: the parameters: expected names that begin with shared_scores., found none";
    for mut eager in [Eager::new(), Eager::new().with_parameters(Arc::new(weights.clone()))] {
        assert_eq!(eager.search_shared_heads(None).unwrap_err().to_string(), none);
    }
    let error = sharing::chosen(&config(&values), &model, &weights).err().unwrap().to_string();
    assert!(error.contains("shared_scores.model.layers.0.self_attn") && error.contains("none of this name"), "{error}");
    let scores = sharing::parameters(&model, &weights).unwrap();
    let short = ("shared_scores.model.layers.1.self_attn".to_owned(), Var::new(&[1f32, 2.0], &Device::Cpu).unwrap());
    let all = scores.iter().map(|(name, var)| (name.to_owned(), var.clone())).chain([short]);
    let short = Parameters::new(all, &[&model], &Device::Cpu).unwrap();
    let error = sharing::sets(&model, &short).unwrap_err().to_string();
    assert!(error.contains("one of shape [2] for 6 heads"), "{error}");
}
