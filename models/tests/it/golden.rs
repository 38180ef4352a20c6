//! candle against the published code's data: outputs, gates, and every intermediate value that the data holds.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use candle_core::{DType, Device, Tensor};
use moh_models::eager::Eager;
use moh_models::families::dit::Dit;
use moh_models::families::vit::Vit;
use moh_models::families::{Inputs, Model};
use moh_models::routing::{Routing, load_balance};
use moh_models::{Checkpoint, Config};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

fn case(name: &str) -> (Model, HashMap<String, Tensor>) {
    load_case(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name))
}

fn load_case(folder: &Path) -> (Model, HashMap<String, Tensor>) {
    let model = Model::load(&Checkpoint::open(folder, None).unwrap(), None).unwrap();
    let reference = candle_core::safetensors::load(folder.join("reference.safetensors"), &Device::Cpu).unwrap();
    (model, reference)
}

fn max_abs(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    let (a, b) =
        (a.flatten_all().unwrap().to_vec1::<f32>().unwrap(), b.flatten_all().unwrap().to_vec1::<f32>().unwrap());
    a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Every gate and tap of the data, and the same heads on.
fn check_taps(taps: &BTreeMap<String, Tensor>, reference: &HashMap<String, Tensor>, tolerance: f32) {
    let names: Vec<&String> = reference
        .keys()
        .filter(|name| ["gates.", "tap.", "attn_in.", "attn_out."].iter().any(|prefix| name.starts_with(prefix)))
        .collect();
    assert!(names.len() > 10);
    for name in names {
        let found = taps.get(name).unwrap_or_else(|| panic!("no {name}"));
        let error = max_abs(found, &reference[name]);
        assert!(error <= tolerance, "{name}: {error}");
        if name.starts_with("gates.") {
            let on = |x: &Tensor| x.ne(0f32).unwrap().flatten_all().unwrap().to_vec1::<u8>().unwrap();
            assert_eq!(on(found), on(&reference[name]), "{name}: other heads");
        }
    }
}

fn dit_inputs(reference: &HashMap<String, Tensor>, prefix: &str) -> Inputs<Tensor> {
    let get = |name: &str| reference[&format!("{prefix}{name}")].clone();
    let x = get("x");
    let half = x.dim(0).unwrap() / 2;
    // Guidance runs the first half of the images under both labels.
    let x = if prefix == "cfg." {
        let h = x.narrow(0, 0, half).unwrap();
        Tensor::cat(&[&h, &h], 0).unwrap()
    } else {
        x
    };
    Inputs::new([
        ("hidden_states".to_owned(), x),
        ("timestep".to_owned(), get("t").to_dtype(DType::F32).unwrap()),
        ("class_labels".to_owned(), get("y")),
    ])
}

#[test]
fn dit_has_the_published_numbers() {
    let (model, reference) = case("dit-tiny-75");
    let mut eager = Eager::new().with_taps().with_routing();
    let out = model.forward(&mut eager, &dit_inputs(&reference, "")).unwrap().remove(0);
    check_taps(&eager.take_taps(), &reference, 2e-4);
    check_losses(&eager.take_routing(), &reference);
    assert!(max_abs(&out, &reference["out"]) <= 2e-4);

    let out = model.forward(&mut eager, &dit_inputs(&reference, "cfg.")).unwrap().remove(0);
    let scale = reference["cfg.scale"].to_vec1::<f32>().unwrap()[0];
    let (c, u) = (out.narrow(0, 0, 2).unwrap(), out.narrow(0, 2, 2).unwrap());
    let first = |x: &Tensor| x.narrow(1, 0, 3).unwrap();
    let e = (first(&u) + ((first(&c) - first(&u)).unwrap() * f64::from(scale)).unwrap()).unwrap();
    let e = Tensor::cat(&[&e, &e], 0).unwrap();
    let guided = Tensor::cat(&[&e, &out.narrow(1, 3, out.dim(1).unwrap() - 3).unwrap()], 1).unwrap();
    assert!(max_abs(&guided, &reference["cfg.out"]) <= 2e-4 * scale);
}

/// `l_aux` of the data: MoH's load-balance loss of every layer that routes.
fn check_losses(layers: &[Routing], reference: &HashMap<String, Tensor>) {
    let found: Vec<f32> = layers.iter().map(|layer| layer.load_balance().unwrap().to_scalar().unwrap()).collect();
    let expected = reference["l_aux"].to_vec1::<f32>().unwrap();
    assert_eq!(found.len(), expected.len(), "{:?}", layers.iter().map(|layer| &layer.path).collect::<Vec<_>>());
    for (layer, (found, expected)) in layers.iter().zip(found.iter().zip(&expected)) {
        assert!((found - expected).abs() <= 1e-6, "{}: {found}, published {expected}", layer.path);
        assert!(layer.experts().is_err(), "heads have no losses of experts");
    }
    let mean: f32 = load_balance(layers).unwrap().unwrap().to_scalar().unwrap();
    assert!((mean - expected.iter().sum::<f32>() / expected.len() as f32).abs() <= 1e-6);
}

fn llama_inputs(model: &Model, ids: Tensor, mask: Tensor, positions: Tensor) -> Inputs<Tensor> {
    let batch = ids.dim(0).unwrap();
    let named =
        [("input_ids", ids), ("attention_mask", mask), ("position_ids", positions)].map(|(n, t)| (n.to_owned(), t));
    let layer = &model.layers()[0];
    let empty = Tensor::zeros((batch, layer.kv_num_heads, 0, layer.head_dim), DType::F32, &Device::Cpu).unwrap();
    let past = model.inputs().into_iter().filter(|p| p.name.starts_with("past_")).map(|p| (p.name, empty.clone()));
    Inputs::new(named.into_iter().chain(past))
}

/// The probabilities have the order by which the published code selects: the selected ones are the largest, and sum to 1 with the rest.
fn check_query_norm_choices(layers: &[Routing], reference: &HashMap<String, Tensor>) {
    assert_eq!(layers.len(), 3);
    for layer in layers {
        let gates = reference[&format!("gates.{}", layer.path)].narrow(2, 4, 4).unwrap();
        assert_eq!(max_abs(&layer.choice.selected, &gates), 0.0);
        let flat = |x: &Tensor| x.flatten_to(1).unwrap().to_vec2::<f32>().unwrap();
        for (p, selected) in flat(&layer.choice.probabilities).iter().zip(flat(&layer.choice.selected)) {
            assert!((p.iter().sum::<f32>() - 1.0).abs() < 1e-6);
            let of = |on: f32| p.iter().zip(&selected).filter(move |(_, s)| **s == on).map(|(p, _)| *p);
            assert!(of(1.0).fold(f32::INFINITY, f32::min) > of(0.0).fold(0.0, f32::max), "{p:?} {selected:?}");
        }
    }
}

#[test]
fn llama_has_the_published_numbers() {
    let (model, reference) = case("llama-moh-tiny");
    let mut eager = Eager::new().with_taps().with_routing();
    let ids = reference["input_ids"].clone();
    let positions =
        Tensor::arange(0i64, 12, &Device::Cpu).unwrap().broadcast_as((2, 12)).unwrap().contiguous().unwrap();
    let inputs = llama_inputs(&model, ids, reference["attention_mask"].clone(), positions);
    let logits = model.forward(&mut eager, &inputs).unwrap().remove(0);
    check_taps(&eager.take_taps(), &reference, 5e-5);
    assert!(max_abs(&logits, &reference["logits"]) <= 5e-5);
    check_query_norm_choices(&eager.take_routing(), &reference);

    let get = |name: &str| reference[&format!("padded.{name}")].clone();
    let inputs = llama_inputs(&model, get("input_ids"), get("attention_mask"), get("position_ids"));
    let logits = model.forward(&mut eager, &inputs).unwrap().remove(0);
    let seen = get("attention_mask").to_dtype(DType::F32).unwrap().unsqueeze(2).unwrap();
    let masked = |x: &Tensor| x.broadcast_mul(&seen).unwrap();
    assert!(max_abs(&masked(&logits), &masked(&get("logits"))) <= 5e-5);
}

#[test]
fn switchhead_has_the_published_numbers() {
    let (model, reference) = case("switchhead-tiny");
    let mut eager = Eager::new().with_taps().with_routing();
    for prefix in ["", "padded."] {
        let get = |name: &str| reference[&format!("{prefix}{name}")].clone();
        let (ids, mask) = (get("input_ids"), get("attention_mask"));
        let positions = match prefix {
            "" => Tensor::arange(0i64, 10, &Device::Cpu).unwrap().broadcast_as((2, 10)).unwrap().contiguous().unwrap(),
            _ => get("position_ids"),
        };
        let logits = model.forward(&mut eager, &llama_inputs(&model, ids, mask.clone(), positions)).unwrap().remove(0);
        let taps = eager.take_taps();
        if prefix.is_empty() {
            check_taps(&taps, &reference, 5e-5);
        }
        let seen = mask.to_dtype(DType::F32).unwrap().unsqueeze(2).unwrap();
        let masked = |x: &Tensor| x.broadcast_mul(&seen).unwrap();
        assert!(max_abs(&masked(&logits), &masked(&get("logits"))) <= 5e-5);
    }
    // Both projections of both layers, twice. Four experts, of which two are chosen: balanced where all are used alike.
    let routing = eager.take_routing();
    let paths: Vec<&str> = routing.iter().take(4).map(|layer| layer.path.as_str()).collect();
    let layers = ["0.self_attn.sel_v", "0.self_attn.sel_o", "1.self_attn.sel_v", "1.self_attn.sel_o"];
    assert_eq!(paths, layers.map(|layer| format!("model.layers.{layer}")));
    for layer in &routing {
        let balance = layer.load_balance().unwrap().to_scalar::<f32>().unwrap();
        assert!((1.9..2.5).contains(&balance), "{}: {balance}", layer.path);
        assert!(layer.experts().is_err());
    }
}

#[test]
fn families_need_a_name() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/llama-moh-tiny");
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let copy = tempfile::tempdir().unwrap();
    std::fs::write(copy.path().join("config.json"), text.replace("\"family\"", "\"kin\"")).unwrap();
    let checkpoint = Checkpoint::open(&folder, Some(&copy.path().join("config.json"))).unwrap();
    let message = Model::load(&checkpoint, None).err().unwrap().to_string();
    assert!(
        message.contains("moh-llama, moh-llm, gqe-llama, switchhead, llama") && message.contains("config.json"),
        "{message}"
    );
    assert!(Model::load(&checkpoint, Some("llama")).is_ok());
    let message = Model::load(&checkpoint, Some("gpt")).err().unwrap().to_string();
    assert!(message.contains("gpt") && message.contains("moh-dit"), "{message}");
    assert!(Config::read(&folder.join("config.json")).unwrap().has("family"));
}

#[test]
fn routed_work_is_less_than_dense_work() {
    let (model, _) = case("dit-tiny-75");
    let macs = model.macs(&model.workload().sizes).unwrap();
    let (n, d) = (16u64, 96u64);
    // Patches, embedders, then per block: modulation, qkv, projection, MLP, routers, attention; final layer.
    let inner = [96u64, 96, 144, 144];
    let routers = [4u64, 2 + 2 + 2, 2 + 2 + 4, 3 + 2 + 3];
    let active = [4u64, 3, 5, 5];
    let heads = [4u64, 4, 6, 6];
    let fixed = n * d * 16 + 256 * d + d * d + d * 2 * d + n * d * 32;
    let block = |i: usize| d * 6 * d + n * d * (2 * inner[i]) + 2 * n * d * 4 * d + n * d * routers[i];
    // Queries, their output projection and the attention itself follow the heads.
    let per_heads = |heads: u64| 2 * n * d * 24 * heads + heads * n * n * 2 * 24;
    let total = |heads: [u64; 4]| fixed + (0..4).map(|i| block(i) + per_heads(heads[i])).sum::<u64>();
    let (dense, routed) = (total(heads), total(active));
    assert_eq!((macs.dense, macs.routed), (dense, routed));
}

/// A case that is too large for the repository, from the folder that `MOH_GOLDEN` names.
fn extra_case(name: &str) -> (Model, HashMap<String, Tensor>) {
    let folder = std::env::var_os("MOH_GOLDEN").unwrap_or_else(|| panic!("MOH_GOLDEN names no folder with {name}"));
    load_case(&Path::new(&folder).join(name))
}

fn vit_has_the_published_numbers((model, reference): (Model, HashMap<String, Tensor>)) {
    let mut eager = Eager::new().with_taps().with_routing();
    let inputs = Inputs::new([("pixel_values".to_owned(), reference["pixel_values"].clone())]);
    let logits = model.forward(&mut eager, &inputs).unwrap().remove(0);
    check_taps(&eager.take_taps(), &reference, 5e-5);
    check_losses(&eager.take_routing(), &reference);
    assert!(max_abs(&logits, &reference["logits"]) <= 5e-5);
}

#[test]
fn vit_with_routing_in_every_stage() {
    vit_has_the_published_numbers(case("vit-tiny-b"));
}

/// A family that the crate does not know is written down and played: these are known, and have the published numbers that way too.
#[test]
fn families_of_other_crates_have_the_published_numbers() {
    let of = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name);
    let checkpoint = |name: &str| Checkpoint::open(&of(name), None).unwrap();
    let (_, reference) = case("vit-tiny-b");
    vit_has_the_published_numbers((Model::of::<Vit>("moh-vit", &checkpoint("vit-tiny-b")).unwrap(), reference));
    let (_, reference) = case("dit-tiny-75");
    let model = Model::of::<Dit>("moh-dit", &checkpoint("dit-tiny-75")).unwrap();
    let mut eager = Eager::new().with_taps();
    let out = model.forward(&mut eager, &dit_inputs(&reference, "")).unwrap().remove(0);
    check_taps(&eager.take_taps(), &reference, 2e-4);
    assert!(max_abs(&out, &reference["out"]) <= 2e-4);
}

#[test]
#[ignore = "needs MOH_GOLDEN, a folder with vit-tiny-a, which is too large to be shipped"]
fn vit_with_routing_in_late_stages() {
    vit_has_the_published_numbers(extra_case("vit-tiny-a"));
}
