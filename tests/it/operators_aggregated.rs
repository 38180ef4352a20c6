//! RoutedAggregatedAttention in every runtime against the f64 reference: our kernel, the body that files carry, and the body
//! inlined.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use half::f16;
use moh::{Table, passes, runtimes};
use moh_export::encode::encode;
use moh_export::graph::{Attribute, Dim, Graph, Node, Value};
use moh_export::passes::Gates;
use moh_export::weights::Plan;
use moh_export::{AttentionStyle, ElementType};
use moh_models::sample::Rng;
use moh_operators::{
    Attributes, DOMAIN, DType, Data, Definition, Operator, RoutedAggregatedAttention, Tensor as View,
    Value as AttributeValue, tolerance,
};
use moh_runtime::{Model, Options, Tensor, TensorData};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const OPERATOR: &Operator = RoutedAggregatedAttention::OPERATOR;

/// A call.
#[derive(Debug, Clone, Copy)]
struct Case {
    batch: usize,
    grid: [usize; 2],
    window: usize,
    pooled: usize,
    heads: usize,
    dim: usize,
    half: bool,
}

/// Positions of the inputs that stay float32.
const GATES: usize = 5;
const SCALE: usize = 7;
/// The first input that a model holds as a constant.
const CONSTANTS: usize = 6;

fn cases() -> Vec<Case> {
    let plain = Case { batch: 2, grid: [5, 4], window: 3, pooled: 6, heads: 3, dim: 8, half: false };
    let mut cases = vec![
        plain,
        Case { batch: 1, grid: [1, 1], pooled: 1, heads: 1, ..plain },
        Case { grid: [2, 9], window: 7, ..plain },
        Case { window: 1, pooled: 30, dim: 5, ..plain },
        Case { batch: 1, grid: [14, 14], pooled: 49, heads: 12, dim: 24, ..plain },
    ];
    let halves: Vec<Case> = cases.iter().map(|case| Case { half: true, ..*case }).collect();
    cases.extend(halves);
    cases
}

fn shapes(case: &Case) -> Vec<Vec<usize>> {
    let Case { batch, pooled, heads, dim, .. } = *case;
    let (tokens, cells) = (case.grid[0] * case.grid[1], case.window * case.window);
    let (rows, pooled_rows) = (vec![batch, tokens, heads * dim], vec![batch, pooled, heads * dim]);
    vec![
        rows.clone(),
        rows.clone(),
        rows,
        pooled_rows.clone(),
        pooled_rows,
        vec![batch, tokens, heads],
        vec![heads, dim],
        vec![tokens, heads],
        vec![heads, cells],
        vec![heads, tokens, pooled],
        vec![heads, dim, cells],
        vec![heads, cells],
    ]
}

/// Inputs with gates of which a third is off, whose heads' queries hold NaN; one used query, a key and a pooled key are zero.
fn inputs(case: &Case) -> Vec<Tensor> {
    let rng = &mut Rng::new((case.grid[0] * 31 + case.grid[1]) as u64);
    let shapes = shapes(case);
    let mut data: Vec<Vec<f32>> =
        shapes.iter().map(|shape| (0..shape.iter().product()).map(|_| rng.normal()).collect()).collect();
    for gate in data[GATES].iter_mut().skip(1).filter(|gate| gate.abs() < 0.43) {
        *gate = 0.0;
    }
    for i in 0..data[GATES].len() {
        if data[GATES][i] == 0.0 {
            data[0][i * case.dim..(i + 1) * case.dim].fill(f32::NAN);
        }
    }
    for zero in [0, 1, 3] {
        data[zero][..case.dim].fill(0.0);
    }
    for scale in &mut data[SCALE] {
        *scale = 1.0 + scale.abs();
    }
    // Small, as trained ones are: no sum divides these, and the tolerance is for outputs of magnitude 4.
    for learnable in [10, 11] {
        data[learnable].iter_mut().for_each(|x| *x *= 0.1);
    }
    let half = |i: usize| case.half && i != GATES && i != SCALE;
    let tensor = |(i, (shape, data)): (usize, (&Vec<usize>, Vec<f32>))| match half(i) {
        true => Tensor::new(shape.clone(), data.iter().map(|&v| f16::from_f32(v)).collect()).unwrap(),
        false => Tensor::new(shape.clone(), data).unwrap(),
    };
    shapes.iter().zip(data).enumerate().map(tensor).collect()
}

fn attributes(case: &Case) -> [(&'static str, i64); 4] {
    [
        ("num_heads", case.heads as i64),
        ("height", case.grid[0] as i64),
        ("width", case.grid[1] as i64),
        ("window", case.window as i64),
    ]
}

fn graph(case: &Case, opset: (i64, i64), symbolic: bool) -> Graph {
    let ty = |i: usize| match case.half && i != GATES && i != SCALE {
        true => ElementType::F16,
        false => ElementType::F32,
    };
    let value = |(i, shape): (usize, &Vec<usize>)| {
        let mut dims: Vec<Dim> = shape.iter().map(|&size| Dim::Fixed(size)).collect();
        if symbolic && i < CONSTANTS {
            dims[0] = Dim::Named("batch".to_owned());
        }
        Value { name: OPERATOR.inputs[i].name.to_owned(), ty: ty(i), dims }
    };
    let inputs: Vec<Value> = shapes(case).iter().enumerate().map(value).collect();
    let output = Value { name: "output".to_owned(), ..inputs[0].clone() };
    let node = Node {
        op_type: OPERATOR.name,
        domain: DOMAIN,
        name: "attention".to_owned(),
        inputs: inputs.iter().map(|input| input.name.clone()).collect(),
        outputs: vec!["output".to_owned()],
        attributes: attributes(case).map(|(name, value)| (name, Attribute::Int(value))).into(),
    };
    Graph {
        name: "operator".to_owned(),
        opset: opset.0,
        ir_version: opset.1,
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
    let path = folder.join("model.onnx");
    std::fs::write(&path, encode(&graph, &Plan::new(&graph), "none").unwrap()).unwrap();
    path
}

fn reference(case: &Case, inputs: &[Tensor]) -> Vec<f64> {
    let value =
        |name: &str| attributes(case).into_iter().find(|(n, _)| *n == name).map(|(_, v)| AttributeValue::Int(v));
    let attributes = Attributes::read(OPERATOR, |def| value(def.name)).unwrap();
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
    OPERATOR.reference(&attributes, &views).unwrap()
}

fn run(path: &Path, options: &Options, inputs: &[Tensor]) -> Result<Vec<f32>, moh_runtime::Error> {
    let mut model = Model::load(path, options)?;
    let names = OPERATOR.inputs.iter().map(|input| input.name);
    let given = names.zip(inputs.iter().map(|tensor| tensor.clone().into()));
    Ok(model.run(given)?[0].to_tensor()?.data().to_f32().unwrap())
}

#[test]
fn every_runtime_follows_the_reference() {
    let folder = tempfile::tempdir().unwrap();
    let mut table = Table::new("RoutedAggregatedAttention against the f64 reference");
    for case in cases() {
        let inputs = inputs(&case);
        let expected = reference(&case, &inputs);
        assert!(expected.iter().all(|v| v.is_finite()) && expected.iter().any(|v| *v != 0.0));
        let styles = [AttentionStyle::Routed, AttentionStyle::Portable];
        for (symbolic, style, opset) in [true, false]
            .into_iter()
            .flat_map(|symbolic| styles.map(|style| (symbolic, style)))
            .flat_map(|(symbolic, style)| [(20, 9), (21, 10)].map(|opset| (symbolic, style, opset)))
        {
            let path = write(folder.path(), graph(&case, opset, symbolic), style);
            for (way, options) in runtimes() {
                let what = format!("{way} {style:?} opset {} symbolic {symbolic} {case:?}", opset.0);
                let found = run(&path, &options, &inputs).unwrap_or_else(|e| panic!("{what}: {e}"));
                assert_eq!(found.len(), expected.len(), "{what}");
                let errors = found.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).abs());
                let error = errors.fold(0.0, |max, e| if e.is_nan() { f64::INFINITY } else { f64::max(max, e) });
                // Exactly zero where the reference is.
                let lost = found.iter().zip(&expected).filter(|(a, b)| (**b == 0.0) && (**a != 0.0)).count();
                assert_eq!(lost, 0, "{what}");
                let dtype = if case.half { DType::F16 } else { DType::F32 };
                let what = format!("{style:?} {:?} w{} {dtype}", case.grid, case.window);
                table.add(way, &what, error, tolerance::operator_output(dtype));
            }
        }
    }
    table.finish();
}
