//! The three models of a translator compute what encoder and decoder do, which are compared with the published code.

use crate::support::{Run, text};
use moh_runtime::{Model, Options, RuntimeChoice, Tensor, Value};
use std::collections::BTreeMap;
use std::path::Path;

const CONFIG: &str = r#"{"family": "moa", "encoder_layers": 2, "decoder_layers": 2, "encoder_embed_dim": 16,
    "decoder_embed_dim": 16, "ffn_embed_dim": 32, "num_expert": 4, "attention_heads": 2, "head_dim": 8,
    "share_all_embeddings": true, "vocab_size": 20}"#;

const SOURCE: [i64; 8] = [7, 3, 12, 2, 9, 2, 1, 1];
const MASK: [i64; 8] = [1, 1, 1, 1, 1, 1, 0, 0];
/// The first token of both rows, and the next ones.
const TARGET: [[i64; 2]; 3] = [[2, 2], [5, 17], [11, 4]];

fn ids<const N: usize>(values: [i64; N]) -> Value {
    Tensor::new([2, N / 2], values.to_vec()).unwrap().into()
}

/// What a model gives, by name.
fn call(model: &mut Model, inputs: BTreeMap<String, Value>) -> BTreeMap<String, Tensor> {
    let names: Vec<String> = model.outputs().iter().map(|output| output.name.clone()).collect();
    let values =
        model.run(inputs.iter().map(|(name, value)| (name.as_str(), value.to_tensor().unwrap().into()))).unwrap();
    names.into_iter().zip(values).map(|(name, value)| (name, value.to_tensor().unwrap())).collect()
}

fn named<const N: usize>(inputs: [(&str, Value); N]) -> BTreeMap<String, Value> {
    inputs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn load(path: &Path) -> Model {
    Model::load(path, &Options { runtime: RuntimeChoice::Tract, ..Options::default() }).unwrap()
}

/// The caches of the next call: those that were given, and the new ones in their place.
fn caches(given: &BTreeMap<String, Value>, outputs: &BTreeMap<String, Tensor>) -> BTreeMap<String, Value> {
    let present = outputs.iter().filter_map(|(name, tensor)| {
        Some((format!("past_key_values.{}", name.strip_prefix("present.")?), tensor.clone().into()))
    });
    let past = given
        .iter()
        .filter(|(name, _)| name.starts_with("past"))
        .map(|(name, value)| (name.clone(), value.to_tensor().unwrap().into()));
    past.chain(present).collect()
}

/// What cannot be had of both parts at once is an error, and nothing is written.
fn refuses(folder: &Path, arguments: &[&str], expected: &str) {
    let mut command = Run::tract().command();
    let done = command.current_dir(folder).args(["whole", "--part", "both"]).args(arguments).output().unwrap();
    let said = text(&done.stderr);
    assert!(!done.status.success() && said.contains(expected), "{said}");
    let mut left: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["moa.json", "whole"]);
}

#[test]
fn three_models_on_one_weight_file() {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("moa.json"), CONFIG).unwrap();
    let program = |arguments: &[&str]| {
        let done = Run::tract().command().current_dir(root.path()).args(arguments).output().unwrap();
        assert!(done.status.success(), "{}", text(&done.stderr));
        text(&done.stdout)
    };
    program(&["random", "moa.json", "-o", "whole", "--seed", "5"]);
    refuses(
        root.path(),
        &["-o", "out", "--reference", "outputs.safetensors"],
        "outputs.safetensors: its inputs and outputs are one model's",
    );
    refuses(root.path(), &["--triton", "repository/translator"], "name the folder to write them to");
    refuses(root.path(), &["-o", "out", "--cache", "in-place"], "moa");
    for part in ["encoder", "decoder"] {
        program(&["whole", "--part", part, "-o", &format!("parts/{part}.onnx")]);
    }
    let linked = program(&["whole", "--part", "both", "-o", "linked", "--weights", "link"]);
    assert!(
        linked.contains("outputs off by at most") && linked.contains("stay in a file of the checkpoint"),
        "{linked}"
    );
    let said = program(&["whole", "--part", "both", "-o", "both"]);
    assert!(said.contains("outputs off by at most") && said.contains("layers        6"), "{said}");

    for (part, model) in
        [("encoder", "encoder_model"), ("decoder", "decoder_model"), ("decoder", "decoder_with_past_model")]
    {
        let compared = program(&["verify", &format!("both/{model}.onnx"), "whole", "--part", part]);
        assert!(compared.contains(&format!("{part}.layers.1")), "{compared}");
    }

    let at = |name: &str| root.path().join(name);
    let shared = |input: &str, part: &str| -> BTreeMap<String, Tensor> {
        call(&mut load(&at(input)), named([("input_ids", ids(SOURCE)), ("attention_mask", ids(MASK))]))
            .into_iter()
            .filter(|(name, _)| name == part)
            .collect()
    };
    let states = shared("both/encoder_model.onnx", "last_hidden_state");
    assert_eq!(states, shared("parts/encoder.onnx", "last_hidden_state"));
    let states = &states["last_hidden_state"];
    let states = || -> Value { states.clone().into() };

    let mut whole = load(&at("parts/decoder.onnx"));
    let empty = whole
        .inputs()
        .iter()
        .filter(|input| input.name.starts_with("past"))
        .map(|input| (input.name.clone(), Tensor::new([2, 1, 0, 8], Vec::<f32>::new()).unwrap().into()));
    let mut inputs: BTreeMap<String, Value> = empty.collect();
    inputs.extend(named([
        ("input_ids", ids(TARGET[0])),
        ("encoder_hidden_states", states()),
        ("encoder_attention_mask", ids(MASK)),
    ]));
    let mut expected = call(&mut whole, inputs);
    let mut first = load(&at("both/decoder_model.onnx"));
    let inputs = named([
        ("input_ids", ids(TARGET[0])),
        ("encoder_hidden_states", states()),
        ("encoder_attention_mask", ids(MASK)),
    ]);
    let mut found = call(&mut first, inputs);
    close(&found, &expected);
    assert_eq!(found.len(), expected.len());

    let mut later = load(&at("both/decoder_with_past_model.onnx"));
    let (mut past, mut past_of_whole) = (BTreeMap::new(), BTreeMap::new());
    for token in &TARGET[1..] {
        past = caches(&past, &found);
        past_of_whole = caches(&past_of_whole, &expected);
        let new = || named([("input_ids", ids(*token)), ("encoder_attention_mask", ids(MASK))]);
        let nothing = Tensor::new([2, 0, 16], Vec::<f32>::new()).unwrap();
        let with = |past: &BTreeMap<String, Value>| {
            let copied = past.iter().map(|(name, value)| (name.clone(), value.to_tensor().unwrap().into()));
            copied.chain(new()).collect::<BTreeMap<String, Value>>()
        };
        let mut inputs = with(&past_of_whole);
        inputs.insert("encoder_hidden_states".to_owned(), nothing.into());
        expected = call(&mut whole, inputs);
        found = call(&mut later, with(&past));
        assert!(found.keys().all(|name| !name.contains(".encoder.")), "{:?}", found.keys());
        close(&found, &expected);
    }
}

/// Outputs of one name are equal within rounding.
fn close(found: &BTreeMap<String, Tensor>, expected: &BTreeMap<String, Tensor>) {
    for (name, found) in found {
        let expected = &expected[name];
        assert_eq!(found.shape(), expected.shape(), "{name}");
        let (found, expected) = (found.as_slice::<f32>().unwrap(), expected.as_slice::<f32>().unwrap());
        assert!(expected.iter().any(|x| *x != 0.0), "{name} is empty");
        let error = found.iter().zip(expected).fold(0f32, |worst, (a, b)| worst.max((a - b).abs()));
        assert!(error < 1e-6, "{name}: {error}");
    }
}
