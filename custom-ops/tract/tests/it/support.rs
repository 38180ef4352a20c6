//! Models of one node, constructed field by field, and their input numbers.

use moh_operators::{DOMAIN, Value};
use tract_onnx::Onnx;
use tract_onnx::pb::attribute_proto::AttributeType;
use tract_onnx::pb::tensor_proto::DataType;
use tract_onnx::pb::tensor_shape_proto::{Dimension, dimension};
use tract_onnx::pb::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto,
    TensorShapeProto, TypeProto, ValueInfoProto, type_proto,
};
use tract_onnx::prelude::*;

/// tract's ONNX importer with our operators.
pub(crate) fn onnx() -> Onnx {
    let mut onnx = tract_onnx::onnx();
    moh_tract::register(&mut onnx);
    onnx
}

/// Reproducible numbers in -1..1.
pub(crate) fn numbers(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9) | 1;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

pub(crate) fn tensor<T: Datum + Copy>(shape: &[usize], data: &[T]) -> Tensor {
    Tensor::from_shape(shape, data).unwrap()
}

/// A RoutedAttention node on a KV cache: query (batch, sequence, 12), key (batch, 2, total, 3), value (batch, 2,
/// total, 5).
pub(crate) struct Attention {
    pub(crate) heads: i64,
    pub(crate) gate_heads: i64,
    pub(crate) causal: bool,
    pub(crate) bias: bool,
    pub(crate) f16: bool,
    pub(crate) gates_f16: bool,
    /// Name of the value's sequence length.
    pub(crate) value_total: &'static str,
    /// Number of inputs of the node.
    pub(crate) inputs: usize,
}

impl Default for Attention {
    fn default() -> Attention {
        Attention {
            heads: 4,
            gate_heads: 4,
            causal: false,
            bias: true,
            f16: false,
            gates_f16: false,
            value_total: "total",
            inputs: 5,
        }
    }
}

impl Attention {
    pub(crate) fn value(&self, name: &str) -> Option<Value> {
        match name {
            "num_heads" => Some(Value::Int(self.heads)),
            "kv_num_heads" => Some(Value::Int(2)),
            "scale" => Some(Value::Float(0.5)),
            "is_causal" => Some(Value::Int(i64::from(self.causal))),
            _ => None,
        }
    }

    pub(crate) fn model(&self) -> ModelProto {
        let t = if self.f16 { DataType::Float16 } else { DataType::Float };
        let gates = if self.gates_f16 { DataType::Float16 } else { DataType::Float };
        let gate_heads = self.gate_heads.to_string();
        let mut inputs = vec![
            operand("query", t, &["batch", "sequence", "12"]),
            operand("key", t, &["batch", "2", "total", "3"]),
            operand("value", t, &["batch", "2", self.value_total, "5"]),
            operand("head_gates", gates, &["batch", "sequence", &gate_heads]),
        ];
        if self.bias {
            inputs.push(operand("attn_bias", t, &["batch", "1", "1", "total"]));
        }
        inputs.truncate(self.inputs);
        let attribute = |name: &str| self.value(name).map(|value| attribute(name, value));
        let node = NodeProto {
            name: "attention_0".to_owned(),
            op_type: "RoutedAttention".to_owned(),
            domain: DOMAIN.to_owned(),
            input: inputs.iter().map(|input| input.name.clone()).collect(),
            output: vec!["output".to_owned()],
            attribute: ["num_heads", "kv_num_heads", "scale", "is_causal"].into_iter().filter_map(attribute).collect(),
            ..NodeProto::default()
        };
        let output = ValueInfoProto { name: "output".to_owned(), ..ValueInfoProto::default() };
        ModelProto {
            ir_version: 10,
            opset_import: vec![opset("", 21), opset(DOMAIN, 1)],
            graph: Some(GraphProto {
                name: "attention".to_owned(),
                node: vec![node],
                input: inputs,
                output: vec![output],
                ..GraphProto::default()
            }),
            ..ModelProto::default()
        }
    }
}

/// A model-local function with the operator's name whose body is not attention: tract must not run it.
pub(crate) fn function() -> FunctionProto {
    FunctionProto {
        name: Some("RoutedAttention".to_owned()),
        domain: Some(DOMAIN.to_owned()),
        input: ["query", "key", "value", "head_gates", "attn_bias"].map(str::to_owned).to_vec(),
        output: vec!["output".to_owned()],
        node: vec![NodeProto {
            op_type: "Identity".to_owned(),
            input: vec!["query".to_owned()],
            output: vec!["output".to_owned()],
            ..NodeProto::default()
        }],
        opset_import: vec![opset("", 21)],
        ..FunctionProto::default()
    }
}

pub(crate) fn opset(domain: &str, version: i64) -> OperatorSetIdProto {
    OperatorSetIdProto { domain: domain.to_owned(), version }
}

pub(crate) fn attribute(name: &str, value: Value) -> AttributeProto {
    let attribute = AttributeProto { name: name.to_owned(), ..AttributeProto::default() };
    match value {
        Value::Int(i) => AttributeProto { r#type: AttributeType::Int as i32, i, ..attribute },
        Value::Float(f) => AttributeProto { r#type: AttributeType::Float as i32, f, ..attribute },
        Value::Ints(ints) => AttributeProto { r#type: AttributeType::Ints as i32, ints, ..attribute },
    }
}

pub(crate) fn initializer(name: &str, shape: &[usize], data_type: DataType, raw_data: Vec<u8>) -> TensorProto {
    let dims = shape.iter().map(|&dim| dim as i64).collect();
    TensorProto { name: name.to_owned(), dims, data_type: data_type as i32, raw_data, ..TensorProto::default() }
}

pub(crate) fn operand(name: &str, t: DataType, dims: &[&str]) -> ValueInfoProto {
    let dimension = |dim: &&str| {
        let value = match dim.parse() {
            Ok(number) => dimension::Value::DimValue(number),
            Err(_) => dimension::Value::DimParam((*dim).to_owned()),
        };
        Dimension { value: Some(value), ..Dimension::default() }
    };
    let shape = TensorShapeProto { dim: dims.iter().map(dimension).collect() };
    let tensor = type_proto::Tensor { elem_type: t as i32, shape: Some(shape) };
    let r#type = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..TypeProto::default() };
    ValueInfoProto { name: name.to_owned(), r#type: Some(r#type), ..ValueInfoProto::default() }
}
