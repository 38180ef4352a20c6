//! Nodes that no kernel computes are errors that say what was expected.

use super::matrix::{Matrix, Type};
use super::{Form, product, tract};
use crate::support::onnx::{DataType, Graph};
use crate::support::write;
use moh_runtime::{Error, Model};

fn refusal(graph: &Graph) -> String {
    let (_folder, path) = write(graph);
    match Model::load(&path, &tract()) {
        Err(Error::Load { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

fn refused(graph: &Graph, expected: &str) {
    let reason = refusal(graph);
    assert!(reason.contains(expected), "expected {expected:?} in {reason:?}");
}

/// x (n, 64) times a matrix of 6 rows in blocks of 32.
fn matrix() -> Matrix {
    Matrix::new(4, false, true, [6, 2, 32], Type::F32)
}

/// A MatMulNBits on tensors of these types and sizes.
fn nbits(attributes: &[(&str, i64)], tensors: &[(&str, DataType, &[i64], usize)], inputs: &[&str]) -> Graph {
    let mut graph = Graph::new();
    graph.import("com.microsoft", 1);
    graph.input("x", DataType::Float, &["n", "64"]);
    for (name, ty, dims, bytes) in tensors {
        graph.raw(name, *ty, dims, &vec![0; *bytes]);
    }
    graph.node("MatMulNBits", inputs, "y", attributes);
    graph.in_domain("com.microsoft");
    graph.output("y", DataType::Float, &["n", "6"]);
    graph
}

const GOOD: [(&str, i64); 4] = [("K", 64), ("N", 6), ("bits", 4), ("block_size", 32)];
const TENSORS: [(&str, DataType, &[i64], usize); 3] = [
    ("values", DataType::Uint8, &[6, 2, 16], 192),
    ("scales", DataType::Float, &[6, 2], 48),
    ("zeros", DataType::Uint8, &[6, 1], 6),
];
const INPUTS: [&str; 4] = ["x", "values", "scales", "zeros"];

#[test]
fn the_good_one_loads() {
    let (_folder, path) = write(&nbits(&GOOD, &TENSORS, &INPUTS));
    assert!(Model::load(&path, &tract()).is_ok());
}

#[test]
fn attributes() {
    for (name, value, expected) in [
        ("bits", 3, "bits: expected 4 or 8, found 3"),
        ("bits", i64::MIN, "bits: expected 4 or 8"),
        ("block_size", 7, "block_size: expected one of [16, 32, 64, 128, 256], found 7"),
        ("block_size", 0, "block_size: expected a length, found 0"),
        ("block_size", 128, "expected a multiple of block_size = 128, found 64"),
        ("K", 48, "expected a multiple of block_size = 32, found 48"),
        ("K", -64, "row length: expected a length, found -64"),
        ("K", i64::MAX - 31, "expected a matrix that fits into memory"),
        ("N", 7, "values: expected shape [7, 32], found [6, 2, 16]"),
        ("N", i64::MAX, "expected a matrix that fits into memory"),
        ("accuracy_level", 5, "accuracy_level: expected 0 to 4, found 5"),
    ] {
        let mut attributes: Vec<(&str, i64)> = GOOD.into_iter().filter(|(other, _)| *other != name).collect();
        attributes.push((name, value));
        refused(&nbits(&attributes, &TENSORS, &INPUTS), expected);
    }
    for name in ["K", "N", "block_size"] {
        let attributes: Vec<(&str, i64)> = GOOD.into_iter().filter(|(other, _)| *other != name).collect();
        refused(&nbits(&attributes, &TENSORS, &INPUTS), &format!("attribute {name} is missing"));
    }
}

#[test]
fn tensors() {
    for (i, tensor, expected) in [
        (0, ("values", DataType::Uint8, &[6i64, 2, 16] as &[i64], 191), "values: expected 192 bytes, found 191"),
        (0, ("values", DataType::Uint8, &[6, 2, 17], 204), "values: expected shape [6, 32], found [6, 2, 17]"),
        (0, ("values", DataType::Uint8, &[i64::MAX, 2, 16], 192), "values: expected shape [6, 32]"),
        (0, ("values", DataType::Int8, &[6, 2, 16], 192), "values: expected uint8, found Ok(Int8)"),
        (1, ("scales", DataType::Float, &[6, 1], 24), "scales: expected shape [6, 2], found [6, 1]"),
        (1, ("scales", DataType::Int32, &[6, 2], 48), "scales: expected float32, float16"),
        (1, ("scales", DataType::Float16, &[6, 2], 24), "of type"),
        (2, ("zeros", DataType::Float, &[6, 2], 48), "zeros: expected uint8, found Ok(Float)"),
        (2, ("zeros", DataType::Uint8, &[6, 2], 12), "zeros: expected shape [6, 1], found [6, 2]"),
    ] {
        let mut tensors = TENSORS;
        tensors[i] = tensor;
        refused(&nbits(&GOOD, &tensors, &INPUTS), expected);
    }
}

#[test]
fn inputs() {
    refused(&nbits(&GOOD, &TENSORS, &["x", "values"]), "input 2: expected an initializer");
    refused(&nbits(&GOOD, &TENSORS, &["x", "x", "scales"]), "input 1: expected an initializer");
    refused(&nbits(&GOOD, &TENSORS, &[]), "input");
    let mut tensors = TENSORS.to_vec();
    tensors.push(("order", DataType::Int32, &[64], 256));
    refused(&nbits(&GOOD, &tensors, &["x", "values", "scales", "zeros", "order"]), "input g_idx");
    tensors[3] = ("bias", DataType::Float, &[5], 20);
    refused(
        &nbits(&GOOD, &tensors, &["x", "values", "scales", "zeros", "", "bias"]),
        "bias: expected shape [6], found [5]",
    );
    tensors[3] = ("bias", DataType::Float16, &[6], 12);
    refused(&nbits(&GOOD, &tensors, &["x", "values", "scales", "zeros", "", "bias"]), "bias: expected F32, found F16");
    let mut graph = nbits(&GOOD, &TENSORS, &INPUTS);
    graph.in_domain("com.example");
    refused(&graph, "expected an operator of domain com.microsoft, found one of domain \"com.example\"");
}

/// Rows of a table are gathered, and a block is a part of a row.
#[test]
fn axes_of_a_table() {
    for (name, axis, loads) in
        [("gather_axis", 0, true), ("gather_axis", 1, false), ("quantize_axis", -1, true), ("quantize_axis", 0, false)]
    {
        let mut graph = Graph::new();
        graph.import("com.microsoft", 1);
        graph.input("ids", DataType::Int64, &["n"]);
        graph.raw("table", DataType::Uint8, &[6, 32], &[0; 192]);
        graph.raw("scales", DataType::Float, &[6, 2], &[0; 48]);
        graph.node(
            "GatherBlockQuantized",
            &["table", "ids", "scales"],
            "y",
            &[("bits", 4), ("block_size", 32), (name, axis)],
        );
        graph.in_domain("com.microsoft");
        graph.output("y", DataType::Float, &["n", "64"]);
        if loads {
            let (_folder, path) = write(&graph);
            assert!(Model::load(&path, &tract()).is_ok(), "{name} {axis}");
        } else {
            refused(&graph, "expected gather_axis 0 and quantize_axis 1");
        }
    }
}

/// tract has no 4-bit tensors: a dequantised matrix that no product reads cannot be computed.
#[test]
fn dequantised_matrices_are_for_products() {
    let axis = |graph: &mut Graph, axis| {
        let inputs = ["values", "scales", "zeros"];
        graph.node("DequantizeLinear", &inputs, "weight", &[("axis", axis), ("block_size", 32)]);
    };
    let mut graph = Graph::new();
    graph.opset(21);
    graph.input("x", DataType::Float, &["n", "64"]);
    let own = matrix().dequantized(&mut graph, false);
    axis(&mut graph, own);
    graph.node("Add", &["x", "weight"], "y", &[]);
    graph.output("y", DataType::Float, &["n", "64"]);
    refused(&graph, "weight: expected a product that sums along axis 1 to read it");

    // A product along the other axis; then the matrix as an output.
    let mut graph = product(Form::InOut, &matrix(), None, 0);
    graph.output("weight", DataType::Float, &["64", "6"]);
    refused(&graph, "weight: expected a product that sums along axis 0 to read it");
    let mut graph = Graph::new();
    graph.opset(21);
    graph.input("x", DataType::Float, &["n", "6"]);
    let own = matrix().dequantized(&mut graph, false);
    axis(&mut graph, own);
    graph.node("MatMul", &["x", "weight"], "y", &[]);
    graph.output("y", DataType::Float, &["n", "64"]);
    refused(&graph, "expected a product that sums along axis 1");
}

#[test]
fn dequantised_matrices_of_wrong_sizes() {
    for (tensor, expected) in [
        (("values", DataType::Uint4, &[64i64, 6] as &[i64], 191), "values: expected 192 bytes, found 191"),
        (("values", DataType::Uint4, &[60, 6], 180), "expected a multiple of block_size = 32, found 60"),
        (("values", DataType::Int16, &[64, 6], 768), "expected an integer of 4 or 8 bits, found Ok(Int16)"),
        (("values", DataType::Int4, &[64, 6], 192), "zeros: expected the type of values"),
        (("scales", DataType::Float, &[3, 6], 72), "scales: expected shape [2, 6], found [3, 6]"),
        (("scales", DataType::Float, &[6, 2], 48), "scales: expected shape [2, 6], found [6, 2]"),
        (("zeros", DataType::Uint4, &[2, 6], 5), "zeros: expected 6 bytes, found 5"),
    ] {
        let good: [(&str, DataType, &[i64], usize); 3] = [
            ("values", DataType::Uint4, &[64, 6], 192),
            ("scales", DataType::Float, &[2, 6], 48),
            ("zeros", DataType::Uint4, &[2, 6], 6),
        ];
        let mut graph = Graph::new();
        graph.opset(21);
        graph.input("x", DataType::Float, &["n", "64"]);
        for (name, ty, dims, bytes) in good.map(|other| if other.0 == tensor.0 { tensor } else { other }) {
            graph.raw(name, ty, dims, &vec![0; bytes]);
        }
        let inputs = ["values", "scales", "zeros"];
        graph.node("DequantizeLinear", &inputs, "weight", &[("axis", 0), ("block_size", 32)]);
        graph.node("MatMul", &["x", "weight"], "y", &[]);
        graph.output("y", DataType::Float, &["n", "6"]);
        refused(&graph, expected);
    }
}

#[test]
fn truncated_data_files() {
    let mut graph = product(Form::MatMulNBits, &matrix(), None, 0);
    let data = graph.move_external("model.onnx_data", 0);
    let (folder, path) = write(&graph);
    std::fs::write(folder.path().join("model.onnx_data"), &data[..data.len() - 1]).unwrap();
    let error = Model::load(&path, &tract()).unwrap_err().to_string();
    assert!(error.contains("is truncated"), "{error}");
}
