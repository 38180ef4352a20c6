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
    let attribute = |(name, value): &(&'static str, BodyValue)| match value {
        BodyValue::Int(v) => Some((*name, Attribute::Int(*v))),
        BodyValue::Scalar(v) => Some((*name, Attribute::Constant(*v))),
        BodyValue::Ints(v) => Some((*name, Attribute::Ints(v.clone()))),
        BodyValue::Text(v) => Some((*name, Attribute::String(v))),
        BodyValue::Attribute(formal) => match node.attributes.iter().find(|(n, _)| n == formal)?.1.clone() {
            // As every other float of a body.
            Attribute::Float(v) if *name == "value_float" => Some(("value", Attribute::Constant(v))),
            actual => Some((*name, actual)),
        },
    };
    nodes.extend(body.nodes.iter().map(|part| Node {
        op_type: part.op_type,
        domain: "",
        name: format!("{}/{}", node.name, part.output),
        inputs: part.inputs.iter().map(|name| inner(name)).collect(),
        outputs: part.outputs().iter().map(|name| inner(name)).collect(),
        attributes: part.attributes.iter().filter_map(attribute).collect(),
    }));
    Ok(())
}
