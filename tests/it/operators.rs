//! Single operators in every runtime against the f64 reference: our kernels, the bodies that files carry, and bodies inlined.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use half::f16;
use moh::{Table, have_onnxruntime, ops_library, passes, runtimes};
use moh_export::encode::encode;
use moh_export::graph::{Attribute, Dim, Graph, Node, Value};
use moh_export::passes::Gates;
use moh_export::weights::Plan;
use moh_export::{AttentionStyle, ElementType};
use moh_models::sample::Rng;
use moh_operators::{
    Attributes, DOMAIN, DType, Data, Definition, Operator, RoutedAttention, Tensor as View, Value as AttributeValue,
    tolerance,
};
use moh_runtime::{Model, Options, RuntimeChoice, Tensor, TensorData};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const OPERATOR: &Operator = RoutedAttention::OPERATOR;

/// A call of RoutedAttention.
#[derive(Debug, Clone, Copy)]
struct Case {
    batch: usize,
    q_len: usize,
    kv_len: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    value_dim: usize,
    cache_layout: bool,
    bias: Option<[usize; 4]>,
    causal: bool,
    half: bool,
}

const PLAIN: Case = Case {
    batch: 2,
    q_len: 5,
    kv_len: 5,
    heads: 4,
    kv_heads: 4,
    dim: 8,
    value_dim: 8,
    cache_layout: false,
    bias: None,
    causal: false,
    half: false,
};

fn cases() -> Vec<Case> {
    let mut cases = vec![
        PLAIN,
        Case { causal: true, ..PLAIN },
        Case { kv_heads: 2, q_len: 3, kv_len: 9, causal: true, cache_layout: true, bias: Some([2, 1, 1, 9]), ..PLAIN },
        Case { kv_heads: 1, q_len: 1, kv_len: 33, cache_layout: true, value_dim: 4, ..PLAIN },
        Case { q_len: 7, kv_len: 3, causal: true, bias: Some([1, 4, 7, 3]), ..PLAIN },
        Case {
            q_len: 70,
            kv_len: 130,
            heads: 6,
            kv_heads: 3,
            dim: 24,
            value_dim: 40,
            bias: Some([1, 1, 70, 130]),
            ..PLAIN
        },
    ];
    let halves: Vec<Case> = cases.iter().map(|case| Case { half: true, ..*case }).collect();
    cases.extend(halves);
    cases
}

/// Attribute values of a case; `None` leaves one out.
type Values = [(&'static str, Option<Attribute>); 4];

fn values(case: &Case) -> Values {
    [
        ("num_heads", Some(Attribute::Int(case.heads as i64))),
        ("kv_num_heads", Some(Attribute::Int(case.kv_heads as i64))),
        ("scale", Some(Attribute::Float((case.dim as f32).powf(-0.5)))),
        ("is_causal", Some(Attribute::Int(i64::from(case.causal)))),
    ]
}

fn shapes(case: &Case) -> Vec<Vec<usize>> {
    let Case { batch, q_len, kv_len, heads, kv_heads, dim, value_dim, cache_layout, bias, .. } = *case;
    let kv = |dim: usize| match cache_layout {
        true => vec![batch, kv_heads, kv_len, dim],
        false => vec![batch, kv_len, kv_heads * dim],
    };
    let mut shapes = vec![vec![batch, q_len, heads * dim], kv(dim), kv(value_dim), vec![batch, q_len, heads]];
    shapes.extend(bias.map(|bias| bias.to_vec()));
    shapes
}

/// Inputs with gates of which a third is off, whose heads' queries hold NaN, and a fully masked row where there is a bias.
fn inputs(case: &Case) -> Vec<Tensor> {
    let rng = &mut Rng::new(case.q_len as u64 * 31 + case.kv_len as u64);
    let shapes = shapes(case);
    let numbers =
        |rng: &mut Rng, shape: &[usize]| -> Vec<f32> { (0..shape.iter().product()).map(|_| rng.normal()).collect() };
    let gates: Vec<f32> = numbers(rng, &shapes[3]).iter().map(|g| if g.abs() < 0.43 { 0.0 } else { *g }).collect();
    let mut query = numbers(rng, &shapes[0]);
    for (i, block) in query.chunks_mut(case.dim).enumerate() {
        if gates[i] == 0.0 {
            block.fill(f32::NAN);
        }
    }
    let mut data = vec![query, numbers(rng, &shapes[1]), numbers(rng, &shapes[2]), gates];
    if let Some(shape) = shapes.get(4) {
        let mut bias = numbers(rng, shape);
        for value in &mut bias {
            if *value < -1.0 {
                *value = f32::NEG_INFINITY;
            }
        }
        bias[..case.kv_len].fill(f32::NEG_INFINITY);
        data.push(bias);
    }
    let half = |i: usize| case.half && i != 3;
    let tensor = |(i, (shape, data)): (usize, (&Vec<usize>, Vec<f32>))| match half(i) {
        true => Tensor::new(shape.clone(), data.iter().map(|&v| f16::from_f32(v)).collect()).unwrap(),
        false => Tensor::new(shape.clone(), data).unwrap(),
    };
    shapes.iter().zip(data).enumerate().map(tensor).collect()
}

fn graph(case: &Case, values: &Values, symbolic: bool) -> Graph {
    let ty = |i: usize| if case.half && i != 3 { ElementType::F16 } else { ElementType::F32 };
    let names = ["query", "key", "value", "head_gates", "attn_bias"];
    let lengths: [&[&str]; 5] = [
        &["batch", "q_len"],
        if case.cache_layout { &["batch", "", "kv_len"] } else { &["batch", "kv_len"] },
        if case.cache_layout { &["batch", "", "kv_len"] } else { &["batch", "kv_len"] },
        &["batch", "q_len"],
        &["batch", "", "q_len", "kv_len"],
    ];
    let value = |(i, shape): (usize, &Vec<usize>)| {
        let dim = |(axis, &size): (usize, &usize)| match lengths[i].get(axis) {
            Some(name) if symbolic && size != 1 && !name.is_empty() => Dim::Named((*name).to_owned()),
            _ => Dim::Fixed(size),
        };
        Value { name: names[i].to_owned(), ty: ty(i), dims: shape.iter().enumerate().map(dim).collect() }
    };
    let inputs: Vec<Value> = shapes(case).iter().enumerate().map(value).collect();
    let width = Dim::Fixed(case.heads * case.value_dim);
    let output = Value {
        name: "output".to_owned(),
        ty: ty(0),
        dims: vec![inputs[0].dims[0].clone(), inputs[0].dims[1].clone(), width],
    };
    let node = Node {
        op_type: OPERATOR.name,
        domain: DOMAIN,
        name: "attention".to_owned(),
        inputs: inputs.iter().map(|input| input.name.clone()).collect(),
        outputs: vec!["output".to_owned()],
        attributes: values.iter().filter_map(|(name, value)| value.clone().map(|value| (*name, value))).collect(),
    };
    Graph {
        name: "operator".to_owned(),
        opset: 21,
        ir_version: 10,
        inputs,
        outputs: vec![output],
        initializers: vec![],
        nodes: vec![node],
        values: BTreeMap::new(),
        functions: vec![],
        metadata: BTreeMap::new(),
    }
}

fn write(folder: &Path, mut graph: Graph, style: AttentionStyle) -> PathBuf {
    moh_export::passes::run(&mut graph, &passes(style, Gates::Hidden)).unwrap();
    save(&folder.join(format!("{style:?}.onnx")), &graph)
}

fn save(path: &Path, graph: &Graph) -> PathBuf {
    std::fs::write(path, encode(graph, &Plan::new(graph), "none").unwrap()).unwrap();
    path.to_owned()
}

fn reference(case: &Case, inputs: &[Tensor]) -> Vec<f64> {
    let value = |value: &Attribute| match value {
        Attribute::Int(v) => AttributeValue::Int(*v),
        Attribute::Float(v) => AttributeValue::Float(*v),
        other => panic!("{other:?}"),
    };
    let attributes = Attributes::read(OPERATOR, |def| {
        values(case).iter().find(|(name, _)| *name == def.name).and_then(|(_, v)| v.as_ref().map(value))
    });
    let parts: Vec<(Vec<usize>, TensorData)> = inputs.iter().map(|tensor| tensor.clone().into_parts()).collect();
    let views: Vec<Option<View<'_>>> = parts
        .iter()
        .map(|(shape, data)| {
            let data = match data {
                TensorData::F32(data) => Data::F32(data),
                TensorData::F16(data) => Data::F16(data),
                other => panic!("{other:?}"),
            };
            Some(View { shape, data })
        })
        .collect();
    OPERATOR.reference(&attributes.unwrap(), &views).unwrap()
}

fn run(path: &Path, options: &Options, inputs: &[Tensor]) -> Result<Vec<f32>, moh_runtime::Error> {
    let names = ["query", "key", "value", "head_gates", "attn_bias"];
    let mut model = Model::load(path, options)?;
    let given = names.into_iter().zip(inputs.iter().map(|tensor| tensor.clone().into()));
    Ok(model.run(given)?[0].to_tensor()?.data().to_f32().unwrap())
}

#[test]
fn every_runtime_follows_the_reference() {
    let folder = tempfile::tempdir().unwrap();
    let mut table = Table::new("RoutedAttention against the f64 reference");
    for case in cases() {
        let inputs = inputs(&case);
        let expected = reference(&case, &inputs);
        assert!(expected.iter().all(|v| v.is_finite()) && expected.iter().any(|v| *v != 0.0));
        for symbolic in [false, true] {
            for style in [AttentionStyle::Routed, AttentionStyle::Portable] {
                let path = write(folder.path(), graph(&case, &values(&case), symbolic), style);
                for (way, options) in runtimes() {
                    let found =
                        run(&path, &options, &inputs).unwrap_or_else(|e| panic!("{way} {style:?} {case:?}: {e}"));
                    assert_eq!(found.len(), expected.len());
                    let errors = found.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).abs());
                    let error = errors.fold(0.0, |max, e| if e.is_nan() { f64::INFINITY } else { f64::max(max, e) });
                    // Exactly zero where the reference is.
                    let lost = found.iter().zip(&expected).filter(|(a, b)| (**b == 0.0) && (**a != 0.0)).count();
                    assert_eq!(lost, 0, "{way} {style:?} {case:?}");
                    let what = format!(
                        "{style:?} q{} kv{} {}",
                        case.q_len,
                        case.kv_len,
                        if case.half { "f16" } else { "f32" }
                    );
                    let dtype = if case.half { DType::F16 } else { DType::F32 };
                    table.add(way, &what, error, tolerance::operator_output(dtype));
                }
            }
        }
    }
    table.finish();
}

fn ort(profile: Option<PathBuf>, without_custom_ops: bool) -> Options {
    let ops_library = (!without_custom_ops).then(ops_library);
    Options { runtime: RuntimeChoice::Ort, ops_library, without_custom_ops, profile, ..Options::default() }
}

#[test]
fn the_profile_names_our_kernel() {
    if !have_onnxruntime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), graph(&PLAIN, &values(&PLAIN), true), AttentionStyle::Routed);
    let inputs = inputs(&PLAIN);
    for (without, expected) in [(false, true), (true, false)] {
        let mut model = Model::load(&path, &ort(Some(folder.path().join("profile")), without)).unwrap();
        let names = ["query", "key", "value", "head_gates"];
        model.run(names.into_iter().zip(inputs.iter().map(|tensor| tensor.clone().into()))).unwrap();
        let text = std::fs::read_to_string(model.end_profiling().unwrap()).unwrap();
        let events: serde_json::Value = serde_json::from_str(&text).unwrap();
        let ran = |op: &str| {
            events.as_array().unwrap().iter().any(|event| {
                event["args"]["op_name"] == op
                    && event["name"].as_str().is_some_and(|name| name.ends_with("_kernel_time"))
            })
        };
        assert_eq!(ran("RoutedAttention"), expected);
        assert_eq!(ran("Softmax"), !expected);
    }
}

#[test]
fn what_the_library_refuses() {
    if !have_onnxruntime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let refused = |case: &Case, values: &Values, inputs: &[Tensor], symbolic: bool, parts: &[&str]| {
        // The passes would refuse such attributes.
        let mut written = graph(case, &self::values(case), symbolic);
        moh_export::passes::run(&mut written, &passes(AttentionStyle::Routed, Gates::Hidden)).unwrap();
        written.nodes[0].attributes = graph(case, values, symbolic).nodes.remove(0).attributes;
        let path = save(&folder.path().join("refused.onnx"), &written);
        let message = run(&path, &ort(None, false), inputs).unwrap_err().to_string();
        for part in parts {
            assert!(message.contains(part), "{part:?} is not in: {message}");
        }
    };
    let good = inputs(&PLAIN);
    let with = |i: usize, value: Option<Attribute>| {
        let mut values = values(&PLAIN);
        values[i].1 = value;
        values
    };
    for (i, value, parts) in [
        (0, None, ["RoutedAttention", "num_heads"]),
        (1, Some(Attribute::Int(3)), ["kv_num_heads", "divisor of num_heads = 4"]),
        (0, Some(Attribute::Int(-1)), ["num_heads", "-1"]),
        (0, Some(Attribute::Int(i64::MAX)), ["num_heads", "9223372036854775807"]),
        (2, Some(Attribute::Float(f32::NAN)), ["scale", "finite"]),
        (2, Some(Attribute::Int(1)), ["RoutedAttention", "scale"]),
        (3, Some(Attribute::Int(2)), ["is_causal", "0 or 1"]),
    ] {
        refused(&PLAIN, &with(i, value), &good, true, &parts);
    }
    // Shapes that only show at run time.
    let longer = Case { kv_len: 6, ..PLAIN };
    let mut mixed = good.clone();
    mixed[2] = inputs(&longer)[2].clone();
    let path = write(folder.path(), unchecked_lengths(graph(&PLAIN, &values(&PLAIN), true)), AttentionStyle::Routed);
    let message = run(&path, &ort(None, false), &mixed).unwrap_err().to_string();
    assert!(message.contains("value") && message.contains("kv_len = 5") && message.contains("6"), "{message}");
}

/// Names every symbolic dimension differently, so that nobody but the operator compares them.
fn unchecked_lengths(mut graph: Graph) -> Graph {
    for (i, input) in graph.inputs.iter_mut().enumerate() {
        for (axis, dim) in input.dims.iter_mut().enumerate() {
            if let Dim::Named(name) = dim {
                *name = format!("{name}_{i}_{axis}");
            }
        }
    }
    graph.outputs[0].dims =
        graph.inputs[0].dims[..2].iter().cloned().chain([graph.outputs[0].dims[2].clone()]).collect();
    graph
}
