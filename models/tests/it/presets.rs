//! The published models' configurations, and how weights without one find theirs.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use moh_models::presets::{self, NAMES, PRESETS, Preset, Source};
use moh_models::{Checkpoint, Error, Model};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use tempfile::TempDir;

/// Names and shapes of a preset's tensors.
type Tensors = Vec<(String, Vec<usize>)>;

fn planned(preset: &Preset) -> (Model, Tensors) {
    let mut config = preset.config().unwrap();
    if preset.name.starts_with("moa-") {
        config.set("part", json!("encoder"));
    }
    Model::plan(&config, None).unwrap_or_else(|error| panic!("{}: {error}", preset.name))
}

/// Weights, all zeros, that take no room on the disk.
fn write(path: &Path, tensors: &Tensors) {
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in tensors {
        let begin = end;
        end += 2 * shape.iter().product::<usize>();
        header.insert(name.clone(), json!({ "dtype": "BF16", "shape": shape, "data_offsets": [begin, end] }));
    }
    let header = Value::Object(header).to_string();
    let mut file = File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + end as u64).unwrap();
}

fn folder_of(tensors: &Tensors) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("model.safetensors"), tensors);
    folder
}

fn detect(tensors: &Tensors) -> Result<Checkpoint, Error> {
    presets::open(folder_of(tensors).path(), Source::Beside, None, &[])
}

#[test]
fn parameters_of_the_published_sizes() {
    // In millions.
    let sizes = [
        ("moh-vit-small-75", 50),
        ("moh-vit-small-80", 50),
        ("moh-vit-base-50", 90),
        ("moh-vit-base-75", 90),
        ("moh-dit-s-75", 33),
        ("moh-dit-s-90", 33),
        ("moh-dit-b-75", 131),
        ("moh-dit-b-90", 131),
        ("moh-dit-l-75", 459),
        ("moh-dit-l-90", 459),
        ("moh-dit-xl-75", 676),
        ("moh-dit-xl-90", 676),
        ("moh-llama3-8b", 8030),
        ("moh-llm-s", 186),
        ("moh-llm-b", 881),
    ];
    for (name, millions) in sizes {
        let (_, tensors) = planned(Preset::named(name).unwrap());
        let found = tensors.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum::<usize>();
        let found = (found as f64 / 1e6).round() as i64;
        assert!((found - millions).abs() <= 1 + millions / 100, "{name}: {found} M, not {millions} M");
    }
}

/// MoA's models for translation have 65 and 200 million parameters, of which each part counts the embeddings that they share.
#[test]
fn parameters_of_whole_translation_models() {
    for (name, millions) in [("moa-base", 65), ("moa-big", 200)] {
        let mut all = BTreeMap::new();
        for part in ["encoder", "decoder"] {
            let (mut config, text) = Preset::named(name).unwrap().complete().unwrap();
            assert!(text.contains("\"vocab_size\": 37000"));
            config.set("part", json!(part));
            all.extend(Model::plan(&config, None).unwrap().1);
        }
        all.remove("decoder.embed_tokens.weight");
        all.remove("decoder.output_projection.weight");
        let found = all.values().map(|shape| shape.iter().product::<usize>()).sum::<usize>();
        assert_eq!((found as f64 / 1e6).round() as i64, millions, "{name}: {found}");
    }
}

/// Attention in MoA (arXiv 2210.05144) with K of E experts of width D, as the paper names its models, KxEyDz: what it costs does
/// not depend on the number of experts, but for the router.
#[test]
fn multiply_accumulates_of_moa_attention() {
    const CHANNELS: usize = 512;
    for (k, e, d) in [(8, 8, 128), (8, 8, 256), (8, 16, 256), (8, 32, 256), (8, 64, 256), (16, 32, 256)] {
        let (mut config, _) = Preset::named("moa-base").unwrap().complete().unwrap();
        let keys = [("encoder_attention_heads", k), ("num_expert", e), ("head_dim", d)];
        keys.into_iter().for_each(|(key, value)| config.set(key, json!(value)));
        config.set("part", json!("encoder"));
        let (model, tensors) = Model::plan(&config, None).unwrap();
        for n in [64, 512] {
            let count = model.count(&[("batch", 1), ("sequence", n)]).unwrap();
            let found = count.below("encoder.layers.3.self_attn");
            // Router; the experts' shared keys and values; queries and outputs; scores and their sums of values.
            let cost =
                |experts: usize| n * (CHANNELS * e + 2 * CHANNELS * d + experts * (2 * CHANNELS * d + 2 * n * d));
            let name = format!("{k}K{e}E{d}D at {n} tokens");
            assert_eq!((found.routed, found.dense), (cost(k) as u64, cost(e) as u64), "{name}");
        }
        let inside = tensors.iter().filter(|(name, _)| name.starts_with("encoder.layers.3.self_attn."));
        let parameters: usize = inside.map(|(_, shape)| shape.iter().product::<usize>()).sum();
        assert_eq!(parameters, 2 * CHANNELS * d * (e + 1) + CHANNELS * e, "{k}K{e}E{d}D");
    }
}

#[test]
fn active_heads_are_as_the_names_say() {
    for preset in PRESETS {
        let (model, _) = planned(preset);
        let share = match preset.name.rsplit('-').next().unwrap() {
            "8b" | "s" | "b" => 0.75,
            "base" => 1.0,
            "big" => 0.5,
            percent => percent.parse::<f64>().unwrap() / 100.0,
        };
        assert!((model.active_share() - share).abs() < 0.02, "{}: {}", preset.name, model.active_share());
    }
}

#[test]
fn weights_find_their_preset() {
    for preset in PRESETS {
        let (_, tensors) = planned(preset);
        let found = detect(&tensors);
        if preset.name == "moh-llama3-8b" {
            let error = found.unwrap_err();
            assert!(matches!(error, Error::AmbiguousPreset { .. }));
            let text = error.to_string();
            assert!(text.contains("config.json") && text.contains("they fit moh-llama3-8b, LLaMA3-8B"), "{text}");
            continue;
        }
        let checkpoint = found.unwrap_or_else(|error| panic!("{}: {error}", preset.name));
        assert_eq!(checkpoint.preset().map(|found| found.name), Some(preset.name));
        assert_eq!(checkpoint.config().path().to_str().unwrap(), format!("preset {}", preset.name));
        assert!(!checkpoint.config().has("part"));
    }
}

#[test]
fn a_whole_translation_model_finds_its_preset() {
    for name in ["moa-base", "moa-big"] {
        let mut tensors = planned(Preset::named(name).unwrap()).1;
        let mut decoder = Preset::named(name).unwrap().config().unwrap();
        decoder.set("part", json!("decoder"));
        tensors.extend(Model::plan(&decoder, None).unwrap().1);
        for shared in ["encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection"] {
            tensors.push((format!("{shared}.weight"), vec![1000, 512]));
        }
        tensors.push(("encoder.embed_positions._float_tensor".to_owned(), vec![1]));
        let mut checkpoint = detect(&tensors).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(checkpoint.preset().map(|found| found.name), Some(name));
        for part in ["encoder", "decoder"] {
            checkpoint.configure("part", part);
            assert_eq!(Model::load(&checkpoint, None).unwrap().layers().len(), if part == "encoder" { 6 } else { 12 });
        }
    }
}

#[test]
fn weights_of_no_preset() {
    let (_, mut tensors) = planned(Preset::named("moh-dit-s-75").unwrap());
    let last = tensors.iter_mut().find(|(name, _)| name == "y_embedder.embedding_table.weight").unwrap();
    last.1[0] = 11;
    let error = detect(&tensors).unwrap_err();
    assert!(matches!(error, Error::NoConfig { .. }));
    let text = error.to_string();
    for part in ["config.json: does not exist", "the presets are moh-vit-small-75, ", "moh-llama3-8b"] {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }

    let folder = folder_of(&tensors);
    let checkpoint = presets::open(folder.path(), Source::Preset("moh-dit-s-75"), None, &[]).unwrap();
    let text = Model::load(&checkpoint, None).err().unwrap().to_string();
    assert!(text.contains("y_embedder.embedding_table.weight\": expected [1001, 384], found [11, 384]"), "{text}");
}

#[test]
fn a_configuration_file_comes_first() {
    let preset = Preset::named("moh-dit-s-90").unwrap();
    let folder = folder_of(&planned(preset).1);
    std::fs::write(folder.path().join("config.json"), r#"{"family": "mine"}"#).unwrap();
    let checkpoint = presets::open(folder.path(), Source::Beside, None, &[]).unwrap();
    assert!(checkpoint.preset().is_none() && checkpoint.config().str_opt("family").unwrap() == Some("mine"));
    let checkpoint = presets::open(folder.path(), Source::Preset(preset.name), None, &[]).unwrap();
    assert_eq!(checkpoint.preset().map(|found| found.name), Some(preset.name));
    Model::load(&checkpoint, None).unwrap();

    std::fs::write(folder.path().join("config.json"), "{").unwrap();
    assert!(matches!(presets::open(folder.path(), Source::Beside, None, &[]).unwrap_err(), Error::Json { .. }));
    let other = folder.path().join("other.json");
    std::fs::write(&other, preset.config).unwrap();
    let checkpoint = presets::open(folder.path(), Source::File(&other), None, &[]).unwrap();
    assert_eq!((checkpoint.preset().is_none(), checkpoint.config().path()), (true, other.as_path()));
    Model::load(&checkpoint, None).unwrap();
}

#[test]
fn presets_have_names() {
    let error = Preset::named("moh-vit").unwrap_err();
    assert!(matches!(error, Error::UnknownPreset { .. }));
    let text = error.to_string();
    assert!(NAMES.iter().all(|name| text.contains(name)), "{text}");
    assert_eq!(NAMES.len(), PRESETS.len());
}
