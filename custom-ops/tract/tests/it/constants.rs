//! Where a file may keep what tract's nodes, and ours, read as constants.

use crate::support::{attribute, initializer, numbers, onnx, operand, opset, tensor};
use moh_operators::{Value, tolerance};
use tract_onnx::pb::attribute_proto::AttributeType;
use tract_onnx::pb::tensor_proto::DataType;
use tract_onnx::pb::{AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto};
use tract_onnx::prelude::*;

/// A matrix of 2 rows of 32 numbers of 4 bits, in one block each.
const WIDTH: usize = 32;
const SCALES: [f32; 2] = [0.01, 0.02];
const ZERO_POINTS: [u8; 2] = [3, 12];
const BIAS: [f32; 2] = [1.0, -2.0];

/// Where the file has the zero points and the bias.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Place {
    Initializer,
    Constant,
    Input,
}

fn node(op_type: &str, domain: &str, inputs: &[&str], output: &str, attributes: &[(&str, i64)]) -> NodeProto {
    NodeProto {
        name: output.to_owned(),
        op_type: op_type.to_owned(),
        domain: domain.to_owned(),
        input: inputs.iter().map(|&input| input.to_owned()).collect(),
        output: vec![output.to_owned()],
        attribute: attributes.iter().map(|&(name, value)| attribute(name, Value::Int(value))).collect(),
        ..NodeProto::default()
    }
}

fn model(nodes: Vec<NodeProto>, inputs: Vec<ValueInfoProto>, initializers: Vec<TensorProto>) -> ModelProto {
    let graph = GraphProto {
        name: "constants".to_owned(),
        node: nodes,
        input: inputs,
        initializer: initializers,
        output: vec![ValueInfoProto { name: "y".to_owned(), ..ValueInfoProto::default() }],
        ..GraphProto::default()
    };
    let opset_import = vec![opset("", 21), opset("com.microsoft", 1)];
    ModelProto { ir_version: 10, opset_import, graph: Some(graph), ..ModelProto::default() }
}

fn bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn quantised() -> Vec<u8> {
    (0..2 * WIDTH / 2).map(|i| (i * 89 % 256) as u8).collect()
}

/// Nodes that read `x` and the initializers `w` and `s`, with the other constants in `place`.
fn with(
    place: Place,
    mut nodes: Vec<NodeProto>,
    mut initializers: Vec<TensorProto>,
    others: Vec<TensorProto>,
) -> ModelProto {
    let mut inputs = vec![operand("x", DataType::Float, &["rows", "32"])];
    for tensor in others {
        match place {
            Place::Initializer => initializers.push(tensor),
            Place::Input => {
                let dims: Vec<String> = tensor.dims.iter().map(ToString::to_string).collect();
                let dims: Vec<&str> = dims.iter().map(String::as_str).collect();
                inputs.push(operand(&tensor.name, DataType::try_from(tensor.data_type).unwrap(), &dims));
            }
            Place::Constant => {
                let mut constant = node("Constant", "", &[], &tensor.name, &[]);
                let r#type = AttributeType::Tensor as i32;
                let value = TensorProto { name: "another".to_owned(), ..tensor };
                let name = "value".to_owned();
                constant.attribute = vec![AttributeProto { name, r#type, t: Some(value), ..AttributeProto::default() }];
                nodes.insert(0, constant);
            }
        }
    }
    model(nodes, inputs, initializers)
}

fn mat_mul_nbits(place: Place) -> ModelProto {
    let attributes = [("bits", 4), ("block_size", 32), ("K", 32), ("N", 2)];
    let product = node("MatMulNBits", "com.microsoft", &["x", "w", "s", "z", "", "b"], "y", &attributes);
    let initializers = vec![
        initializer("w", &[2, 1, 16], DataType::Uint8, quantised()),
        initializer("s", &[2, 1], DataType::Float, bytes(&SCALES)),
    ];
    let others = vec![
        initializer("z", &[2, 1], DataType::Uint8, ZERO_POINTS.to_vec()),
        initializer("b", &[2], DataType::Float, bytes(&BIAS)),
    ];
    with(place, vec![product], initializers, others)
}

fn dequantize_linear(place: Place) -> ModelProto {
    let nodes = vec![
        node("DequantizeLinear", "", &["w", "s", "z"], "d", &[("axis", 1), ("block_size", 32)]),
        node("Gemm", "", &["x", "d", "b"], "y", &[("transB", 1)]),
    ];
    let packed = ZERO_POINTS[0] | ZERO_POINTS[1] << 4;
    let initializers = vec![
        initializer("w", &[2, 32], DataType::Uint4, quantised()),
        initializer("s", &[2, 1], DataType::Float, bytes(&SCALES)),
    ];
    let others = vec![
        initializer("z", &[2, 1], DataType::Uint4, vec![packed]),
        initializer("b", &[2], DataType::Float, bytes(&BIAS)),
    ];
    with(place, nodes, initializers, others)
}

fn load(mut model: ModelProto) -> TractResult<TypedModel> {
    moh_tract::prepare(&mut model)?;
    moh_tract::optimize(onnx().parse(&model, None)?.model.into_typed()?)
}

fn run(model: TypedModel, x: Tensor) -> TractResult<Vec<f32>> {
    let output = model.into_runnable()?.run(tvec![x.into_tvalue()])?.remove(0);
    Ok(output.try_as_plain_ram()?.as_slice::<f32>()?.to_vec())
}

#[test]
fn zero_points_and_biases_count_wherever_they_are() {
    let x = numbers(3 * WIDTH, 1);
    let values = quantised();
    let value = |row: usize, k: usize| f32::from(values[(row * WIDTH + k) / 2] >> (k % 2 * 4) & 15);
    let product = |x: &[f32], row: usize| {
        let terms = x.iter().enumerate().map(|(k, x)| x * (value(row, k) - f32::from(ZERO_POINTS[row])));
        terms.sum::<f32>() * SCALES[row] + BIAS[row]
    };
    let expected: Vec<f32> = x.chunks(WIDTH).flat_map(|x| [product(x, 0), product(x, 1)]).collect();
    for of in [mat_mul_nbits, dequantize_linear] {
        for place in [Place::Initializer, Place::Constant] {
            let found = run(load(of(place)).unwrap(), tensor(&[3, WIDTH], &x)).unwrap();
            for (found, expected) in found.iter().zip(&expected) {
                assert!((found - expected).abs() <= tolerance::TRACT_LAYER_F32, "{place:?}: {expected}, found {found}");
            }
        }
    }
    let message = format!("{:#}", load(mat_mul_nbits(Place::Input)).expect_err("the kernel holds zero points"));
    assert!(message.contains("input 3: expected an initializer, found z, which is none"), "{message}");
}

fn mat_mul(length: &str, weight: [usize; 2]) -> ModelProto {
    let numbers = bytes(&numbers(weight[0] * weight[1], 2));
    model(
        vec![node("MatMul", "", &["x", "w"], "y", &[])],
        vec![operand("x", DataType::Float, &["rows", length])],
        vec![initializer("w", &weight, DataType::Float, numbers)],
    )
}

#[test]
fn length_of_rows_may_be_a_symbol() {
    let (x, weight) = (numbers(3 * 6, 1), numbers(6 * 5, 2));
    let product = |i: usize| (0..6).map(|k| x[i / 5 * 6 + k] * weight[k * 5 + i % 5]).sum::<f32>();
    let unprepared = onnx().parse(&mat_mul("length", [6, 5]), None).unwrap().model.into_typed().unwrap();
    for model in [load(mat_mul("length", [6, 5])).unwrap(), moh_tract::optimize(unprepared).unwrap()] {
        assert!(model.nodes().iter().any(|node| node.op.name() == "Linear"), "{model}");
        let found = run(model.clone(), tensor(&[3, 6], &x)).unwrap();
        assert_eq!(found.len(), 15);
        for (i, found) in found.iter().enumerate() {
            assert!((found - product(i)).abs() <= tolerance::TRACT_LAYER_F32, "{i}: {}, found {found}", product(i));
        }
        let message = format!("{:#}", run(model, tensor(&[2, 9], &x)).expect_err("rows of another length"));
        assert!(message.contains("Linear: expected rows of 6, found [2, 9]"), "{message}");
    }
}

#[test]
fn products_with_empty_matrices_are_left_to_tract() {
    for (length, weight) in [("6", [6, 0]), ("0", [0, 5])] {
        let parsed = onnx().parse(&mat_mul(length, weight), None).unwrap().model.into_typed().unwrap();
        let ours = load(mat_mul(length, weight)).map(|_| ()).map_err(|e| format!("{e:#}"));
        assert_eq!(ours.is_ok(), parsed.into_optimized().is_ok(), "{weight:?}: {ours:?}");
    }
}
