//! moh-export as a user calls it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use moh_export::proto::{ModelProto, ValueInfoProto, type_proto};
use prost::Message;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
}

fn copy(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(source(name)).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    folder
}

fn export(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_moh-export")).current_dir(folder).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn in_the_checkpoints_folder() {
    let folder = copy("examples/checkpoints/shakespeare-moh-llama");
    let before = fs::read(folder.path().join("config.json")).unwrap();
    let done = export(folder.path(), &["model.safetensors", "-o", "model.onnx"]);
    assert!(done.status.success(), "{}", text(&done.stderr));
    let said = text(&done.stdout);
    let facts =
        ["moh-llama", "layers        4", "heads         8 (x4)", "shared      4 (x4)", "top-k       2 (x4)", "75.0 %"];
    for part in facts.into_iter().chain(["parameters", "MACs/token", "model.onnx_data", "outputs off by at most"]) {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
    assert!(folder.path().join("model.onnx").is_file() && folder.path().join("model.onnx_data").is_file());
    assert_eq!(fs::read(folder.path().join("config.json")).unwrap(), before);

    let again = export(folder.path(), &["model.safetensors", "-o", "model.onnx"]);
    assert!(!again.status.success() && text(&again.stderr).contains("--force"));
    let forced = export(folder.path(), &["model.safetensors", "-o", "model.onnx", "--force", "-q", "--no-verify"]);
    assert!(
        forced.status.success() && forced.stdout.is_empty() && forced.stderr.is_empty(),
        "{}",
        text(&forced.stderr)
    );
}

#[test]
fn the_style_of_dense_and_of_head_layers() {
    let operators = |arguments: &[&str]| {
        let folder = copy("examples/checkpoints/shakespeare-moh-llama");
        let done = export(folder.path(), &[&[".", "-o", "model.onnx", "--no-verify"], arguments].concat());
        assert!(done.status.success(), "{arguments:?}: {}", text(&done.stderr));
        let model = ModelProto::decode(&fs::read(folder.path().join("model.onnx")).unwrap()[..]).unwrap();
        let nodes = model.graph.unwrap().node;
        ["Linear", "RoutedCombine"].map(|operator| nodes.iter().any(|node| node.op_type() == operator))
    };
    assert_eq!(operators(&["--dense-layers", "onnx", "--head-layers", "dense"]), [false, false]);
    assert_eq!(operators(&["--dense-layers", "moh", "--head-layers", "routed"]), [true, true]);
    assert_eq!(operators(&["--dense-layers", "moh"]), [true, true]);
    assert_eq!(operators(&["--head-layers", "dense"]), [false, false]);
    assert_eq!(operators(&["--for", "ort-cpu", "--dense-layers", "onnx"]), [false, true]);
}

#[test]
fn side_files_go_along() {
    let folder = copy("examples/checkpoints/shakespeare-moh-llama");
    let done = export(folder.path(), &[".", "-o", "out/model.onnx", "--no-verify"]);
    assert!(done.status.success(), "{}", text(&done.stderr));
    let (from, to) = (folder.path().join("tokenizer.json"), folder.path().join("out/tokenizer.json"));
    assert_eq!(fs::read(from).unwrap(), fs::read(to).unwrap());
    // These have more keys.
    for name in ["config.json", "tokenizer_config.json"] {
        let read = |path: &Path| -> serde_json::Map<String, serde_json::Value> {
            serde_json::from_slice(&fs::read(path.join(name)).unwrap()).unwrap()
        };
        let written = read(&folder.path().join("out"));
        for (key, value) in read(folder.path()) {
            assert_eq!(written[&key], value, "{name}: {key}");
        }
    }
    assert!(!folder.path().join("out/heldout.safetensors").exists());
    fs::write(folder.path().join("out/tokenizer.json"), "mine").unwrap();
    fs::remove_file(folder.path().join("out/model.onnx")).unwrap();
    fs::remove_file(folder.path().join("out/model.onnx_data")).unwrap();
    let done = export(folder.path(), &[".", "-o", "out/model.onnx", "--no-verify"]);
    assert!(!done.status.success() && text(&done.stderr).contains("tokenizer.json"), "{}", text(&done.stderr));
    assert_eq!(fs::read_to_string(folder.path().join("out/tokenizer.json")).unwrap(), "mine");
    assert!(!folder.path().join("out/model.onnx").exists());
}

/// What a file says of itself: element types of the model's input and of a weight, versions, and how attention is written.
#[derive(Debug, PartialEq)]
struct Written {
    input: i32,
    weight: i32,
    opset: i64,
    ir_version: i64,
    routed_nodes: bool,
    functions: bool,
    gates: usize,
}

impl Written {
    fn read(path: &Path) -> Written {
        let model = ModelProto::decode(fs::read(path).unwrap().as_slice()).unwrap();
        let graph = model.graph.as_ref().unwrap();
        let named = |values: &[ValueInfoProto], name: &str| {
            let value = values.iter().find(|value| value.name() == name).unwrap();
            match &value.r#type.as_ref().unwrap().value {
                Some(type_proto::Value::TensorType(tensor)) => tensor.elem_type(),
                other => panic!("{name} is {other:?}"),
            }
        };
        let weight = graph.initializer.iter().find(|init| init.name() == "blocks.0.mlp.fc1.weight.T").unwrap();
        let length = weight.external_data.iter().find(|entry| entry.key() == "length").unwrap().value();
        let element = if weight.data_type() == F32 { 4 } else { 2 };
        assert_eq!(length, (96 * 384 * element).to_string());
        Written {
            input: named(&graph.input, "hidden_states"),
            weight: weight.data_type(),
            opset: model.opset_import.iter().find(|set| set.domain().is_empty()).unwrap().version(),
            ir_version: model.ir_version(),
            routed_nodes: graph.node.iter().any(|node| node.domain() == "ai.moh"),
            functions: !model.functions.is_empty(),
            gates: graph.output.iter().filter(|output| output.name().starts_with("gates.")).count(),
        }
    }
}

/// ONNX's numbers of element types.
const F32: i32 = 1;
const F16: i32 = 10;
const BF16: i32 = 16;

#[test]
fn every_option() {
    let folder = copy("tests/golden/dit-tiny-75");
    let plain = || Written {
        input: F32,
        weight: F32,
        opset: 21,
        ir_version: 10,
        routed_nodes: true,
        functions: true,
        gates: 0,
    };
    let variants: &[(&[&str], Written)] = &[
        (&[], plain()),
        (&["--dtype", "f16"], Written { input: F16, weight: F16, ..plain() }),
        (&["--dtype", "bf16"], Written { input: BF16, weight: BF16, ..plain() }),
        (&["--attention", "portable"], Written { routed_nodes: false, functions: false, ..plain() }),
        (&["--opset", "20", "--ir-version", "9"], Written { opset: 20, ir_version: 9, ..plain() }),
        (&["--opset", "23", "--ir-version", "12"], Written { opset: 23, ir_version: 12, ..plain() }),
        (&["--output-gates", "--verify"], Written { gates: 4, ..plain() }),
    ];
    for (i, (options, expected)) in variants.iter().enumerate() {
        let output = format!("out{i}/model.onnx");
        let arguments: Vec<&str> =
            ["model.safetensors", "-o", &output].into_iter().chain(options.iter().copied()).collect();
        let done = export(folder.path(), &arguments);
        assert!(done.status.success(), "{options:?}: {}", text(&done.stderr));
        let said = text(&done.stdout);
        assert!(said.contains("moh-dit"));
        assert_eq!(said.contains("outputs off by at most"), expected.weight != BF16, "{options:?}: {said}");
        assert_eq!(&Written::read(&folder.path().join(&output)), expected, "{options:?}");
        let left: Vec<_> =
            fs::read_dir(folder.path().join(format!("out{i}"))).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left.len(), 4, "{left:?}");
    }
    let help = export(folder.path(), &["--help"]);
    for option in [
        "--family",
        "--config",
        "--part",
        "--dtype",
        "--attention",
        "--opset",
        "--ir-version",
        "--output-gates",
        "--verify",
        "--no-verify",
        "--force",
        "--quiet",
    ] {
        assert!(text(&help.stdout).contains(option), "{option}");
    }
}

#[test]
fn dense_families_and_configs() {
    let folder = copy("tests/golden/llama-moh-tiny");
    let done = export(folder.path(), &[".", "-o", "dense/model.onnx", "--family", "llama"]);
    assert!(done.status.success(), "{}", text(&done.stderr));
    assert!(text(&done.stdout).contains("active heads  100.0 %"));
    let config = fs::read_to_string(folder.path().join("config.json")).unwrap();
    fs::create_dir(folder.path().join("other")).unwrap();
    fs::write(folder.path().join("other/c.json"), config.replacen('{', "{\"moh_routed_fraction\": 0.5,", 1)).unwrap();
    let done = export(folder.path(), &["model.safetensors", "-o", "all/model.onnx", "--config", "other/c.json"]);
    assert!(done.status.success(), "{}", text(&done.stderr));
    assert!(text(&done.stdout).contains("top-k       4 (x3)"), "{}", text(&done.stdout));
    assert!(fs::read_to_string(folder.path().join("all/config.json")).unwrap().contains("moh_routed_fraction"));
}

#[test]
fn parts_of_an_encoder_decoder() {
    let folder = copy("tests/golden/moa-dec-tiny");
    let done = export(folder.path(), &[".", "-o", "out/decoder.onnx", "--part", "decoder"]);
    assert!(done.status.success(), "{}", text(&done.stderr));
    assert!(text(&done.stdout).contains("same heads in all 120 rows"), "{}", text(&done.stdout));
    let done = export(folder.path(), &[".", "-o", "out/encoder.onnx", "--part", "encoder"]);
    assert!(!done.status.success() && text(&done.stderr).contains("encoder.layers.0."), "{}", text(&done.stderr));
    assert!(!folder.path().join("out/encoder.onnx").exists());

    for (part, lengths) in [("encoder", &["--tokens", "9"][..]), ("decoder", &["--tokens", "1", "--past", "9"])] {
        let done = export(folder.path(), &[&["inspect", "--preset", "moa-big", "--part", part], lengths].concat());
        let said = text(&done.stdout);
        assert!(done.status.success() && said.contains(&format!("{part}.layers.5.self_attn")), "{said}");
        // A step finds the source in its cache.
        assert_eq!(
            said.contains("encoder_sequence = 0, encoder_past+encoder_sequence = 512"),
            part == "decoder",
            "{said}"
        );
    }

    let folder = copy("tests/golden/llama-moh-tiny");
    let done = export(folder.path(), &["inspect", ".", "--part", "encoder"]);
    assert!(!done.status.success() && text(&done.stderr).contains("moh-llama"), "{}", text(&done.stderr));
    let done = export(folder.path(), &[".", "-o", "out/model.onnx", "--part", "decoder"]);
    let said = text(&done.stderr);
    assert!(!done.status.success() && said.contains("--part") && said.contains("moh-llama"), "{said}");
}

#[test]
fn sizes_that_are_the_same_in_every_call() {
    let folder = copy("examples/checkpoints/shakespeare-moh-llama");
    let done = export(folder.path(), &[".", "-o", "out/model.onnx", "--batch", "1", "--sequence", "5"]);
    assert!(done.status.success() && text(&done.stdout).contains("outputs off by at most"), "{}", text(&done.stderr));
    let model = fs::read(folder.path().join("out/model.onnx")).unwrap();
    let names = |name: &[u8]| model.windows(name.len()).any(|part| part == name);
    assert!(names(b"past+5") && !names(b"past+sequence") && !names(b"batch"));

    let other = export(folder.path(), &[".", "-o", "b/model.onnx", "--batch", "0"]);
    assert!(!other.status.success() && text(&other.stderr).contains("--batch"), "{}", text(&other.stderr));
    let image = copy("examples/checkpoints/digits-moh-dit");
    let other = export(image.path(), &[".", "-o", "model.onnx", "--sequence", "5"]);
    assert!(text(&other.stderr).contains("moh-dit has no dimension sequence; it has batch"), "{}", text(&other.stderr));
}

#[test]
fn attention_in_bf16() {
    let folder = copy("examples/checkpoints/shakespeare-moh-llama");
    let arguments = [".", "-o", "out/model.onnx", "--attention-type", "bf16"];
    let refused = export(folder.path(), &[&arguments[..], &["--attention", "portable"]].concat());
    assert!(text(&refused.stderr).contains("--attention portable"), "{}", text(&refused.stderr));
    for cache in [["--cache", "in-place"], ["--for", "ort-cpu"]] {
        let refused = export(folder.path(), &[&arguments[..], &cache].concat());
        let expected = "error: attention in bf16: expected layers of ai.moh.RoutedAttention, found only those of \
                        ai.moh.RoutedCachedAttention; choose --cache concat, or leave out --attention-type bf16\n";
        assert_eq!(text(&refused.stderr), expected, "{cache:?}");
        assert!(!folder.path().join("out").exists());
    }
    let done = export(folder.path(), &arguments);
    // Where there is no onnxruntime, tract verifies; it has no bfloat16, and says so.
    let said = text(&done.stdout) + &text(&done.stderr);
    let verified = done.status.success() && said.contains("outputs off by at most");
    assert!(verified || said.contains("which tract does not have"), "{said}");
}

#[test]
fn a_whole_model_of_random_weights_is_exported_part_by_part() {
    let folder = tempfile::tempdir().unwrap();
    let config = r#"{"family": "moa", "encoder_layers": 1, "decoder_layers": 1, "encoder_embed_dim": 16,
        "decoder_embed_dim": 16, "ffn_embed_dim": 32, "num_expert": 4, "attention_heads": 2, "head_dim": 8,
        "share_all_embeddings": true, "vocab_size": 20}"#;
    fs::write(folder.path().join("moa.json"), config).unwrap();
    let succeeds = |arguments: &[&str]| {
        let done = export(folder.path(), arguments);
        assert!(done.status.success(), "{arguments:?}: {}", text(&done.stderr));
    };
    succeeds(&["random", "moa.json", "-o", "whole"]);
    for part in ["encoder", "decoder"] {
        succeeds(&["whole", "--part", part, "-o", &format!("out/{part}.onnx")]);
    }
    succeeds(&["random", "moa.json", "--part", "encoder", "-o", "encoder"]);
    let done = export(folder.path(), &["encoder", "--part", "decoder", "-o", "none/model.onnx"]);
    assert!(!done.status.success() && text(&done.stderr).contains("decoder.layers.0"), "{}", text(&done.stderr));
    succeeds(&["encoder", "-o", "alone/model.onnx"]);
    fs::write(folder.path().join("nameless.json"), config.replace("\"family\": \"moa\", ", "")).unwrap();
    succeeds(&["random", "nameless.json", "--family", "moa", "--part", "decoder", "-o", "decoder"]);
    succeeds(&["decoder", "-o", "named/model.onnx"]);
    let done = export(folder.path(), &["random", "moh-dit-s-75", "--part", "encoder", "-o", "dit"]);
    assert!(!done.status.success() && !folder.path().join("dit").exists(), "{}", text(&done.stderr));
}

#[test]
fn a_target_and_what_overrides_it() {
    let folder = copy("examples/checkpoints/shakespeare-moh-llama");
    let done = export(folder.path(), &[".", "-o", "out/model.onnx", "--for", "web", "--dtype", "f32", "--no-verify"]);
    let said = text(&done.stdout);
    assert!(done.status.success() && folder.path().join("out/onnx/model.onnx").is_file(), "{}", text(&done.stderr));
    let chosen = "web (onnxruntime-web and transformers.js): f32, opset 21, IR 10, model in the folder onnx; as asked for: --dtype";
    assert!(said.contains(chosen) && said.contains("\nmemory        "), "{said}");

    let refused = export(folder.path(), &[".", "-o", "tract/model.onnx", "--for", "tract", "--dtype", "bf16"]);
    let error = text(&refused.stderr);
    let expected = "error: the target tract cannot run a model in bf16: tract has no bfloat16; leave out --dtype bf16, or choose another --for\n";
    assert_eq!((refused.status.code(), error.as_str()), (Some(1), expected));
    assert!(!folder.path().join("tract").exists());
    let dit = copy("examples/checkpoints/digits-moh-dit");
    let refused = export(dit.path(), &[".", "-o", "genai/model.onnx", "--for", "genai"]);
    let expected = "cannot run a moh-dit: it runs language models only; choose another --for\n";
    assert!(text(&refused.stderr).ends_with(expected), "{}", text(&refused.stderr));
}

/// The target's cache is in place, which there is no portable form of; nobody asked for it.
#[test]
fn portable_attention_for_a_target() {
    let folder = copy("examples/checkpoints/shakespeare-moh-llama");
    let arguments = [".", "-o", "out/model.onnx", "--for", "ort-cpu", "--attention", "portable", "--no-verify"];
    let done = export(folder.path(), &arguments);
    assert!(done.status.success(), "{}", text(&done.stderr));
    let said = text(&done.stdout);
    assert!(said.contains("; as asked for: --attention\n"), "{said}");
    let done = export(folder.path(), &[&arguments[..], &["--cache", "in-place", "--force"]].concat());
    assert!(!done.status.success());
    assert!(text(&done.stderr).starts_with("error: a cache in place is made of operators"), "{}", text(&done.stderr));
    // Nor did anybody ask for operators of ours.
    let done = export(folder.path(), &[&arguments[..], &["--quantize", "int4", "--force"]].concat());
    let said = text(&done.stdout);
    assert!(done.status.success() && said.contains("float activations, form qdq;"), "{}{said}", text(&done.stderr));
    assert!(said.contains(" as qdq, float activations; as asked for: --attention\n"), "{said}");
    let model = ModelProto::decode(&fs::read(folder.path().join("out/model.onnx")).unwrap()[..]).unwrap();
    assert!(model.graph.unwrap().node.iter().all(|node| node.domain().is_empty()));
}

/// An image classifier has no cache that a target could choose.
#[test]
fn a_target_chooses_what_there_is() {
    let folder = copy("examples/checkpoints/digits-moh-vit");
    let done = export(folder.path(), &[".", "-o", "out/model.onnx", "--for", "web", "--no-verify"]);
    assert!(done.status.success(), "{}", text(&done.stderr));
    assert!(!text(&done.stderr).contains("not read"), "{}", text(&done.stderr));
}

#[test]
fn a_target_in_the_report() {
    let folder = copy("examples/checkpoints/shakespeare-moh-llama");
    let done = export(folder.path(), &[".", "-o", "out/model.onnx", "--for", "ort-cpu", "--no-verify", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    let target = &report["target"];
    assert_eq!(
        (&target["target"], &target["dtype"], &target["layout"]),
        (&"ort-cpu".into(), &"f32".into(), &"flat".into())
    );
    let weights = target["memory"]["weights"].as_u64().unwrap();
    let data = fs::metadata(folder.path().join("out/model.onnx_data")).unwrap().len();
    assert!(weights > data * 9 / 10, "{weights} of {data}");
}

#[test]
fn a_target_chooses_how_weights_are_quantised() {
    let folder = copy("examples/checkpoints/shakespeare-moh-llama");
    let said = |output: &str, more: &[&str]| {
        let arguments = [&[".", "-o", output, "--for", "tract", "--no-verify", "--quantize", "int8"], more].concat();
        let done = export(folder.path(), &arguments);
        assert!(done.status.success(), "{}", text(&done.stderr));
        text(&done.stdout)
    };
    let usual = said("usual/model.onnx", &[]);
    assert!(usual.contains(", int8 weights in blocks of up to 64 as moh, int8 activations\n"), "{usual}");
    let asked = said("asked/model.onnx", &["--block", "128", "--keep", "*.down_proj"]);
    assert!(asked.contains(", int8 weights in blocks of 128 as moh, int8 activations\n"), "{asked}");
    // ONNX's own operators have no activations in int8.
    let qdq = said("qdq/model.onnx", &["--form", "qdq"]);
    let expected =
        ", int8 weights in blocks of up to 64 as qdq, float activations; as asked for: --form, --activations\n";
    assert!(qdq.contains(expected), "{qdq}");
}
