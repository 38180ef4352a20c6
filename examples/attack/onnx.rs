//! Models of a few nodes, as bytes.

use moh_export::proto::tensor_shape_proto::{Dimension, dimension};
use moh_export::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto, TypeProto,
    ValueInfoProto, type_proto,
};
use moh_operators::Value;
use prost::Message;

/// Numbers of ONNX's element types.
pub const FLOAT: i32 = 1;
pub const UINT8: i32 = 2;
pub const INT8: i32 = 3;
pub const INT32: i32 = 6;
pub const INT64: i32 = 7;
pub const FLOAT16: i32 = 10;
pub const BFLOAT16: i32 = 16;
pub const UINT4: i32 = 21;

/// An attribute of its value's type.
pub fn attribute(name: &str, value: Value) -> AttributeProto {
    let mut attribute = AttributeProto { name: Some(name.to_owned()), ..AttributeProto::default() };
    match value {
        Value::Int(i) => (attribute.i, attribute.r#type) = (Some(i), Some(2)),
        Value::Float(f) => (attribute.f, attribute.r#type) = (Some(f), Some(1)),
        Value::Ints(ints) => (attribute.ints, attribute.r#type) = (ints, Some(7)),
    }
    attribute
}

/// A declared value; a negative dimension is one that only a run knows.
pub fn declared(name: &str, ty: i32, dims: &[i64]) -> ValueInfoProto {
    let dim = |(i, &d): (usize, &i64)| {
        let value =
            if d < 0 { dimension::Value::DimParam(format!("{name}_{i}")) } else { dimension::Value::DimValue(d) };
        Dimension { value: Some(value), ..Dimension::default() }
    };
    typed(name, ty, Some(TensorShapeProto { dim: dims.iter().enumerate().map(dim).collect() }))
}

/// A declared value whose shape nothing is said of.
pub fn of_any_shape(name: &str, ty: i32) -> ValueInfoProto {
    typed(name, ty, None)
}

fn typed(name: &str, ty: i32, shape: Option<TensorShapeProto>) -> ValueInfoProto {
    let tensor = type_proto::Tensor { elem_type: Some(ty), shape };
    let ty = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..TypeProto::default() };
    ValueInfoProto { name: Some(name.to_owned()), r#type: Some(ty), ..ValueInfoProto::default() }
}

/// A constant.
pub fn constant(name: &str, ty: i32, dims: &[i64], bytes: Vec<u8>) -> TensorProto {
    TensorProto {
        name: Some(name.to_owned()),
        data_type: Some(ty),
        dims: dims.to_vec(),
        raw_data: Some(bytes),
        ..TensorProto::default()
    }
}

/// A node with the one output `y`.
pub fn node(op_type: &str, domain: &str, inputs: Vec<String>, attributes: Vec<AttributeProto>) -> NodeProto {
    NodeProto {
        op_type: Some(op_type.to_owned()),
        domain: Some(domain.to_owned()),
        name: Some("node".to_owned()),
        input: inputs,
        output: vec!["y".to_owned()],
        attribute: attributes,
        ..NodeProto::default()
    }
}

/// The bytes of a model.
pub fn model(graph: GraphProto) -> Vec<u8> {
    let import = |domain: &str, version| OperatorSetIdProto { domain: Some(domain.to_owned()), version: Some(version) };
    let model = ModelProto {
        ir_version: Some(10),
        opset_import: vec![import("", 21), import("ai.moh", 2), import("com.microsoft", 1)],
        graph: Some(graph),
        ..ModelProto::default()
    };
    model.encode_to_vec()
}
