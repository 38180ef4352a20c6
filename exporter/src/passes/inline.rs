//! Puts the bodies of the `ai.moh` operators in the place of their nodes.

use super::bodies::variant_of;
use crate::graph::{Attribute, Graph, Node};
use moh_kernels::function::{Body, BodyValue, Variant};
use moh_kernels::schema::{DOMAIN, operator};

/// Those of the nodes for which `chosen` says so.
pub(super) fn run(graph: &mut Graph, mut chosen: impl FnMut(&Node) -> bool) {
    for node in std::mem::take(&mut graph.nodes) {
        match operator(node.op_type).filter(|_| node.domain == DOMAIN && chosen(&node)) {
            Some(operator) => {
                let body = (operator.body)(Variant { portable: true, ..variant_of(graph, &node) });
                expand(&node, &body, &mut graph.nodes);
            }
            None => graph.nodes.push(node),
        }
    }
}

/// Appends the body's nodes, with the node's values and attributes in the place of the formal ones.
fn expand(node: &Node, body: &Body, nodes: &mut Vec<Node>) {
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
}
