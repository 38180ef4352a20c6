//! Whole models with random weights: with the library and without, against a graph of dense attention, and in tract.

use crate::graphs::{MICROSOFT, MOH, float, int, ints, node, normals};
use crate::machine;
use crate::measure::{Contender, Settings, Table, Times, Way, alternate};
use anyhow::{Context, Result};
use moh_export::proto::{AttributeProto, ModelProto, NodeProto, TensorProto};
use moh_export::{ElementType, Options, export, random};
use moh_models::families::{Port, PortDim};
use moh_models::ops::Type;
use moh_models::presets::Preset;
use moh_models::{Config, Model};
use moh_runtime::{Tensor, Value};
use prost::Message;
use serde_json::{Value as Json, json};
use std::path::{Path, PathBuf};

/// A model and the sizes of its run.
pub(crate) struct Case {
    name: &'static str,
    preset: &'static str,
    /// Keys of the configuration that differ from the preset's.
    changes: &'static [(&'static str, &'static str)],
    pub(crate) sizes: &'static [(&'static str, usize)],
    /// Whether the attention has a dense graph to compare with: where keys are no cache.
    dense: bool,
    /// Whether it takes so long that only one thread, and only the dense graph, are tried.
    long: bool,
}

/// LLaMA 3.2 1B's sizes.
const LLAMA_1B: &[(&str, &str)] = &[
    ("hidden_size", "2048"),
    ("intermediate_size", "8192"),
    ("num_hidden_layers", "16"),
    ("num_attention_heads", "32"),
    ("num_key_value_heads", "8"),
    ("head_dim", "64"),
    ("tie_word_embeddings", "true"),
];

const CASES: &[Case] = &[
    Case {
        name: "moh-dit-s-75, 256 tokens",
        preset: "moh-dit-s-75",
        changes: &[],
        sizes: &[],
        dense: true,
        long: false,
    },
    Case {
        name: "moh-dit-xl-90, 256 tokens",
        preset: "moh-dit-xl-90",
        changes: &[],
        sizes: &[],
        dense: true,
        long: false,
    },
    Case {
        name: "moh-vit-small-75, 224 pixels",
        preset: "moh-vit-small-75",
        changes: &[],
        sizes: &[],
        dense: true,
        long: false,
    },
    Case {
        name: "llama-1b, 512 tokens",
        preset: "moh-llama3-8b",
        changes: LLAMA_1B,
        sizes: &[("sequence", 512), ("past", 0), ("past+sequence", 512)],
        dense: false,
        long: false,
    },
    Case {
        name: "moh-dit-xl-75, 4096 tokens",
        preset: "moh-dit-xl-75",
        changes: &[("input_size", "128")],
        sizes: &[],
        dense: true,
        long: true,
    },
];

const COLUMNS: [&str; 9] = [
    "model",
    "threads",
    "routed GFLOP",
    "library ms",
    "of peak",
    "without library ms",
    "MultiHeadAttention ms",
    "tract ms",
    "library to these",
];

pub(crate) fn run(settings: &Settings, tables: &mut Vec<Json>) -> Result<()> {
    let wanted: Vec<&Case> = CASES.iter().filter(|case| settings.wants(case.name)).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let mut table = Table::new("Whole models, batch 1, f32", &COLUMNS, tables);
    wanted.into_iter().try_for_each(|case| rows(case, settings, &mut table).with_context(|| case.name))
}

fn rows(case: &Case, settings: &Settings, table: &mut Table<'_>) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.onnx");
    let model = write(case, &path)?;
    let gflop = 2.0 * model.macs(case.sizes)?.routed as f64 / 1e9;
    let inputs = inputs(&model, case.sizes)?;
    let dense = case.dense.then(|| with_dense_attention(&path)).transpose()?;
    for &threads in settings.threads.iter().take(if case.long { 1 } else { usize::MAX }) {
        let peak = machine::peak(threads);
        // Two at a time: large models would not fit the memory all at once.
        let beside = |peer: Option<(&Path, Way)>| -> Result<Option<[Times; 2]>> {
            let Some((peer, way)) = peer else { return Ok(None) };
            let mut both = vec![
                Contender::new(&path, Way::Library, threads, inputs.clone())?,
                Contender::new(peer, way, threads, inputs.clone())?,
            ];
            let times = alternate(&mut both, settings.time)?;
            Ok(Some([times[0], times[1]]))
        };
        let alone = beside((!case.long).then_some((path.as_path(), Way::Alone)))?;
        // The routers' operator is the same in both.
        let multi_head = beside(dense.as_deref().map(|path| (path, Way::Library)))?;
        let tract = beside((!case.long).then_some((path.as_path(), Way::Tract)))?;
        let all = [alone, multi_head, tract];
        let ours =
            all.iter().flatten().map(|[ours, _]| *ours).min_by(|a, b| a.min.total_cmp(&b.min)).context("no run")?;
        let cell = |pair: Option<[Times; 2]>| pair.map_or("-".to_owned(), |[_, peer]| peer.cell());
        let ratio = |pair: Option<[Times; 2]>| {
            pair.map_or("-".to_owned(), |[ours, peer]| format!("{:.2}", ours.min / peer.min))
        };
        table.row(&[
            case.name.to_owned(),
            threads.to_string(),
            format!("{gflop:.1}"),
            ours.cell(),
            format!("{:.2}", gflop / ours.min / peak),
            cell(alone),
            cell(multi_head),
            cell(tract),
            all.map(ratio).join(" / "),
        ]);
    }
    Ok(())
}

/// The case of that name.
pub(crate) fn case(name: &str) -> Result<&'static Case> {
    CASES.iter().find(|case| case.name == name).with_context(|| format!("no case is called {name}"))
}

/// Makes up weights, and exports them to `path`.
pub(crate) fn write(case: &Case, path: &Path) -> Result<Model> {
    let mut text: serde_json::Map<String, Json> = serde_json::from_str(Preset::named(case.preset)?.config)?;
    for (key, value) in case.changes {
        text.insert((*key).to_owned(), serde_json::from_str(value)?);
    }
    let config = Config::new("config.json", text.clone());
    let (model, tensors) = Model::plan(&config, None)?;
    let checkpoint = path.with_extension("checkpoint");
    random::write(&checkpoint, &json!(text).to_string(), &tensors, ElementType::F32, 0, false)?;
    export(&checkpoint, path, &Options { verify: Some(false), ..Options::default() })?;
    std::fs::remove_dir_all(checkpoint)?;
    Ok(model)
}

/// Tokens in a row, all attended to; normal numbers for what is no token.
fn inputs(model: &Model, sizes: &[(&str, usize)]) -> Result<Vec<(String, Value)>> {
    let size = |dim: &PortDim| match dim {
        PortDim::Fixed(n) => *n,
        PortDim::Named(name) => sizes.iter().find(|(known, _)| known == name).map_or(1, |(_, n)| *n),
    };
    let input = |port: &Port| {
        let dims: Vec<usize> = port.dims.iter().map(size).collect();
        let count = dims.iter().product();
        let tensor = match (port.ty, port.name.as_str()) {
            (Type::I64, "attention_mask") => Tensor::new(dims, vec![1i64; count])?,
            (Type::I64, _) => Tensor::new(dims, (0..count as i64).collect())?,
            _ => Tensor::new(dims.clone(), normals(&port.name, &dims))?,
        };
        Ok((port.name.clone(), tensor.into()))
    };
    model.inputs().iter().map(input).collect()
}

/// A copy of the model, beside it, in which onnxruntime's own operators compute every head and the gates multiply.
fn with_dense_attention(path: &Path) -> Result<PathBuf> {
    let mut model = ModelProto::decode(std::fs::read(path)?.as_slice())?;
    let graph = model.graph.as_mut().context("no graph")?;
    let mut nodes = Vec::new();
    for routed in std::mem::take(&mut graph.node) {
        match routed.op_type.as_deref() {
            Some("RoutedAttention") if routed.domain.as_deref() == Some(MOH) => attention(&routed, &mut nodes),
            Some("RoutedProjection" | "RoutedCombine") if routed.domain.as_deref() == Some(MOH) => {
                linear(&routed, &mut nodes)
            }
            _ => nodes.push(routed),
        }
    }
    graph.node = nodes;
    for (name, values) in [("bench_all", vec![0i64, 0, -1]), ("bench_last", vec![-1])] {
        graph.initializer.push(shape(name, &values));
    }
    model
        .opset_import
        .push(moh_export::proto::OperatorSetIdProto { domain: Some(MICROSOFT.to_owned()), version: Some(1) });
    let written = path.with_file_name("dense.onnx");
    std::fs::write(&written, model.encode_to_vec())?;
    Ok(written)
}

fn attribute<'n>(node: &'n NodeProto, name: &str) -> Option<&'n AttributeProto> {
    node.attribute.iter().find(|attribute| attribute.name.as_deref() == Some(name))
}

fn shape(name: &str, values: &[i64]) -> TensorProto {
    TensorProto {
        name: Some(name.to_owned()),
        data_type: Some(7),
        dims: vec![values.len() as i64],
        int64_data: values.to_vec(),
        ..TensorProto::default()
    }
}

fn attention(routed: &NodeProto, nodes: &mut Vec<NodeProto>) {
    let heads = attribute(routed, "num_heads").and_then(|a| a.i).unwrap_or(1) as usize;
    let scale = attribute(routed, "scale").and_then(|a| a.f).unwrap_or(1.0);
    let (input, output) = (&routed.input, &routed.output[0]);
    let name = |part: &str| format!("{output}_{part}");
    let (dense, split, spread, product) = (name("dense"), name("split"), name("gates"), name("product"));
    // MultiHeadAttention's inputs: query, key, value, bias, key_padding_mask, attention_bias.
    let mut inputs = vec![input[0].as_str(), &input[1], &input[2]];
    if let Some(bias) = input.get(4) {
        inputs.extend(["", "", bias]);
    }
    nodes.push(node(
        MICROSOFT,
        "MultiHeadAttention",
        &inputs,
        &[&dense],
        vec![int("num_heads", heads), float("scale", scale)],
    ));
    let per_head = name("per_head");
    let mut constant = node("", "Constant", &[], &[&per_head], vec![ints("value_ints", &[0, 0, heads as i64, -1])]);
    constant.name = Some(per_head.clone());
    nodes.push(constant);
    nodes.push(node("", "Reshape", &[&dense, &per_head], &[&split], vec![]));
    nodes.push(node("", "Unsqueeze", &[&input[3], "bench_last"], &[&spread], vec![]));
    nodes.push(node("", "Mul", &[&split, &spread], &[&product], vec![]));
    nodes.push(node("", "Reshape", &[&product, "bench_all"], &[output], vec![]));
}

fn linear(routed: &NodeProto, nodes: &mut Vec<NodeProto>) {
    let (input, output) = (&routed.input, &routed.output[0]);
    let (weight, product) = (format!("{output}_weight"), format!("{output}_product"));
    let result = if input.len() > 3 { &product } else { output };
    nodes.push(node("", "Transpose", &[&input[1]], &[&weight], vec![ints("perm", &[1, 0])]));
    nodes.push(node("", "MatMul", &[&input[0], &weight], &[result], vec![]));
    if let Some(bias) = input.get(3) {
        nodes.push(node("", "Add", &[result, bias], &[output], vec![]));
    }
}
