//! Small ONNX models around single operators.

use anyhow::Result;
use moh_export::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto, TypeProto,
    ValueInfoProto, attribute_proto::AttributeType, tensor_shape_proto, type_proto,
};
use moh_models::sample::Rng;
use moh_runtime::{Tensor, Value};
use prost::Message;
use std::path::Path;

pub(crate) const FLOAT: i32 = 1;
pub(crate) const INT32: i32 = 6;
pub(crate) const INT64: i32 = 7;
pub(crate) const BFLOAT16: i32 = 16;

/// onnxruntime's own operators.
pub(crate) const MICROSOFT: &str = "com.microsoft";
/// Ours.
pub(crate) const MOH: &str = moh_operators::DOMAIN;

/// A graph in the making.
#[derive(Default)]
pub(crate) struct Builder {
    graph: GraphProto,
}

impl Builder {
    /// An input of fixed size; one of onnxruntime's optimizations is to know sizes.
    pub(crate) fn input(mut self, name: &str, element_type: i32, dims: &[usize]) -> Builder {
        self.graph.input.push(value(name, element_type, dims));
        self
    }

    pub(crate) fn output(mut self, name: &str, element_type: i32, dims: &[usize]) -> Builder {
        self.graph.output.push(value(name, element_type, dims));
        self
    }

    /// A constant of normal numbers.
    pub(crate) fn weight(mut self, name: &str, dims: &[usize]) -> Builder {
        let spread = (*dims.last().unwrap_or(&1) as f32).powf(-0.5);
        let data = normals(name, dims).iter().flat_map(|x| (x * spread).to_le_bytes()).collect();
        self.graph.initializer.push(TensorProto {
            name: Some(name.to_owned()),
            data_type: Some(FLOAT),
            dims: dims.iter().map(|&dim| dim as i64).collect(),
            raw_data: Some(data),
            ..TensorProto::default()
        });
        self
    }

    /// `output = op(inputs)`; inputs and outputs are separated by spaces, an input `-` is left out.
    pub(crate) fn node(
        mut self,
        domain: &str,
        op: &str,
        inputs: &str,
        outputs: &str,
        attributes: Vec<AttributeProto>,
    ) -> Builder {
        self.graph.node.push(node(domain, op, &split(inputs), &split(outputs), attributes));
        self
    }

    pub(crate) fn write(mut self, path: &Path) -> Result<()> {
        self.graph.name = Some("benchmark".to_owned());
        // The oldest version that has them all: older libraries can be measured too.
        let since =
            self.graph.node.iter().filter_map(|node| Some(moh_operators::operator(node.op_type.as_ref()?)?.since));
        let since = since.max().unwrap_or(1);
        let import =
            |domain: &str, version| OperatorSetIdProto { domain: Some(domain.to_owned()), version: Some(version) };
        let model = ModelProto {
            ir_version: Some(10),
            opset_import: vec![import("", 23), import(MICROSOFT, 1), import(MOH, since)],
            graph: Some(self.graph),
            ..ModelProto::default()
        };
        Ok(std::fs::write(path, model.encode_to_vec())?)
    }
}

fn split(names: &str) -> Vec<&str> {
    names.split_whitespace().map(|name| if name == "-" { "" } else { name }).collect()
}

pub(crate) fn node(
    domain: &str,
    op: &str,
    inputs: &[&str],
    outputs: &[&str],
    attribute: Vec<AttributeProto>,
) -> NodeProto {
    let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    NodeProto {
        domain: Some(domain.to_owned()),
        op_type: Some(op.to_owned()),
        input: names(inputs),
        output: names(outputs),
        attribute,
        ..NodeProto::default()
    }
}

pub(crate) fn int(name: &str, value: usize) -> AttributeProto {
    let ty = Some(AttributeType::Int as i32);
    AttributeProto { name: Some(name.to_owned()), r#type: ty, i: Some(value as i64), ..AttributeProto::default() }
}

pub(crate) fn ints(name: &str, values: &[i64]) -> AttributeProto {
    let ty = Some(AttributeType::Ints as i32);
    AttributeProto { name: Some(name.to_owned()), r#type: ty, ints: values.to_vec(), ..AttributeProto::default() }
}

pub(crate) fn float(name: &str, value: f32) -> AttributeProto {
    let ty = Some(AttributeType::Float as i32);
    AttributeProto { name: Some(name.to_owned()), r#type: ty, f: Some(value), ..AttributeProto::default() }
}

fn value(name: &str, element_type: i32, dims: &[usize]) -> ValueInfoProto {
    let dim = |&dim: &usize| tensor_shape_proto::Dimension {
        value: Some(tensor_shape_proto::dimension::Value::DimValue(dim as i64)),
        ..tensor_shape_proto::Dimension::default()
    };
    let tensor = type_proto::Tensor {
        elem_type: Some(element_type),
        shape: Some(TensorShapeProto { dim: dims.iter().map(dim).collect() }),
    };
    ValueInfoProto {
        name: Some(name.to_owned()),
        r#type: Some(TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..TypeProto::default() }),
        ..ValueInfoProto::default()
    }
}

pub(crate) fn normals(name: &str, dims: &[usize]) -> Vec<f32> {
    let rng = &mut Rng::new(name.bytes().map(u64::from).sum());
    (0..dims.iter().product()).map(|_| rng.normal()).collect()
}

/// An input of normal numbers.
pub(crate) fn random(name: &str, dims: &[usize]) -> Result<(String, Value)> {
    Ok((name.to_owned(), Tensor::new(dims.to_vec(), normals(name, dims))?.into()))
}

/// Gates of `tokens` tokens, shape (batch, tokens / batch, heads): each uses its own random `used` heads.
pub(crate) fn gates(batch: usize, tokens: usize, heads: usize, used: usize) -> Result<(String, Value)> {
    let rng = &mut Rng::new(1);
    let mut gates = vec![0f32; batch * tokens * heads];
    for row in gates.chunks_mut(heads) {
        let mut order: Vec<(f32, usize)> = (0..heads).map(|head| (rng.normal(), head)).collect();
        order.sort_by(|a, b| a.0.total_cmp(&b.0));
        order[..used].iter().for_each(|&(_, head)| row[head] = 0.5);
    }
    Ok(("gates".to_owned(), Tensor::new(vec![batch, tokens, heads], gates)?.into()))
}
