#![allow(clippy::unwrap_used)]

use super::*;
use crate::graph::{Initializer, Value};
use crate::passes::{AttentionStyle, Options, WriteBodies};
use moh_models::Weight;

fn node(op_type: &'static str, inputs: &[&str], output: &str) -> Node {
    let inputs = inputs.iter().map(|&name| name.to_owned()).collect();
    Node { op_type, domain: "", name: output.to_owned(), inputs, outputs: vec![output.to_owned()], attributes: vec![] }
}

/// Two products with the same matrix, one of which has a bias, and is an output as well where `shown`.
fn graph(ty: ElementType, shown: bool) -> Graph {
    let value = |name: &str, last| Value {
        name: name.to_owned(),
        ty,
        dims: vec![Dim::Named("batch".to_owned()), Dim::Fixed(5), Dim::Fixed(last)],
    };
    let initializer = |name: &str, dims: &[usize], transposed| {
        let mut stored = dims.to_vec();
        stored.reverse();
        let weight = Weight::from_f32(name, stored, vec![0.5; dims.iter().product()]);
        Initializer { name: name.to_owned(), ty, dims: dims.to_vec(), source: Source::Weight { weight, transposed } }
    };
    let outputs = ["sum", "plain"].into_iter().chain(shown.then_some("product"));
    Graph {
        name: "dense".to_owned(),
        opset: 21,
        ir_version: 10,
        inputs: vec![value("x", 2)],
        outputs: outputs.map(|name| value(name, NARROW)).collect(),
        initializers: vec![initializer("weight", &[2, NARROW], true), initializer("bias", &[NARROW], false)],
        nodes: vec![
            node("MatMul", &["x", "weight"], "product"),
            node("Add", &["product", "bias"], "sum"),
            node("MatMul", &["x", "weight"], "plain"),
        ],
        values: ["product", "sum", "plain"].map(|name| (name.to_owned(), value(name, NARROW))).into(),
        functions: vec![],
        metadata: BTreeMap::new(),
    }
}

fn written(mut graph: Graph, pass: DenseLayers) -> Vec<(String, Vec<String>, Vec<String>)> {
    pass.run(&mut graph).unwrap();
    let text = |node: Node| (format!("{}:{}", node.domain, node.op_type), node.inputs, node.outputs);
    graph.nodes.into_iter().map(text).collect()
}

fn strings(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

#[test]
fn a_product_and_its_bias_are_one_node() {
    let plain = layer("ai.moh:Linear", &["x", "weight"], "plain");
    let sum = layer("ai.moh:Linear", &["x", "weight", "bias"], "sum");
    assert_eq!(written(graph(ElementType::F32, false), MOH), [sum, plain.clone()]);
    // What others read stays.
    let product = layer("ai.moh:Linear", &["x", "weight"], "product");
    let add = layer(":Add", &["product", "bias"], "sum");
    assert_eq!(written(graph(ElementType::F32, true), MOH), [product, add, plain]);
}

/// The first product and its bias, and these nodes after it, which make (batch, 5, columns) each, the last one the output. Inputs
/// `residual` (batch, 5, columns), `gate` (batch, 1, columns) and `other` (1, 5, columns).
fn followed(nodes: Vec<Node>) -> Graph {
    let mut graph = graph(ElementType::F32, false);
    let value = |name: &str, rows: [Dim; 2]| Value {
        name: name.to_owned(),
        ty: ElementType::F32,
        dims: [&rows[..], &[Dim::Fixed(NARROW)]].concat(),
    };
    let batch = || Dim::Named("batch".to_owned());
    graph.nodes.truncate(2);
    for node in &nodes {
        let name = &node.outputs[0];
        graph.values.insert(name.clone(), value(name, [batch(), Dim::Fixed(5)]));
    }
    let operands = [("residual", [batch(), Dim::Fixed(5)]), ("gate", [batch(), Dim::Fixed(1)])];
    graph.inputs.extend(operands.map(|(name, rows)| value(name, rows)));
    graph.inputs.push(value("other", [Dim::Fixed(1), Dim::Fixed(5)]));
    graph.outputs = nodes.last().map(|node| value(&node.outputs[0], [batch(), Dim::Fixed(5)])).into_iter().collect();
    graph.nodes.extend(nodes);
    graph
}

const MOH: DenseLayers = DenseLayers { style: Some(DenseStyle::Moh), standard: false };

fn layer(op: &str, inputs: &[&str], output: &str) -> (String, Vec<String>, Vec<String>) {
    (op.to_owned(), strings(inputs), strings(&[output]))
}

#[test]
fn gates_and_residuals_are_part_of_the_layer() {
    let gated = node("Mul", &["gate", "sum"], "gated");
    let sum = node("Add", &["residual", "gated"], "y");
    let found = written(followed(vec![gated.clone(), sum]), MOH);
    assert_eq!(found, [layer("ai.moh:Linear", &["x", "weight", "bias", "gate", "residual"], "y")]);
    assert_eq!(
        written(followed(vec![gated.clone()]), MOH),
        [layer("ai.moh:Linear", &["x", "weight", "bias", "gate"], "gated")]
    );
    // A number stands in for what is not there.
    let mut graph = followed(vec![node("Add", &["sum", "residual"], "y")]);
    MOH.run(&mut graph).unwrap();
    assert_eq!(graph.nodes[0].inputs, ["x", "weight", "bias", "ai.moh/all1[1].f32", "residual"]);
    let one = graph.initializers.iter().find(|init| init.name == "ai.moh/all1[1].f32").unwrap();
    assert!(matches!(&one.source, Source::Bytes(bytes) if *bytes == 1f32.to_le_bytes()));
    assert!(!graph.values.contains_key("sum") && graph.values.contains_key("y"));
    // No rows of the output: not (batch, 5, columns), nor a row for each of the first dimensions.
    for op in ["Mul", "Add"] {
        let found = written(followed(vec![node(op, &["sum", "other"], "y")]), MOH);
        assert_eq!(found[1], (format!(":{op}"), strings(&["sum", "other"]), strings(&["y"])));
    }
    let found = written(followed(vec![node("Add", &["sum", "gate"], "y")]), MOH);
    assert_eq!(found.len(), 2, "a residual has the output's shape");
    // Its own square.
    assert_eq!(written(followed(vec![node("Mul", &["sum", "sum"], "y")]), MOH).len(), 2);
}

#[test]
fn activations_are_part_of_the_layer() {
    let inputs = ["x", "weight", "bias"];
    for (op, activation) in [("Gelu", Activation::Gelu), ("Relu", Activation::Relu)] {
        let mut graph = followed(vec![node(op, &["sum"], "y")]);
        MOH.run(&mut graph).unwrap();
        assert_eq!(graph.nodes[0].attributes, [("activation", Attribute::Int(activation as i64))]);
        let wanted = layer("ai.moh:LinearActivation", &inputs, "y");
        assert_eq!(written(followed(vec![node(op, &["sum"], "y")]), MOH), [wanted]);
    }
    let tanh = Node { attributes: vec![("approximate", Attribute::String("tanh"))], ..node("Gelu", &["sum"], "y") };
    let mut graph = followed(vec![tanh]);
    MOH.run(&mut graph).unwrap();
    assert_eq!(graph.nodes[0].attributes, [("activation", Attribute::Int(Activation::GeluTanh as i64))]);
    let sigmoid = node("Sigmoid", &["sum"], "sigmoid");
    let silu = vec![sigmoid.clone(), node("Mul", &["sum", "sigmoid"], "y")];
    assert_eq!(written(followed(silu), MOH), [layer("ai.moh:LinearActivation", &inputs, "y")]);
    // Not the sigmoid of the layer's output times something else.
    let other = vec![sigmoid, node("Mul", &["residual", "sigmoid"], "y")];
    assert_eq!(written(followed(other), MOH).len(), 3);
}

#[test]
fn portable_models_and_linked_weights_keep_onnx_layers() {
    for (as_stored, attention) in [(true, AttentionStyle::Routed), (false, AttentionStyle::Portable)] {
        let bodies = WriteBodies { attention };
        let mut options = Options { dense: MOH, bodies, ..Options::default() };
        options.settle(None, as_stored);
        assert_eq!(written(graph(ElementType::F32, false), options.dense).len(), 3);
    }
    let mut options = Options { dense: MOH, ..Options::default() };
    options.settle(None, false);
    assert_eq!(written(graph(ElementType::F32, false), options.dense).len(), 2);
}

/// The layer of `followed` with a weight of 8 bits, with zero points or without.
fn quantised(zero_points: bool, nodes: Vec<Node>) -> Graph {
    let mut graph = followed(nodes);
    graph.initializers[0].dims = vec![NARROW, 1, 16];
    let optional = if zero_points { &["zeros", "one", "zero", "zero_points"][..] } else { &[] };
    let inputs = [&["x", "weight", "scales"][..], optional].concat();
    let attributes = vec![("bits", Attribute::Int(8))];
    graph.nodes[0] = Node { domain: DOMAIN, attributes, ..node("LinearNBits", &inputs, "product") };
    graph
}

#[test]
fn quantised_layers_take_what_follows_them() {
    let gelu = || vec![node("Gelu", &["sum"], "y")];
    let styles = [MOH, DenseLayers::default()];
    for zero_points in [false, true] {
        let inputs = |optional: &[&'static str]| {
            let last = &["zero_points"][..usize::from(zero_points)];
            [&["x", "weight", "scales"], optional, last].concat()
        };
        let gated = node("Mul", &["gate", "sum"], "gated");
        let both = || vec![gated.clone(), node("Add", &["residual", "gated"], "y")];
        let [one, zero] = if zero_points { ["one", "zero"] } else { ["ai.moh/all1[1].f32", "never"] };
        // In any style.
        for pass in styles {
            let found = written(quantised(zero_points, gelu()), pass);
            assert_eq!(found, [layer("ai.moh:LinearActivationNBits", &inputs(&["bias"]), "y")]);
            let found = written(quantised(zero_points, both()), pass);
            assert_eq!(found, [layer("ai.moh:LinearNBits", &inputs(&["bias", "gate", "residual"]), "y")]);
            let found = written(quantised(zero_points, vec![gated.clone()]), pass);
            let optional = [&["bias", "gate"][..], &[zero][..usize::from(zero_points)]].concat();
            assert_eq!(found, [layer("ai.moh:LinearNBits", &inputs(&optional), "gated")]);
            let residual = vec![node("Add", &["sum", "residual"], "y")];
            let found = written(quantised(zero_points, residual), pass);
            assert_eq!(found, [layer("ai.moh:LinearNBits", &inputs(&["bias", one, "residual"]), "y")]);
        }
        // Numbers in the place of gates would stay where nodes become standard operators.
        let pass = DenseLayers { standard: true, ..MOH };
        assert_eq!(written(quantised(zero_points, gelu()), pass).len(), 1);
        let optional = if zero_points { &["bias", "one", "zero"][..] } else { &["bias"] };
        let found = written(quantised(zero_points, both()), pass);
        assert_eq!(found[0], layer("ai.moh:LinearNBits", &inputs(optional), "sum"));
        assert_eq!(found.len(), 3);
    }
    let mut graph = quantised(false, gelu());
    MOH.run(&mut graph).unwrap();
    let [activation, bits] = [("activation", Activation::Gelu as i64), ("bits", 8)];
    assert_eq!(graph.nodes[0].attributes, [activation, bits].map(|(name, value)| (name, Attribute::Int(value))));
    assert!(!graph.values.contains_key("product") && !graph.values.contains_key("sum"));
    // One number for all columns.
    let mut graph = quantised(false, gelu());
    graph.initializers[1].dims = vec![1];
    assert_eq!(written(graph, MOH).len(), 3);
    // A single row of each sequence.
    let mut graph = quantised(false, gelu());
    graph.inputs[0].dims.remove(1);
    assert_eq!(written(graph, MOH)[0].0, "ai.moh:LinearNBits");
}

/// A layer without a bias whose output is only added to: zeros stand in for its bias, a number for its gate.
#[test]
fn quantised_layers_without_a_bias() {
    let mut graph = quantised(false, vec![node("Add", &["product", "residual"], "sum")]);
    graph.nodes.remove(1);
    let optional = ["ai.moh/zeros[32].f32", "ai.moh/all1[1].f32", "residual"];
    let inputs = [&["x", "weight", "scales"][..], &optional].concat();
    assert_eq!(written(graph, MOH)[0], layer("ai.moh:LinearNBits", &inputs, "sum"));
}

/// A combination of heads has no activation function, and its bias is its own.
#[test]
fn combinations_take_their_gate_and_residual() {
    let combination = |nodes: Vec<Node>| {
        let mut graph = quantised(false, nodes);
        let inputs = ["x", "weight", "scales", "head_gates", "own_bias"];
        graph.nodes[0] = Node { domain: DOMAIN, ..node("RoutedCombineNBits", &inputs, "sum") };
        graph.nodes.remove(1);
        graph
    };
    let both = vec![node("Mul", &["gate", "sum"], "gated"), node("Add", &["residual", "gated"], "y")];
    let inputs = ["x", "weight", "scales", "head_gates", "own_bias", "gate", "residual"];
    for pass in [MOH, DenseLayers::default()] {
        assert_eq!(written(combination(both.clone()), pass), [layer("ai.moh:RoutedCombineNBits", &inputs, "y")]);
    }
    for other in [node("Gelu", &["sum"], "y"), node("Add", &["sum", "bias"], "y")] {
        let found = written(combination(vec![other]), MOH);
        assert_eq!(found[0], layer("ai.moh:RoutedCombineNBits", &inputs[..5], "sum"));
    }
}

/// Layers of one row of each sequence, such as a time's, would choose the body of all.
#[test]
fn activations_of_single_rows_stay_apart() {
    let mut graph = followed(vec![node("Gelu", &["sum"], "y")]);
    graph.inputs[0].dims.remove(1);
    let found = written(graph, MOH);
    assert_eq!(found[0], layer("ai.moh:Linear", &["x", "weight", "bias"], "sum"));
    assert_eq!(found[1], layer(":Gelu", &["sum"], "y"));
}

/// The sum of two layers is one's residual, and stands after the other.
#[test]
fn one_of_two_layers_is_the_others_residual() {
    let second = node("MatMul", &["x", "weight"], "second");
    let found = written(followed(vec![second, node("Add", &["sum", "second"], "y")]), MOH);
    let first = layer("ai.moh:Linear", &["x", "weight", "bias", "ai.moh/all1[1].f32", "second"], "y");
    assert_eq!(found, [layer("ai.moh:Linear", &["x", "weight"], "second"), first]);
}

#[test]
fn numbers_are_of_the_layers_type() {
    let mut graph = followed(vec![node("Add", &["sum", "residual"], "y")]);
    let values = graph.values.values_mut().chain(&mut graph.inputs).chain(&mut graph.outputs);
    values.for_each(|value| value.ty = ElementType::F16);
    graph.initializers.iter_mut().for_each(|init| init.ty = ElementType::F16);
    assert_eq!(written(graph, MOH)[0].1[3], "ai.moh/all1[1].f16");
}

#[test]
fn others_stay_as_they_are() {
    let onnx = DenseLayers { style: Some(DenseStyle::Onnx), ..MOH };
    let ways = [onnx, DenseLayers::default(), DenseLayers { standard: true, ..MOH }];
    for pass in ways {
        let types: Vec<String> = written(graph(ElementType::F32, false), pass).into_iter().map(|(op, ..)| op).collect();
        assert_eq!(types, [":MatMul", ":Add", ":MatMul"], "{pass:?}");
    }
    // A vector, or few columns.
    let none = |graph: Graph| written(graph, MOH).iter().all(|(op, ..)| op != "ai.moh:Linear");
    let mut vector = graph(ElementType::F32, false);
    vector.inputs[0].dims.drain(..2);
    assert!(none(vector));
    let mut narrow = graph(ElementType::F32, false);
    narrow.initializers[0].dims[1] = NARROW - 1;
    assert!(none(narrow));
}
