//! An operator with a quantised weight: constants of any type stay in the operator.

use crate::support::{attribute, initializer, numbers, onnx, operand, opset, tensor};
use moh_operators::{
    Attributes, DOMAIN, DType, Data, Definition, Operator, RoutedCombineNBits, Tensor as Borrowed, Value, tolerance,
};
use tract_onnx::pb::tensor_proto::DataType;
use tract_onnx::pb::{GraphProto, ModelProto, NodeProto, ValueInfoProto};
use tract_onnx::prelude::*;

const OPERATOR: &Operator = RoutedCombineNBits::OPERATOR;
const ATTRIBUTES: [(&str, i64); 4] = [("num_heads", 4), ("bits", 4), ("block_size", 32), ("accuracy_level", 0)];
/// Blocks of 32 belong to two heads of 16.
const SHAPES: [&[usize]; 4] = [&[2, 3, 64], &[20, 2, 16], &[20, 2], &[2, 3, 4]];

fn model(weight: &[u8], scales: &[f32]) -> ModelProto {
    let node = NodeProto {
        name: "combine".to_owned(),
        op_type: OPERATOR.name.to_owned(),
        domain: DOMAIN.to_owned(),
        input: ["x", "weight", "scales", "head_gates"].map(str::to_owned).to_vec(),
        output: vec!["output".to_owned()],
        attribute: ATTRIBUTES.map(|(name, value)| attribute(name, Value::Int(value))).to_vec(),
        ..NodeProto::default()
    };
    let scales = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let graph = GraphProto {
        name: "quantised".to_owned(),
        node: vec![node],
        input: vec![
            operand("x", DataType::Float, &["batch", "sequence", "64"]),
            operand("head_gates", DataType::Float, &["batch", "sequence", "4"]),
        ],
        initializer: vec![
            initializer("weight", SHAPES[1], DataType::Uint8, weight.to_vec()),
            initializer("scales", SHAPES[2], DataType::Float, scales),
        ],
        output: vec![ValueInfoProto { name: "output".to_owned(), ..ValueInfoProto::default() }],
        ..GraphProto::default()
    };
    let opset_import = vec![opset("", 21), opset(DOMAIN, 2)];
    ModelProto { ir_version: 10, opset_import, graph: Some(graph), ..ModelProto::default() }
}

#[test]
fn quantised_weights_stay_in_the_operator() {
    let count = |i: usize| SHAPES[i].iter().product::<usize>();
    let weight: Vec<u8> = (0..count(1)).map(|i| (i * 89 % 256) as u8).collect();
    let (x, scales, mut gates) = (numbers(count(0), 1), numbers(count(2), 2), numbers(count(3), 3));
    gates.iter_mut().step_by(3).for_each(|gate| *gate = 0.0);
    let attributes = Attributes::read(OPERATOR, |def| {
        ATTRIBUTES.iter().find(|(name, _)| *name == def.name).map(|&(_, value)| Value::Int(value))
    });
    let data = [Data::F32(&x), Data::U8(&weight), Data::F32(&scales), Data::F32(&gates)];
    let inputs: Vec<_> = SHAPES.iter().zip(data).map(|(shape, data)| Some(Borrowed { shape, data })).collect();
    let expected = OPERATOR.reference(&attributes.unwrap(), &inputs).unwrap();
    let largest = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));

    let parsed = onnx().parse(&model(&weight, &scales), None).unwrap().model;
    let parsed = parsed.into_typed().unwrap().into_decluttered().unwrap();
    let optimized = moh_tract::optimize(parsed.clone()).unwrap();
    assert!(optimized.nodes().iter().all(|node| node.op.name() != "Const"), "{optimized}");
    let mut prepared = model(&weight, &scales);
    moh_tract::prepare(&mut prepared).unwrap();
    assert!(prepared.graph.as_ref().unwrap().initializer.is_empty(), "the node holds its constants");
    let prepared = onnx().parse(&prepared, None).unwrap().model.into_typed().unwrap();
    let prepared = moh_tract::optimize(prepared).unwrap();
    for model in [parsed.into_optimized().unwrap(), optimized, prepared] {
        let plan = model.into_runnable().unwrap();
        let inputs = tvec![tensor(SHAPES[0], &x).into_tvalue(), tensor(SHAPES[3], &gates).into_tvalue()];
        let output = plan.run(inputs).unwrap().remove(0);
        let found = output.try_as_plain_ram().unwrap().as_slice::<f32>().unwrap().to_vec();
        for (found, expected) in found.iter().zip(&expected) {
            let allowed = tolerance::operator_output(DType::F32) * largest;
            assert!((f64::from(*found) - expected).abs() <= allowed, "expected {expected}, found {found}");
        }
    }
}
