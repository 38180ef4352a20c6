//! `moh-export convert`: a dense LLaMA becomes a Mixture-of-Head model.

#[cfg(feature = "text")]
mod cost;
mod refusal;

use crate::support::{Run, text};
use half::bf16;
use moh_export::ElementType;
use moh_models::{Checkpoint, Config, Model, WeightType, initial};
use safetensors::SafeTensors;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

/// As transformers writes it: 8 heads on 2 key-value heads.
const CONFIG: &str = r#"{
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "vocab_size": 48,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 8,
  "num_key_value_heads": 2,
  "max_position_embeddings": 64,
  "rms_norm_eps": 1e-05,
  "hidden_act": "silu",
  "tie_word_embeddings": false,
  "torch_dtype": "bfloat16",
  "eos_token_id": [2, 3]
}
"#;
const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
const INDEX: &str = "model.safetensors.index.json";

/// A folder with a dense checkpoint in bfloat16, `dense`, of random weights.
struct Case {
    root: tempfile::TempDir,
}

impl Case {
    /// One of a single file.
    fn single() -> Case {
        let case = Case { root: tempfile::tempdir().unwrap() };
        let values = serde_json::from_str(CONFIG).unwrap();
        let config = Config::new("config.json", values);
        let (tensors, _) = moh_export::random::plan(&config, Some("llama"), None).unwrap();
        moh_export::random::write(&case.at("dense"), CONFIG, &tensors, ElementType::BF16, 3, false).unwrap();
        case
    }

    /// One of two shards, and files of all kinds beside them.
    fn new() -> Case {
        let case = Case::single();
        let single = case.at("dense/model.safetensors");
        let bytes = fs::read(&single).unwrap();
        fs::remove_file(single).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap().tensors();
        let parts: (Vec<_>, Vec<_>) = tensors.into_iter().partition(|(name, _)| name.contains("layers.0"));
        let mut map = Map::new();
        for (shard, part) in SHARDS.into_iter().zip([parts.0, parts.1]) {
            map.extend(part.iter().map(|(name, _)| (name.clone(), shard.into())));
            fs::write(case.at("dense").join(shard), safetensors::serialize(part, None).unwrap()).unwrap();
        }
        let index = json!({"metadata": {"total_size": 1, "more": "kept"}, "weight_map": map});
        fs::write(case.at("dense").join(INDEX), index.to_string()).unwrap();
        for name in SIDES.iter().chain(&LEFT_OUT) {
            fs::write(case.at("dense").join(name), json!({"added_tokens": [], "name": name}).to_string()).unwrap();
        }
        case
    }

    fn at(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// Puts a key into the dense configuration.
    fn set(&self, key: &str, value: Value) {
        let path = self.at("dense/config.json");
        let mut config: Map<String, Value> = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        config.insert(key.to_owned(), value);
        fs::write(path, Value::Object(config).to_string()).unwrap();
    }

    /// Runs `moh-export convert dense -o moh` with more arguments.
    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Run::tract().command();
        command.current_dir(self.root.path()).args(["convert", "dense", "-o", "moh"]).args(arguments).output().unwrap()
    }

    fn converted(&self, arguments: &[&str]) -> String {
        let done = self.run(arguments);
        assert!(done.status.success() && done.stderr.is_empty(), "{arguments:?}: {}", text(&done.stderr));
        text(&done.stdout)
    }

    /// What a conversion says that fails. It leaves nothing.
    fn refused(&self, arguments: &[&str]) -> String {
        let before = names(self.root.path());
        let done = self.run(arguments);
        let said = text(&done.stderr);
        assert!(!done.status.success() && done.stdout.is_empty(), "{arguments:?}: {said}");
        assert_eq!(names(self.root.path()), before, "{arguments:?}: {said}");
        said.strip_prefix("error: ").unwrap_or_else(|| panic!("{said}")).trim_end().to_owned()
    }
}

const SIDES: [&str; 6] = [
    "LICENSE.txt",
    "USE_POLICY.md",
    "chat_template.jinja",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
];
const LEFT_OUT: [&str; 3] = ["README.md", "training.json", "consolidated.pth.txt"];

/// Names in a folder, hidden ones too, sorted.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn object(path: &Path) -> Map<String, Value> {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// The bytes of every tensor.
fn tensors(folder: &Path) -> BTreeMap<String, (WeightType, Vec<u8>)> {
    let checkpoint = Checkpoint::open(folder, None).unwrap();
    let bytes = |name: &str| {
        let (weight, mut bytes) = (checkpoint.get(name).unwrap(), Vec::new());
        weight.read(0..weight.elements(), &mut bytes).unwrap();
        (name.to_owned(), (weight.dtype(), bytes))
    };
    checkpoint.names().map(bytes).collect()
}

/// Exports `moh`, which runs the model and compares it with candle.
fn export(case: &Case) {
    for run in Run::all() {
        let output = format!("{}/model.onnx", run.name);
        let arguments = ["moh", "-o", &output, "--dtype", "f32"];
        let done = run.command().current_dir(case.root.path()).args(arguments).output().unwrap();
        let said = text(&done.stdout) + &text(&done.stderr);
        let verified = said.contains("outputs off by at most") && said.contains("same heads in all");
        assert!(done.status.success() && verified && said.contains("shared      4 (x2)"), "{said}");
        assert!(said.contains("top-k       2 (x2)"), "{said}");
    }
}

#[test]
fn query_norms_change_the_configuration_alone() {
    let case = Case::new();
    let said = case.converted(&["--shared", "0.5", "--active", "0.75"]);
    assert!(said.contains("moh-llama, chosen by query norms") && !said.contains("cost"), "{said}");
    assert!(said.contains("8 heads: 4 shared, 2 of 4 routed (x2)"), "{said}");
    let mut expected: Vec<&str> = SHARDS.iter().chain(&SIDES).chain(&[INDEX, "config.json"]).copied().collect();
    expected.sort_unstable();
    assert_eq!(names(&case.at("moh")), expected);
    for name in expected.into_iter().filter(|name| *name != "config.json") {
        let read = |folder: &str| fs::read(case.at(folder).join(name)).unwrap();
        assert!(read("dense") == read("moh"), "{name}");
    }
    let (dense, moh) = (object(&case.at("dense/config.json")), object(&case.at("moh/config.json")));
    assert!(dense.iter().all(|(key, value)| moh[key] == *value), "{moh:?}");
    let added: BTreeMap<&str, &Value> =
        moh.iter().filter(|(key, _)| !dense.contains_key(*key)).map(|(key, value)| (key.as_str(), value)).collect();
    let fractions = [("moh_routed_fraction", &json!(0.25)), ("moh_shared_fraction", &json!(0.5))];
    assert_eq!(added, [("family", &json!("moh-llama"))].into_iter().chain(fractions).collect());
    export(&case);
}

#[test]
fn a_two_stage_router_has_a_file_of_its_own() {
    let case = Case::new();
    let said = case.converted(&["--router", "two-stage"]);
    // Of each layer 4 rows for routed heads, 2 for the balance, 4 for shared heads.
    assert!(said.contains("moh-llm, two-stage router, 640 random weights"), "{said}");
    let (dense, moh) = (tensors(&case.at("dense")), tensors(&case.at("moh")));
    assert!(dense.iter().all(|(name, tensor)| moh[name] == *tensor), "a weight has changed");
    let new: Vec<_> = moh.iter().filter(|(name, _)| !dense.contains_key(*name)).collect();
    assert_eq!(new.len(), 6);
    for (name, (dtype, bytes)) in new {
        let rows = if name.ends_with("wg_0.weight") { 2 } else { 4 };
        let expected = initial::fill("moh-llm", name, &[rows, 32], 0).into_iter();
        let expected: Vec<u8> = expected.flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect();
        assert!(*dtype == WeightType::BF16 && *bytes == expected, "{name}");
    }
    let index = object(&case.at("moh").join(INDEX));
    let elements: usize = moh.values().map(|(_, bytes)| bytes.len()).sum();
    assert_eq!(index["metadata"], json!({"more": "kept", "total_size": elements}));
    let config = object(&case.at("moh/config.json"));
    let keys = ["family", "shared_head", "routed_head"].map(|key| config[key].clone());
    assert_eq!(keys, [json!("moh-llm"), json!(4), json!(2)]);
    export(&case);
}

#[test]
fn seeds() {
    let routers = |seed: &str| {
        let case = Case::new();
        case.converted(&["--router", "two-stage", "--seed", seed]);
        fs::read(case.at("moh/router.safetensors")).unwrap()
    };
    assert!(routers("7") == routers("7") && routers("7") != routers("8"));
}

/// Query norms have no weights that a seed could be for.
#[test]
fn a_seed_without_random_weights() {
    let case = Case::new();
    let expected = "--seed is for the random weights of --router two-stage: query norms have none";
    assert_eq!(case.refused(&["--seed", "3"]), expected);
}

/// The folder is the one that was named, whatever its name.
#[cfg(target_os = "linux")]
#[test]
fn a_folder_whose_name_is_no_text() {
    use std::os::unix::ffi::OsStrExt;
    let case = Case::single();
    let output = std::ffi::OsStr::from_bytes(b"moh\xff");
    let mut command = Run::tract().command();
    let done = command.current_dir(case.root.path()).args(["convert", "dense", "-o"]).arg(output).output().unwrap();
    assert!(done.status.success(), "{}", text(&done.stderr));
    assert_eq!(names(&case.root.path().join(output)), ["config.json", "model.safetensors"]);
}

/// A single file has another name beside that of the routers: under the usual one it would be taken for all of the model.
#[test]
fn a_single_file() {
    let case = Case::single();
    case.converted(&[]);
    assert_eq!(names(&case.at("moh")), ["config.json", "model.safetensors"]);
    fs::rename(case.at("moh"), case.at("first")).unwrap();
    // A file of any name, of a folder that is not named.
    fs::rename(case.at("dense/model.safetensors"), case.at("dense/other.safetensors")).unwrap();
    let mut command = Run::tract().command();
    let arguments = ["convert", "other.safetensors", "-o", "../moh", "--router", "two-stage"];
    let done = command.current_dir(case.at("dense")).args(arguments).output().unwrap();
    assert!(done.status.success(), "{}", text(&done.stderr));
    assert_eq!(names(&case.at("moh")), ["config.json", "dense.safetensors", INDEX, "router.safetensors"]);
    assert!(tensors(&case.at("first")).iter().all(|(name, tensor)| tensors(&case.at("moh"))[name] == *tensor));
    export(&case);
}

/// Files of torch.save go along as they are where no weights are added.
#[test]
fn a_file_of_another_format() {
    let case = Case::single();
    let dense = Checkpoint::open(&case.at("dense"), None).unwrap();
    let tensors = Model::load(&dense, Some("llama")).unwrap().tensors().clone();
    fs::remove_file(case.at("dense/model.safetensors")).unwrap();
    crate::published::write_zeros_of(&case.at("dense/llama.pth"), &tensors);
    case.converted(&[]);
    assert_eq!(names(&case.at("moh")), ["config.json", "llama.pth"]);
    Model::load(&Checkpoint::open(&case.at("moh"), None).unwrap(), None).unwrap();
    fs::remove_dir_all(case.at("moh")).unwrap();
    let said = case.refused(&["--router", "two-stage"]);
    assert!(
        said.starts_with("dense/llama.pth: the router's weights cannot be put beside it: it is not a safetensors"),
        "{said}"
    );
}

/// Names with a prefix: the routers' weights get it, too.
#[test]
fn prefixes() {
    let case = Case::single();
    let file = case.at("dense/model.safetensors");
    let bytes = fs::read(&file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap().tensors().into_iter();
    let renamed = tensors.map(|(name, view)| (format!("module.{name}"), view));
    fs::write(&file, safetensors::serialize(renamed, None).unwrap()).unwrap();
    case.converted(&["--router", "two-stage"]);
    let routers = SafeTensors::deserialize(&fs::read(case.at("moh/router.safetensors")).unwrap())
        .unwrap()
        .names()
        .into_iter()
        .map(str::to_owned)
        .collect::<Vec<_>>();
    assert!(routers.len() == 6 && routers.iter().all(|name| name.starts_with("module.model.layers.")), "{routers:?}");
    export(&case);
}

/// As a program reads it.
#[test]
fn a_report_in_json() {
    let case = Case::new();
    let report: Value = serde_json::from_str(&case.converted(&["--json", "--active", "0.6"])).unwrap();
    let expected = json!({"family": "moh-llama", "router": "query-norm", "layers": 2, "num_heads": 8,
        "num_shared_heads": 4, "top_k": 1, "router_parameters": 0, "cost": null, "warnings": []});
    assert!(expected.as_object().unwrap().iter().all(|(key, value)| report[key] == *value), "{report:#}");
    assert_eq!(report["files"].as_array().unwrap().len(), names(&case.at("moh")).len());
}

#[cfg(unix)]
#[test]
fn hard_links_where_they_are_asked_for() {
    use std::os::unix::fs::{MetadataExt, symlink};
    let inode = |path: PathBuf| fs::metadata(path).unwrap().ino();
    let case = Case::new();
    // As in a cache of Hugging Face's hub.
    fs::rename(case.at("dense").join(SHARDS[1]), case.at("blob")).unwrap();
    symlink("../blob", case.at("dense").join(SHARDS[1])).unwrap();
    case.converted(&["--link"]);
    for shard in SHARDS {
        assert_eq!(inode(case.at("dense").join(shard)), inode(case.at("moh").join(shard)), "{shard}");
    }
    assert!(fs::symlink_metadata(case.at("moh").join(SHARDS[1])).unwrap().is_file());
    fs::rename(case.at("moh"), case.at("linked")).unwrap();
    case.converted(&[]);
    assert!(SHARDS.iter().all(|shard| inode(case.at("linked").join(shard)) != inode(case.at("moh").join(shard))));
}

/// Of a tied matrix, safetensors' `save_model` may keep the other name: nothing but routers is new.
#[test]
fn a_tied_matrix_under_its_other_name() {
    let case = Case::single();
    case.set("tie_word_embeddings", json!(true));
    let path = case.at("dense/model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let kept = tensors.tensors().into_iter().filter(|(name, _)| name != "lm_head.weight");
    let renamed: Vec<_> = kept.map(|(name, view)| (name.replace("model.embed_tokens", "lm_head"), view)).collect();
    fs::write(&path, safetensors::serialize(renamed, None).unwrap()).unwrap();
    case.converted(&["--router", "two-stage"]);
    let bytes = fs::read(case.at("moh/router.safetensors")).unwrap();
    let routers = SafeTensors::deserialize(&bytes).unwrap();
    assert!(
        !routers.names().is_empty() && routers.names().iter().all(|name| name.contains(".wg")),
        "{:?}",
        routers.names()
    );
    let before = Model::load(&Checkpoint::open(&case.at("dense"), None).unwrap(), Some("llama")).unwrap();
    let after = Model::load(&Checkpoint::open(&case.at("moh"), None).unwrap(), None).unwrap();
    assert_eq!(after.warnings(), []);
    assert_eq!(after.tensors().len(), before.tensors().len() + routers.names().len());
}
