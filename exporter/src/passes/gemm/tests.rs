#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;
use crate::encode::encode;
use crate::staging::write_file;
use crate::weights::Plan;
use moh_models::Weight;
use moh_models::sample::Rng;
use moh_runtime::{Model, Tensor};

fn strings(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

fn initializer(name: &str, ty: ElementType, dims: &[usize], weight: &Weight, transposed: bool) -> Initializer {
    let source = Source::Weight { weight: weight.clone(), transposed };
    Initializer { name: name.to_owned(), ty, dims: dims.to_vec(), source }
}

/// The matrix (out, in) of the layer, as the checkpoint stores it.
fn matrix(inputs: usize, outputs: usize) -> Weight {
    let values = (0..inputs * outputs).map(|i| (1.0 + 0.7 * i as f32).sin()).collect();
    Weight::from_f32("fc.weight", [outputs, inputs], values)
}

fn bias(outputs: usize) -> Weight {
    Weight::from_f32("fc.bias", [outputs], (0..outputs).map(|i| 0.25 * i as f32 - 0.5).collect())
}

/// A linear layer with a bias on x (batch, tokens, inputs), as it is recorded.
fn graph(tokens: Dim, inputs: usize, outputs: usize) -> Graph {
    let batch = || Dim::Named("batch".to_owned());
    let value = |name: &str, last: usize| Value {
        name: name.to_owned(),
        ty: ElementType::F32,
        dims: vec![batch(), tokens.clone(), Dim::Fixed(last)],
    };
    let y = |name: &str| value(name, outputs);
    Graph {
        name: "linear".to_owned(),
        opset: 21,
        ir_version: 10,
        inputs: vec![value("x", inputs)],
        outputs: vec![y("fc/Add")],
        initializers: vec![
            initializer("fc.weight.T", ElementType::F32, &[inputs, outputs], &matrix(inputs, outputs), true),
            initializer("fc.bias", ElementType::F32, &[outputs], &bias(outputs), false),
        ],
        nodes: vec![
            node("MatMul", "fc/MatMul", strings(&["x", "fc.weight.T"]), vec![]),
            node("Add", "fc/Add", strings(&["fc/MatMul", "fc.bias"]), vec![]),
        ],
        values: ["fc/MatMul", "fc/Add"].map(|name| (name.to_owned(), y(name))).into(),
        functions: vec![],
        metadata: BTreeMap::new(),
    }
}

/// Tokens with which a layer of `outputs` is wide.
fn wide(outputs: usize) -> usize {
    WIDE.div_ceil(outputs)
}

/// The graph's first output for x, in the runtime that verifies exports.
fn compute(graph: &Graph, x: &Tensor) -> Vec<f32> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    let plan = Plan::new(graph);
    assert_eq!(plan.iter().count(), 0, "every constant is in the model file");
    write_file(&path, &encode(graph, &plan, "model.onnx_data").unwrap()).unwrap();
    let mut model = Model::load(&path, &moh_runtime::Options::default()).unwrap();
    let outputs = model.run([("x", x.clone().into())]).unwrap();
    outputs[0].as_slice::<f32>().unwrap().to_vec()
}

#[test]
fn wide_products_are_flattened() {
    let mut graph = graph(Dim::Fixed(1 << 17), 3, 5);
    run(&mut graph, false);
    let found: Vec<(&str, Vec<&str>)> =
        graph.nodes.iter().map(|n| (n.op_type, n.inputs.iter().map(String::as_str).collect())).collect();
    let expected = [
        ("Reshape", vec!["x", "ints[-1,3]"]),
        ("Gemm", vec!["fc/MatMul/rows", "fc.weight", "fc.bias"]),
        ("Reshape", vec!["fc/Gemm", "ints[-1,131072,5]"]),
    ];
    assert_eq!(found, expected);
    assert_eq!(graph.nodes[1].attributes, [("transB", Attribute::Int(1))]);
    assert_eq!(graph.nodes[2].outputs, ["fc/Add"]);
}

#[test]
fn narrow_and_symbolic_products_stay() {
    for tokens in [Dim::Fixed(7), Dim::Fixed(wide(5) - 1), Dim::Named("sequence".to_owned())] {
        let mut graph = graph(tokens, 3, 5);
        run(&mut graph, false);
        assert_eq!(graph.nodes.len(), 2);
    }
}

/// A square matrix too: there no shape tells it from its transposition.
#[test]
fn a_flattened_layer_computes_the_same() {
    for (inputs, outputs) in [(3, 5), (4, 4)] {
        let (batch, tokens) = (2, wide(outputs));
        let recorded = graph(Dim::Fixed(tokens), inputs, outputs);
        let mut flattened = recorded.clone();
        run(&mut flattened, false);
        assert!(flattened.nodes.iter().any(|node| node.op_type == "Gemm"));

        let rng = &mut Rng::new(7);
        let x: Vec<f32> = (0..batch * tokens * inputs).map(|_| rng.normal()).collect();
        let (matrix, bias) = (matrix(inputs, outputs).to_f32().unwrap(), bias(outputs).to_f32().unwrap());
        let layer = |row: &[f32], i: usize| {
            let products = row.iter().zip(&matrix[i * inputs..]).map(|(a, b)| f64::from(*a) * f64::from(*b));
            products.sum::<f64>() + f64::from(bias[i])
        };
        let rows = x.chunks(inputs);
        let expected: Vec<f64> =
            rows.flat_map(|row| (0..outputs).map(move |i| (row, i))).map(|(row, i)| layer(row, i)).collect();
        let x = Tensor::new([batch, tokens, inputs], x.clone()).unwrap();
        for (name, graph) in [("recorded", &recorded), ("flattened", &flattened)] {
            let found = compute(graph, &x);
            assert_eq!(found.len(), expected.len(), "{name}");
            let error = found.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
            assert!(error < 1e-5, "{name}, {inputs} to {outputs}: {error}");
        }
    }
}

/// Two symbolic dimensions, a bias or none, and rows of which there is no more than one axis.
#[test]
fn weights_as_they_are_stored() {
    let named = |name: &str| Dim::Named(name.to_owned());
    let rng = &mut Rng::new(8);
    let (batch, tokens, inputs, outputs) = (2, 3, 4, 5);
    let x: Vec<f32> = (0..batch * tokens * inputs).map(|_| rng.normal()).collect();
    let x = Tensor::new([batch, tokens, inputs], x).unwrap();
    for (length, nodes) in [(named("sequence"), 5), (Dim::Unknown, 5), (Dim::Fixed(tokens), 3)] {
        for biased in [true, false] {
            let mut recorded = graph(length.clone(), inputs, outputs);
            if !biased {
                recorded.nodes.pop();
                recorded.outputs[0].name = "fc/MatMul".to_owned();
            }
            let mut stored = recorded.clone();
            run(&mut stored, true);
            assert_eq!(stored.nodes.len(), nodes, "{length} {biased}");
            assert!(stored.nodes.iter().all(|node| node.op_type != "MatMul" && node.op_type != "Add"));
            let (expected, found) = (compute(&recorded, &x), compute(&stored, &x));
            let error = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(found.len() == expected.len() && error < 1e-5, "{length} {biased}: {error}");
        }
    }
}

/// What gives a second layer its dimensions is there already.
#[test]
fn dimensions_are_computed_once() {
    let mut graph = graph(Dim::Named("sequence".to_owned()), 4, 4);
    for (product, add, x) in [("fc/MatMul_1", "fc/Add_1", "fc/Add"), ("fc/MatMul_2", "fc/Add_2", "fc/Add_1")] {
        for name in [product, add] {
            let value = Value { name: name.to_owned(), ..graph.values["fc/Add"].clone() };
            graph.values.insert(name.to_owned(), value);
        }
        graph.nodes.push(node("MatMul", product, strings(&[x, "fc.weight.T"]), vec![]));
        graph.nodes.push(node("Add", add, strings(&[product, "fc.bias"]), vec![]));
    }
    run(&mut graph, true);
    let count = |op_type| graph.nodes.iter().filter(|node| node.op_type == op_type).count();
    assert_eq!((count("Shape"), count("Concat"), count("Gemm"), count("Reshape")), (1, 1, 3, 6));
    let mut names: Vec<&str> = graph.nodes.iter().map(|node| node.name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), graph.nodes.len(), "a name occurs twice");
}

/// The sum alone would be left of it.
#[test]
fn a_product_that_others_read_stays() {
    let tokens = Dim::Fixed(wide(5));
    let mut read_by_a_node = graph(tokens.clone(), 3, 5);
    read_by_a_node.nodes.push(node("Relu", "fc/Relu", strings(&["fc/MatMul"]), vec![]));
    let mut read_by_the_caller = graph(tokens, 3, 5);
    read_by_the_caller.outputs.push(read_by_the_caller.values["fc/MatMul"].clone());
    for mut graph in [read_by_a_node, read_by_the_caller] {
        let before = graph.nodes.clone();
        run(&mut graph, false);
        assert_eq!(graph.nodes, before);
    }
}

/// The matrix that the flattened layer reads, where the graph holds the stored tensor already.
fn matrix_beside(there: ElementType) -> (Graph, String) {
    let mut graph = graph(Dim::Fixed(wide(5)), 3, 5);
    graph.initializers.push(initializer("fc.weight", there, &[5, 3], &matrix(3, 5), false));
    run(&mut graph, false);
    let gemm = graph.nodes.iter().find(|node| node.op_type == "Gemm").unwrap();
    let read = gemm.inputs[1].clone();
    (graph, read)
}

#[test]
fn a_constant_of_the_same_type_is_shared() {
    let (graph, read) = matrix_beside(ElementType::F32);
    assert_eq!(read, "fc.weight");
    assert_eq!(
        graph.initializers.iter().filter(|init| init.name.starts_with("fc.weight") && init.dims == [5, 3]).count(),
        1
    );
}

#[test]
fn a_constant_of_another_type_is_not_shared() {
    for there in [ElementType::BF16, ElementType::F16] {
        let (graph, read) = matrix_beside(there);
        let of = |name: &str| graph.initializers.iter().find(|init| init.name == name).unwrap();
        assert_eq!((of(&read).ty, &of(&read).dims[..]), (ElementType::F32, &[5, 3][..]), "beside {there}");
        assert_eq!(of("fc.weight").ty, there);
        assert_ne!(read, "fc.weight");
        let source = &of(&read).source;
        assert!(matches!(source, Source::Weight { weight, transposed: false } if weight.name() == "fc.weight"));
    }
}
