//! Checkpoints whose tensors have other names than the model's, or that hold more than a model.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use candle_core::{Device, Tensor};
use moh_models::checkpoint::Prefix;
use moh_models::presets::{self, Preset, Source};
use moh_models::{Checkpoint, Error, Model, Warning, WeightType};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

type Tensors = HashMap<String, Tensor>;

const CASES: [&str; 5] = ["dit-tiny-75", "llama-moh-tiny", "moa-dec-tiny", "moa-enc-tiny", "vit-tiny-b"];

fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(case)
}

fn tensors(case: &str) -> Tensors {
    candle_core::safetensors::load(golden(case).join("model.safetensors"), &Device::Cpu).unwrap()
}

fn renamed(tensors: Tensors, rename: impl Fn(&str) -> String) -> Tensors {
    tensors.into_iter().map(|(name, tensor)| (rename(&name), tensor)).collect()
}

fn with(mut tensors: Tensors, names: &[&str]) -> Tensors {
    let one = Tensor::zeros(1, candle_core::DType::F32, &Device::Cpu).unwrap();
    tensors.extend(names.iter().map(|name| ((*name).to_owned(), one.clone())));
    tensors
}

fn folder_of(case: &str, tensors: &Tensors) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(golden(case).join("config.json"), folder.path().join("config.json")).unwrap();
    candle_core::safetensors::save(tensors, folder.path().join("model.safetensors")).unwrap();
    folder
}

fn load(case: &str, tensors: &Tensors, ignore: &[&str]) -> Result<Model, Error> {
    let folder = folder_of(case, tensors);
    let ignore: Vec<String> = ignore.iter().map(|pattern| (*pattern).to_owned()).collect();
    let checkpoint = presets::open(folder.path(), Source::Beside, None, &ignore).unwrap();
    Model::load(&checkpoint, None)
}

fn removed(prefix: &str) -> Option<Prefix> {
    Some(Prefix::Removed(prefix.to_owned()))
}

#[test]
fn prefixes_are_removed() {
    for case in CASES {
        let plain = load(case, &tensors(case), &[]).unwrap();
        assert_eq!(plain.prefix(), None);
        for prefix in
            ["module.", "_orig_mod.", "model.", "base_model.model.", "_forward_module._orig_mod.model.", "encoder."]
        {
            let model = load(case, &renamed(tensors(case), |name| format!("{prefix}{name}")), &[]);
            let model = model.unwrap_or_else(|error| panic!("{case}, {prefix}: {error}"));
            assert_eq!(model.prefix(), removed(prefix).as_ref(), "{case}");
            assert_eq!((model.tensors(), model.parameters()), (plain.tensors(), plain.parameters()), "{case}");
            assert_eq!(model.warnings(), []);
        }
    }
}

/// What Lightning keeps beside the model is named.
#[test]
fn tensors_without_the_prefix_are_left_out() {
    let all = renamed(tensors("vit-tiny-b"), |name| format!("model.{name}"));
    let model = load("vit-tiny-b", &with(all, &["criterion.weight", "metric.total"]), &[]).unwrap();
    assert_eq!(model.prefix(), removed("model.").as_ref());
    let [Warning::LeftOut { tensors, .. }] = model.warnings() else { panic!("{:?}", model.warnings()) };
    assert_eq!(tensors, &["criterion.weight", "metric.total"]);
    assert!(!model.tensors().iter().any(|(name, _)| name.contains("metric")));
}

/// A LLaMA's own names begin with `model.`, but for one. Without its language model's head it is saved without that.
#[test]
fn a_prefix_that_is_the_models_own() {
    let case = "llama-moh-tiny";
    assert_eq!(load(case, &tensors(case), &[]).unwrap().prefix(), None);
    let mut headless = tensors(case);
    headless.remove("lm_head.weight").unwrap();
    let error = load(case, &headless, &[]).err().unwrap().to_string();
    assert!(error.contains("1 missing:\n  \"lm_head.weight\"") && !error.contains("unexpected"), "{error}");
    let bare = renamed(headless, |name| name.strip_prefix("model.").unwrap().to_owned());
    let folder = folder_of(case, &bare);
    let config = std::fs::read_to_string(golden(case).join("config.json")).unwrap();
    assert!(config.contains("\"tie_word_embeddings\": false"));
    let tied = config.replace("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
    std::fs::write(folder.path().join("config.json"), tied).unwrap();
    let model = Model::load(&Checkpoint::open(folder.path(), None).unwrap(), None).unwrap();
    assert_eq!(model.prefix(), Some(&Prefix::Added("model.".to_owned())));

    // A head of its own is not used, which nobody may have meant.
    let with_head = folder_of(case, &tensors(case));
    std::fs::copy(folder.path().join("config.json"), with_head.path().join("config.json")).unwrap();
    let model = Model::load(&Checkpoint::open(with_head.path(), None).unwrap(), None).unwrap();
    let [warning] = model.warnings() else { panic!("{:?}", model.warnings()) };
    let text = warning.to_string();
    assert!(text.contains("\"lm_head.weight\" is not used and differs from \"model.embed_tokens.weight\""), "{text}");
    let mut same = tensors(case);
    let embedding = same["model.embed_tokens.weight"].clone();
    same.insert("lm_head.weight".to_owned(), embedding);
    let same = folder_of(case, &same);
    std::fs::copy(folder.path().join("config.json"), same.path().join("config.json")).unwrap();
    assert!(Model::load(&Checkpoint::open(same.path(), None).unwrap(), None).unwrap().warnings().is_empty());
}

#[test]
fn one_of_several_models_is_chosen_by_ignoring_the_others() {
    let case = "dit-tiny-75";
    let mut both = renamed(tensors(case), |name| format!("student.{name}"));
    both.extend(renamed(tensors(case), |name| format!("teacher.{name}")));
    let error = load(case, &both, &[]).err().unwrap();
    assert!(matches!(error, Error::AmbiguousPrefix { .. }), "{error}");
    assert!(error.to_string().contains("\"student.\", \"teacher.\""), "{error}");
    let model = load(case, &both, &["teacher.*"]).unwrap();
    assert_eq!((model.prefix(), model.warnings()), (removed("student.").as_ref(), &[][..]));
}

/// What remains wrong is said of the names without the prefix.
#[test]
fn a_prefix_does_not_hide_what_is_wrong() {
    let case = "dit-tiny-75";
    let mut wrong = renamed(tensors(case), |name| format!("net.{name}"));
    wrong.remove("net.blocks.1.attn.wg.weight").unwrap();
    let error = load(case, &with(wrong, &["net.aux.weight"]), &[]).err().unwrap().to_string();
    for part in
        ["the prefix \"net.\" removed", "1 missing:\n  \"blocks.1.attn.wg.weight\"", "1 unexpected:\n  \"aux.weight\""]
    {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
}

#[test]
fn unexpected_tensors_that_are_ignored() {
    let case = "vit-tiny-b";
    let more = with(tensors(case), &["aux_head.weight", "aux_head.bias", "teacher"]);
    let error = load(case, &more, &["aux_head.*"]).err().unwrap().to_string();
    assert!(error.contains("1 unexpected:\n  \"teacher\""), "{error}");
    let model = load(case, &more, &["aux_head.*", "teach*", "nothing"]).unwrap();
    assert_eq!(model.ignored(), ["aux_head.bias", "aux_head.weight", "teacher"]);
    assert_eq!(model.parameters(), load(case, &tensors(case), &[]).unwrap().parameters());
    // What the model needs is read, whatever the patterns say.
    assert_eq!(load(case, &tensors(case), &["*"]).unwrap().ignored(), [""; 0]);
    // By the names in the file and in the model.
    let wrapped = renamed(more, |name| format!("module.{name}"));
    for pattern in ["module.aux*", "aux*"] {
        let model = load(case, &wrapped, &[pattern, "*teacher"]).unwrap();
        assert_eq!(model.ignored(), ["module.aux_head.bias", "module.aux_head.weight", "module.teacher"]);
        assert_eq!(model.tensors(), load(case, &tensors(case), &[]).unwrap().tensors());
    }
}

/// Weights of a published model, wrapped, find their preset.
#[test]
fn presets_behind_a_prefix() {
    let preset = Preset::named("moh-dit-s-90").unwrap();
    let (_, tensors) = Model::plan(&preset.config().unwrap(), None).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in tensors {
        let begin = end;
        end += 2 * shape.iter().product::<usize>();
        let entry = serde_json::json!({ "dtype": "BF16", "shape": shape, "data_offsets": [begin, end] });
        header.insert(format!("module.{name}"), entry);
    }
    let header = serde_json::Value::Object(header).to_string();
    let file = std::fs::File::create(folder.path().join("model.safetensors")).unwrap();
    std::io::Write::write_all(&mut &file, &[&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat()).unwrap();
    file.set_len(8 + header.len() as u64 + end as u64).unwrap();
    let checkpoint = presets::open(folder.path(), Source::Beside, None, &[]).unwrap();
    assert_eq!(checkpoint.preset().map(|preset| preset.name), Some("moh-dit-s-90"));
    let model = Model::load(&checkpoint, None).unwrap();
    assert_eq!((model.prefix(), model.weight_type()), (removed("module.").as_ref(), WeightType::BF16));
}

/// The error names what is in the file, also of tensors that are merged, cut, or only used for constants.
#[test]
fn infinite_weights_by_their_own_names() {
    let infinite = |case: &str, name: &str, at: usize| {
        let mut all = tensors(case);
        let tensor = all.remove(name).unwrap();
        let mut values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        values[at] = f32::INFINITY;
        all.insert(name.to_owned(), Tensor::from_vec(values, tensor.dims(), &Device::Cpu).unwrap());
        renamed(all, |name| format!("module.{name}"))
    };
    for name in ["block1.0.attn.cpb_fc1.weight", "block4.0.attn.cpb_fc2.bias", "block2.0.attn.temperature"] {
        let error = load("vit-tiny-b", &infinite("vit-tiny-b", name, 1), &[]).err().unwrap();
        assert!(matches!(error, Error::NotFinite { index: 1, .. }));
        let text = error.to_string();
        for part in ["model.safetensors: tensor \"module.", name, "element 1 is inf"] {
            assert!(text.contains(part), "{part:?} is not in: {text}");
        }
    }
}
