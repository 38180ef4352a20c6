//! Constants that belong to their nodes.

use super::join::{PRODUCT, ROWS};
use super::reads;
use moh_operators::DOMAIN;
use std::collections::HashMap;
use tract_onnx::pb::attribute_proto::AttributeType;
use tract_onnx::pb::tensor_proto::DataType;
use tract_onnx::pb::{AttributeProto, GraphProto, NodeProto, TensorProto};

/// MatMul by a matrix that it holds.
pub(crate) const CONSTANT_PRODUCT: &str = "MatMul+constant";

/// The constant that the node holds as its input `input`.
pub(crate) fn held(node: &NodeProto, input: usize) -> Option<&TensorProto> {
    let name = attribute(input);
    node.attribute.iter().find(|attribute| attribute.name == name)?.t.as_ref()
}

fn attribute(input: usize) -> String {
    format!("input {input}")
}

/// Which inputs of a node it may hold: those from a number on but one.
fn inputs(node: &NodeProto) -> (usize, Option<usize>) {
    match (node.op_type.as_str(), node.domain.as_str()) {
        // An order of the values stays where it is, to be refused.
        ("MatMulNBits", "com.microsoft") => (1, Some(4)),
        ("GatherBlockQuantized", "com.microsoft") => (0, Some(1)),
        (PRODUCT | ROWS, _) | ("MatMul", "" | "ai.onnx") | (_, DOMAIN) => (1, None),
        _ => (usize::MAX, None),
    }
}

/// Whether the node may hold this initializer, which so many inputs read.
fn may_hold(node: &NodeProto, tensor: &TensorProto, uses: usize) -> bool {
    let ty = DataType::try_from(tensor.data_type);
    let float = matches!(ty, Ok(DataType::Float | DataType::Float16));
    match (node.op_type.as_str(), node.domain.as_str()) {
        // The same tensor for several nodes is packed once where tract keeps it.
        (_, DOMAIN) => (float && uses == 1) || ty == Ok(DataType::Uint8),
        ("MatMul", _) => float && uses == 1 && tensor.dims.len() == 2 && tensor.dims.iter().all(|&dim| dim > 0),
        _ => true,
    }
}

/// Moves initializers to the nodes that read them; those that nothing else reads leave the graph.
pub(super) fn hold(graph: &mut GraphProto) {
    let mut uses: HashMap<String, usize> = HashMap::new();
    for name in reads(graph).chain(graph.input.iter().map(|input| input.name.as_str())) {
        *uses.entry(name.to_owned()).or_default() += 1;
    }
    let initializers = std::mem::take(&mut graph.initializer);
    let order: Vec<String> = initializers.iter().map(|tensor| tensor.name.clone()).collect();
    let mut tensors: HashMap<String, TensorProto> =
        initializers.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
    for node in &mut graph.node {
        let (first, skipped) = inputs(node);
        // tract computes what depends on no input when it loads the model.
        let constant = node.input.first().is_some_and(|x| tensors.contains_key(x));
        if constant && node.op_type != "GatherBlockQuantized" {
            continue;
        }
        for i in (first..node.input.len()).filter(|&i| Some(i) != skipped) {
            let name = node.input[i].clone();
            let (Some(left), Some(tensor)) = (uses.get_mut(&name), tensors.get(&name)) else { continue };
            if !may_hold(node, tensor, *left) {
                continue;
            }
            *left -= 1;
            let tensor = if *left == 0 { tensors.remove(&name) } else { Some(tensor.clone()) };
            node.input[i].clear();
            let r#type = AttributeType::Tensor as i32;
            node.attribute.push(AttributeProto { name: attribute(i), r#type, t: tensor, ..AttributeProto::default() });
            if node.op_type == "MatMul" {
                node.op_type = CONSTANT_PRODUCT.to_owned();
            }
        }
    }
    graph.initializer = order.iter().filter_map(|name| tensors.remove(name)).collect();
}
