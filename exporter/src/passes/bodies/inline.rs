//! Writes a node of an `ai.moh` operator as the standard operators of its body.

use crate::call::Call;
use crate::error::Error;
use crate::graph::{Attribute, Node};
use moh_operators::{BodyValue, Variant};

/// Appends the body's nodes, with the node's values and attributes in the place of the formal ones.
pub(super) fn expand(node: &Node, call: &Call, nodes: &mut Vec<Node>) -> Result<(), Error> {
    let body = call.operator().body(Variant { portable: true, ..call.variant()? });
    let inner = |name: &str| match body.inputs.iter().position(|input| *input == name) {
        Some(i) => node.inputs[i].clone(),
        None if name == body.operator.output.name => node.outputs[0].clone(),
        None => format!("{}/{name}", node.name),
    };
    let value = |value: &BodyValue| match value {
        BodyValue::Int(v) => Some(Attribute::Int(*v)),
        BodyValue::Float(v) => Some(Attribute::Float(*v)),
        BodyValue::Ints(v) => Some(Attribute::Ints(v.clone())),
        BodyValue::Attribute(name) => node.attributes.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone()),
    };
    nodes.extend(body.nodes.iter().map(|part| Node {
        op_type: part.op_type,
        domain: "",
        name: format!("{}/{}", node.name, part.output),
        inputs: part.inputs.iter().map(|name| inner(name)).collect(),
        outputs: part.outputs().iter().map(|name| inner(name)).collect(),
        attributes: part.attributes.iter().filter_map(|(name, v)| value(v).map(|v| (*name, v))).collect(),
    }));
    Ok(())
}
