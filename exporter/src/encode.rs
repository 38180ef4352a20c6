//! The graph as an ONNX `ModelProto`.

use crate::error::Error;
use crate::graph::{Attribute, Dim, ElementType, Graph, Initializer, Node, Value};
use crate::proto::{self, attribute_proto::AttributeType};
use crate::quantize::MICROSOFT;
use crate::weights::{Plan, Start, bytes_of};
use moh_operators::{AttributeKind, Body, BodyNode, BodyValue, DOMAIN, VERSION, operator};
use prost::Message;
use std::collections::BTreeMap;

/// The bytes of a model file for `graph`, whose large tensors lie as planned in the file named `data_name` beside it, or in linked files.
///
/// # Errors
/// A large tensor that the plan does not have.
pub fn encode(graph: &Graph, plan: &Plan, data_name: &str) -> Result<Vec<u8>, Error> {
    let starts: BTreeMap<&str, Start> = plan.iter().collect();
    let inline = |init: &Initializer| Ok(proto::TensorProto { raw_data: Some(bytes_of(init)?), ..tensor(init) });
    let file = |start: Start| start.link.map_or(data_name, |link| &plan.links[link].link.file);
    let links = plan.links.iter().map(|linked| linked.link.entry());
    let metadata = graph.metadata.clone().into_iter().chain(links);
    let initializers = graph.initializers.iter().map(|init| match starts.get(init.name.as_str()) {
        Some(&start) => Ok(external(init, file(start), start.offset)),
        None if plan.holds_inline(init) => inline(init),
        None => Err(moh_models::Error::Internal("a tensor without a place in the weight file").into()),
    });
    let model = proto::ModelProto {
        ir_version: Some(graph.ir_version),
        opset_import: opsets(graph),
        producer_name: Some("moh-export".to_owned()),
        producer_version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        graph: Some(proto::GraphProto {
            name: Some(graph.name.clone()),
            node: graph.nodes.iter().map(node).collect(),
            initializer: initializers.collect::<Result<_, Error>>()?,
            input: graph.inputs.iter().map(value_info).collect(),
            output: graph.outputs.iter().map(value_info).collect(),
            value_info: inner_values(graph),
            ..Default::default()
        }),
        metadata_props: metadata.map(|(key, value)| entry(&key, &value)).collect(),
        functions: graph.functions.iter().map(|body| function(body, graph.opset)).collect(),
        ..Default::default()
    };
    Ok(model.encode_to_vec())
}

fn entry(key: &str, value: &str) -> proto::StringStringEntryProto {
    proto::StringStringEntryProto { key: Some(key.to_owned()), value: Some(value.to_owned()) }
}

fn opset(domain: &str, version: i64) -> proto::OperatorSetIdProto {
    proto::OperatorSetIdProto { domain: Some(domain.to_owned()), version: Some(version) }
}

fn opsets(graph: &Graph) -> Vec<proto::OperatorSetIdProto> {
    let ours = graph.nodes.iter().filter(|node| node.domain == DOMAIN);
    // The oldest version that has them all, for the sake of older libraries.
    let since = ours.map(|node| operator(node.op_type).map_or(VERSION, |operator| operator.since)).max();
    let ours = since.map(|since| opset(DOMAIN, since));
    let microsoft = graph.nodes.iter().any(|node| node.domain == MICROSOFT).then(|| opset(MICROSOFT, 1));
    [opset("", graph.opset)].into_iter().chain(ours).chain(microsoft).collect()
}

fn tensor(init: &Initializer) -> proto::TensorProto {
    proto::TensorProto {
        name: Some(init.name.clone()),
        data_type: Some(init.ty.onnx()),
        dims: init.dims.iter().map(|&d| d as i64).collect(),
        ..Default::default()
    }
}

fn external(init: &Initializer, data_name: &str, offset: u64) -> proto::TensorProto {
    proto::TensorProto {
        data_location: Some(proto::tensor_proto::DataLocation::External as i32),
        external_data: vec![
            entry("location", data_name),
            entry("offset", &offset.to_string()),
            entry("length", &init.bytes().to_string()),
        ],
        ..tensor(init)
    }
}

/// What is known of the values between inputs and outputs. Runtimes infer most of it, but lose the batch at a Reshape to -1;
/// onnxruntime then plans no two buffers in one place, and compares every value with all those before: seconds for a large model.
fn inner_values(graph: &Graph) -> Vec<proto::ValueInfoProto> {
    let is_output = |name: &String| graph.outputs.iter().any(|output| output.name == *name);
    let names = graph.nodes.iter().flat_map(|node| &node.outputs).filter(|name| !is_output(name));
    names.filter_map(|name| graph.values.get(name)).map(value_info).collect()
}

fn value_info(value: &Value) -> proto::ValueInfoProto {
    use proto::tensor_shape_proto::{Dimension, dimension};
    let dim = |dim: &Dim| Dimension {
        value: match dim {
            Dim::Fixed(n) => Some(dimension::Value::DimValue(*n as i64)),
            Dim::Named(name) => Some(dimension::Value::DimParam(name.clone())),
            Dim::Unknown => None,
        },
        ..Default::default()
    };
    let tensor = proto::type_proto::Tensor {
        elem_type: Some(value.ty.onnx()),
        shape: Some(proto::TensorShapeProto { dim: value.dims.iter().map(dim).collect() }),
    };
    proto::ValueInfoProto {
        name: Some(value.name.clone()),
        r#type: Some(proto::TypeProto {
            value: Some(proto::type_proto::Value::TensorType(tensor)),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn node(node: &Node) -> proto::NodeProto {
    proto::NodeProto {
        name: Some(node.name.clone()),
        op_type: Some(node.op_type.to_owned()),
        domain: Some(node.domain.to_owned()),
        input: node.inputs.clone(),
        output: node.outputs.clone(),
        attribute: node.attributes.iter().map(|(name, value)| attribute(name, value)).collect(),
        ..Default::default()
    }
}

fn typed(name: &str, ty: AttributeType) -> proto::AttributeProto {
    proto::AttributeProto { name: Some(name.to_owned()), r#type: Some(ty as i32), ..Default::default() }
}

fn int(name: &str, v: i64) -> proto::AttributeProto {
    proto::AttributeProto { i: Some(v), ..typed(name, AttributeType::Int) }
}

fn float(name: &str, v: f32) -> proto::AttributeProto {
    proto::AttributeProto { f: Some(v), ..typed(name, AttributeType::Float) }
}

fn ints(name: &str, v: &[i64]) -> proto::AttributeProto {
    proto::AttributeProto { ints: v.to_vec(), ..typed(name, AttributeType::Ints) }
}

fn string(name: &str, v: &str) -> proto::AttributeProto {
    proto::AttributeProto { s: Some(v.as_bytes().to_vec()), ..typed(name, AttributeType::String) }
}

fn attribute(name: &str, value: &Attribute) -> proto::AttributeProto {
    match value {
        Attribute::Int(v) => int(name, *v),
        Attribute::Float(v) => float(name, *v),
        Attribute::Ints(v) => ints(name, v),
        Attribute::String(v) => string(name, v),
        Attribute::Scalar(ty, v) => number(name, *ty, vec![1], *v),
        Attribute::Constant(v) => number(name, ElementType::F32, Vec::new(), *v),
    }
}

/// A tensor of one element.
fn number(name: &str, ty: ElementType, dims: Vec<i64>, v: f32) -> proto::AttributeProto {
    let raw_data = Some(ty.bytes_of(v));
    let t = proto::TensorProto { data_type: Some(ty.onnx()), dims, raw_data, ..Default::default() };
    proto::AttributeProto { t: Some(t), ..typed(name, AttributeType::Tensor) }
}

fn function(body: &Body, version: i64) -> proto::FunctionProto {
    proto::FunctionProto {
        name: Some(body.operator.name.to_owned()),
        domain: Some(DOMAIN.to_owned()),
        doc_string: Some(body.operator.doc.to_owned()),
        input: body.inputs.iter().map(|&name| name.to_owned()).collect(),
        output: vec![body.operator.output.name.to_owned()],
        attribute: body.operator.attributes.iter().map(|def| def.name.to_owned()).collect(),
        node: body.nodes.iter().map(|part| body_node(body, part)).collect(),
        opset_import: vec![opset("", version)],
        ..Default::default()
    }
}

fn body_node(body: &Body, part: &BodyNode) -> proto::NodeProto {
    let kind = |name: &str| body.operator.attributes.iter().find(|def| def.name == name).map(|def| def.kind);
    let attribute = |(name, value): &(&'static str, BodyValue)| match value {
        BodyValue::Int(v) => int(name, *v),
        BodyValue::Scalar(v) => number(name, ElementType::F32, Vec::new(), *v),
        BodyValue::Ints(v) => ints(name, v),
        BodyValue::Text(v) => string(name, v),
        BodyValue::Attribute(formal) => {
            let ty = match kind(formal) {
                Some(AttributeKind::Float) => AttributeType::Float,
                Some(AttributeKind::Ints) => AttributeType::Ints,
                _ => AttributeType::Int,
            };
            proto::AttributeProto { ref_attr_name: Some((*formal).to_owned()), ..typed(name, ty) }
        }
    };
    proto::NodeProto {
        name: Some(part.output.clone()),
        op_type: Some(part.op_type.to_owned()),
        input: part.inputs.clone(),
        output: part.outputs(),
        attribute: part.attributes.iter().map(attribute).collect(),
        ..Default::default()
    }
}
