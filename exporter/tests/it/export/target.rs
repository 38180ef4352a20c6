//! Exports for a target: what is chosen, the memory that is reckoned, and what is refused.

use super::support::{Case, read};
use candle_core::DType;
use moh_export::passes::{self, NarrowAttention};
use moh_export::quantize::{Activations, Bits, Form, Quantize};
use moh_export::target::TARGETS;
use moh_export::{
    AttentionType, Chosen, DenseStyle, ElementType, Error, HeadStyle, Layout, Options, SideOptions, Sizes, Target,
    Weights,
};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn options(target: Target) -> Options {
    Options { verify: Some(false), ..target.options() }
}

fn exported(case: &Case, options: &Options) -> Chosen {
    case.export(options).unwrap().target.unwrap()
}

/// Bytes of the constants of a model, as its file has them.
fn constants(model: &Path) -> u64 {
    let graph = read(model).graph.unwrap();
    let length = |constant: &moh_export::proto::TensorProto| match &constant.raw_data {
        Some(bytes) => bytes.len() as u64,
        None => constant.external_data.iter().find(|e| e.key() == "length").unwrap().value().parse().unwrap(),
    };
    graph.initializer.iter().map(length).sum()
}

fn model(case: &Case, layout: Layout) -> PathBuf {
    match layout {
        Layout::Onnx => case.folder().join("onnx/model.onnx"),
        _ => case.output(),
    }
}

/// A bfloat16 checkpoint has to give each of them what it can run.
#[test]
fn every_target_gets_what_its_row_says() {
    for row in TARGETS {
        let case = Case::new("llama-moh-tiny");
        case.rewrite(|_, tensor| tensor.to_dtype(DType::BF16).unwrap());
        let chosen = exported(&case, &options(row.target));
        let found = (chosen.dtype, chosen.opset, chosen.layout, chosen.overridden.is_empty());
        assert_eq!(found, (row.dtype, row.opset, row.layout, true), "{}", row.name);
        let written = read(&model(&case, row.layout));
        assert_eq!(written.opset_import[0].version(), row.opset, "{}", row.name);
        let types: Vec<i32> = written.graph.unwrap().initializer.iter().map(|constant| constant.data_type()).collect();
        assert!(types.contains(&row.dtype.onnx()) && !types.contains(&ElementType::BF16.onnx()), "{}", row.name);
    }
}

/// Every runtime computes what candle does, with the layers of each style.
#[test]
fn dense_layers_are_those_of_the_target() {
    for (style, others) in [(None, true), (Some(DenseStyle::Onnx), false)] {
        for name in ["llama-moh-tiny", "vit-tiny-b", "dit-tiny-75"] {
            let case = Case::new(name);
            let mut options = Options { verify: Some(true), ..Target::OrtCpu.options() };
            options.passes.dense.style = style.or(options.passes.dense.style);
            let chosen = exported(&case, &options);
            let nodes = read(&case.output()).graph.unwrap().node;
            let count = |op: &str| nodes.iter().filter(|node| node.op_type() == op).count();
            assert_eq!(count("Linear") > 0, others, "{name}");
            assert_eq!(chosen.overridden, if others { &[][..] } else { &["--dense-layers"] }, "{name}");
        }
    }
    let case = Case::new("vit-tiny-b");
    exported(&case, &Options { weights: Weights::Link, ..options(Target::OrtCpu) });
    assert!(read(&case.output()).graph.unwrap().node.iter().all(|node| node.op_type() != "Linear"));
}

/// On a GPU, only attention skips heads; experts' matrices stay routed. Every runtime computes what candle does.
#[test]
fn head_layers_are_those_of_the_target() {
    let count = |case: &Case, ops: &[&str]| {
        let nodes = read(&case.output()).graph.unwrap().node;
        nodes.iter().filter(|node| ops.contains(&node.op_type())).count()
    };
    for style in [None, Some(HeadStyle::Routed)] {
        // A ViT's queries are normalised before attention, in its last stage; MoA's heads have matrices of their own.
        for (name, others) in [("llama-moh-tiny", 0), ("dit-tiny-75", 0), ("vit-tiny-b", 1), ("moa-enc-tiny", 4)] {
            let case = Case::new(name);
            let dtype = Some(ElementType::F32);
            let mut options = Options { verify: Some(true), dtype, ..Target::OrtCuda.options() };
            options.passes.heads.style = style.or(options.passes.heads.style);
            let chosen = exported(&case, &options);
            let routed = count(&case, &["RoutedProjection", "RoutedCombine"]);
            let expected = style.is_some() && name != "moa-enc-tiny";
            assert!(routed >= others && (routed > others) == expected, "{name}: {routed}");
            let overridden = if style.is_some() { &["--dtype", "--head-layers"][..] } else { &["--dtype"] };
            assert_eq!(chosen.overridden, overridden, "{name}");
        }
    }
    // They are quantised as other dense layers are.
    let case = Case::new("llama-moh-tiny");
    let quantize = Some(Quantize { form: Form::Nbits, ..Quantize::new(Bits::Int4) });
    exported(&case, &Options { quantize, ..options(Target::OrtCuda) });
    assert_eq!(count(&case, &["RoutedProjectionNBits", "RoutedCombineNBits", "RoutedProjection", "RoutedCombine"]), 0);
    assert!(count(&case, &["MatMulNBits"]) > 0);
}

#[test]
fn an_option_decides_instead() {
    let case = Case::new("llama-moh-tiny");
    let asked = Options { dtype: Some(ElementType::F32), layout: Layout::Flat, opset: 20, ..options(Target::Web) };
    let chosen = exported(&case, &asked);
    assert_eq!((chosen.dtype, chosen.opset, chosen.ir_version), (ElementType::F32, 20, 9));
    assert_eq!(chosen.overridden, ["--dtype", "--opset", "--layout"]);
    assert!(case.output().is_file());
}

/// llama-moh-tiny has 2 layers of 2 KV heads of width 16, and takes 256 tokens.
#[test]
fn memory_is_that_of_the_files_and_the_cache() {
    let case = Case::new("llama-moh-tiny");
    let config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(case.checkpoint().join("config.json")).unwrap()).unwrap();
    let size = |key: &str| config[key].as_u64().unwrap();
    let context = size("max_position_embeddings");
    let head_dim = size("hidden_size") / size("num_attention_heads");
    let token = 2 * size("num_hidden_layers") * size("num_key_value_heads") * head_dim;
    for (target, bytes, copies) in [(Target::OrtCpu, 4, false), (Target::OrtCuda, 2, false), (Target::Web, 2, true)] {
        let case = Case::new("llama-moh-tiny");
        let chosen = exported(&case, &options(target));
        let (memory, file) = (chosen.memory, constants(&model(&case, chosen.layout)));
        assert_eq!(memory.weights, file, "{target}");
        assert_eq!(memory.context as u64, context, "{target}");
        // In a browser, one is read and another written.
        let caches = if target == Target::Web { 2 } else { 1 };
        assert_eq!(memory.cache, caches * token * context * bytes, "{target}");
        // Only some constants, such as the shapes of Reshape, are no floats.
        assert_eq!(memory.copies > file * 9 / 10 && memory.copies <= file, copies, "{target}");
        let logits = context * size("vocab_size") * bytes;
        assert!(memory.activations >= logits, "{target}: {} of {logits}", memory.activations);
        let total = memory.weights + memory.copies + memory.cache + memory.activations;
        assert_eq!(memory.total(), total, "{target}");
    }
}

#[test]
fn models_without_a_cache_need_none() {
    let case = Case::new("vit-tiny-b");
    let memory = exported(&case, &options(Target::Tract)).memory;
    assert_eq!((memory.cache, memory.context, memory.weights), (0, 0, constants(&case.output())));
    assert!(memory.activations > 0);
}

#[test]
fn what_a_target_cannot_run_is_refused() {
    let bf16 = |target: Target| Options { dtype: Some(ElementType::BF16), ..options(target) };
    let narrow = |target: Target| {
        let attention_type = NarrowAttention { attention_type: AttentionType::Bf16 };
        Options { passes: passes::Options { attention_type, ..passes::Options::default() }, ..options(target) }
    };
    let triton = |target: Target| Options { layout: Layout::Triton, ..options(target) };
    let fixed = Options { sizes: Sizes::new([("sequence".to_owned(), 4)]), ..options(Target::Genai) };
    let moh = |target: Target| {
        let quantize = Some(Quantize { form: Form::Moh, ..Quantize::new(Bits::Int4) });
        Options { quantize, ..options(target) }
    };
    let bare = Options { sides: SideOptions { bare: true, ..SideOptions::default() }, ..options(Target::Genai) };
    let cases = [
        ("llama-moh-tiny", bf16(Target::OrtCpu), "the target ort-cpu cannot run a model in bf16: "),
        ("llama-moh-tiny", bf16(Target::Tract), "the target tract cannot run a model in bf16: "),
        ("llama-moh-tiny", bf16(Target::Web), "the target web cannot run a model in bf16: "),
        ("llama-moh-tiny", narrow(Target::Tract), "the target tract cannot run attention in bf16: "),
        ("llama-moh-tiny", narrow(Target::Web), "the target web cannot run attention in bf16: "),
        ("llama-moh-tiny", triton(Target::Tract), "the target tract cannot run a model of a Triton repository: "),
        ("llama-moh-tiny", triton(Target::Genai), "the target genai cannot run a model of a Triton repository: "),
        ("llama-moh-tiny", moh(Target::Web), "the target web cannot run quantised layers of the form moh: "),
        ("llama-moh-tiny", fixed, "the target genai cannot run fixed lengths: "),
        ("llama-moh-tiny", bare, "the target genai cannot run a bare model: "),
        ("vit-tiny-b", options(Target::Genai), "the target genai cannot run a moh-vit: "),
    ];
    for (name, options, message) in cases {
        let case = Case::new(name);
        let error = case.export(&options).unwrap_err();
        assert!(matches!(error, Error::Target { .. }) && error.to_string().starts_with(message), "{error}");
        assert!(case.left().is_empty(), "{message}: {:?}", case.left());
    }
}

/// A GPU runs bfloat16.
#[test]
fn what_a_gpu_runs_is_written() {
    let case = Case::new("llama-moh-tiny");
    let chosen = exported(&case, &Options { dtype: Some(ElementType::BF16), ..options(Target::OrtCuda) });
    assert_eq!((chosen.dtype, chosen.overridden.as_slice()), (ElementType::BF16, ["--dtype"].as_slice()));
}

/// onnxruntime keeps the scales of such products in another order, and as many sums.
#[test]
fn copies_of_quantised_weights() {
    for (target, form, copied) in [
        (Target::OrtCpu, Form::Nbits, true),
        (Target::OrtCpu, Form::Moh, false),
        (Target::Tract, Form::Nbits, false),
        (Target::Genai, Form::Nbits, true),
    ] {
        let quantize = Quantize { form, activations: Activations::Int8, ..Quantize::new(Bits::Int4) };
        let case = Case::new("llama-moh-tiny");
        let chosen = exported(&case, &Options { quantize: Some(quantize), ..options(target) });
        let other = if form == target.form(false) { &[][..] } else { &["--form"] };
        assert_eq!(chosen.overridden, other, "{target}, {form:?}");
        assert_eq!(chosen.memory.weights, constants(&case.output()), "{target}");
        let graph = read(&case.output()).graph.unwrap();
        let products = graph.node.iter().filter(|node| ["MatMulNBits", "LinearNBits"].contains(&node.op_type()));
        let scales: BTreeSet<&str> = products.map(|node| node.input[2].as_str()).collect();
        let numbers = |name: &str| graph.initializer.iter().find(|tensor| tensor.name() == name).unwrap();
        let bytes: i64 = scales.iter().map(|name| 4 * numbers(name).dims.iter().product::<i64>()).sum();
        assert!(bytes > 0);
        assert_eq!(chosen.memory.copies, if copied { 2 * bytes as u64 } else { 0 }, "{target}");
    }
}
