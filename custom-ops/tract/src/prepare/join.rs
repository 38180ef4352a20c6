//! DequantizeLinear and its readers.

use super::reads;
use std::collections::HashMap;
use tract_onnx::pb::attribute_proto::AttributeType;
use tract_onnx::pb::{AttributeProto, GraphProto, NodeProto};
use tract_onnx::tract_hir::internal::*;

/// DequantizeLinear and the product that reads it, as one operator; no name of an ONNX operator has a `+`.
pub(crate) const PRODUCT: &str = "DequantizeLinear+MatMul";
/// DequantizeLinear and the Gather that reads it.
pub(crate) const ROWS: &str = "DequantizeLinear+Gather";

/// A DequantizeLinear in blocks, perhaps transposed.
#[derive(Clone)]
struct Source {
    node: String,
    /// Values, scales, zero points or none.
    inputs: [String; 3],
    axis: i64,
    block: i64,
}

fn integer(node: &NodeProto, name: &str, default: i64) -> i64 {
    node.attribute.iter().find(|attribute| attribute.name == name).map_or(default, |attribute| attribute.i)
}

fn float(node: &NodeProto, name: &str) -> f32 {
    node.attribute.iter().find(|attribute| attribute.name == name).map_or(1.0, |attribute| attribute.f)
}

/// Joins every DequantizeLinear in blocks to its readers.
pub(super) fn join(graph: &mut GraphProto) -> TractResult<()> {
    let ranks: HashMap<&str, usize> =
        graph.initializer.iter().map(|tensor| (tensor.name.as_str(), tensor.dims.len())).collect();
    let mut sources: HashMap<String, Source> = HashMap::new();
    for node in graph.node.iter().filter(|node| node.op_type == "DequantizeLinear") {
        let input = |i: usize| node.input.get(i).cloned().unwrap_or_default();
        let block = integer(node, "block_size", 0);
        let constant = ranks.get(input(0).as_str()) == Some(&2) && ranks.contains_key(input(1).as_str());
        let (true, Some(output), true) = (block != 0, node.output.first(), constant) else { continue };
        let axis = integer(node, "axis", 1);
        let axis = if axis < 0 { axis + 2 } else { axis };
        let source = Source { node: node.name.clone(), inputs: [input(0), input(1), input(2)], axis, block };
        sources.insert(output.clone(), source);
    }
    let mut transposed = HashMap::new();
    for node in graph.node.iter().filter(|node| node.op_type == "Transpose") {
        let perm = node.attribute.iter().find(|attribute| attribute.name == "perm");
        let swaps = perm.is_none_or(|perm| perm.ints == [1, 0]);
        if let (Some(source), true) = (node.input.first().and_then(|input| sources.get(input)), swaps) {
            transposed.extend(node.output.first().map(|output| (output.clone(), source.clone())));
        }
    }
    if sources.is_empty() {
        return Ok(());
    }
    let nodes = std::mem::take(&mut graph.node);
    for node in nodes {
        join_node(graph, node, &sources, &transposed)?;
    }
    let dequantized = |name: &str| sources.get(name).or(transposed.get(name));
    graph.node.retain(|node| !node.output.iter().any(|output| dequantized(output).is_some()));
    if let Some(source) = reads(graph).find_map(dequantized) {
        bail!(
            "{}: expected a product that sums along axis {} to read it, or a Gather, and nothing else",
            source.node,
            source.axis
        );
    }
    Ok(())
}

/// Adds a node to the graph, joined to the DequantizeLinear that it reads if it reads one in a way that a kernel computes.
fn join_node(
    graph: &mut GraphProto,
    mut node: NodeProto,
    sources: &HashMap<String, Source>,
    transposed: &HashMap<String, Source>,
) -> TractResult<()> {
    let input = |i: usize| node.input.get(i).map(String::as_str).unwrap_or_default();
    let source = |i: usize, axis: i64| sources.get(input(i)).filter(|source| source.axis == axis);
    let turned = |i: usize, axis: i64| transposed.get(input(i)).filter(|source| source.axis == axis);
    // The summed axis is the first one of a MatMul's matrix.
    let (source, bias) = match node.op_type.as_str() {
        "MatMul" => (source(1, 0).or(turned(1, 1)), None),
        "Gemm" => {
            let swapped = integer(&node, "transB", 0) != 0;
            let plain = integer(&node, "transA", 0) == 0 && float(&node, "alpha") == 1.0 && float(&node, "beta") == 1.0;
            let source = if swapped { source(1, 1).or(turned(1, 0)) } else { source(1, 0).or(turned(1, 1)) };
            (source.filter(|_| plain), Some(input(2).to_owned()).filter(|bias| !bias.is_empty()))
        }
        "Gather" if integer(&node, "axis", 0) == 0 => (source(0, 1), None),
        _ => (None, None),
    };
    let Some(Source { inputs: [values, scales, zeros], axis, block, .. }) = source.cloned() else {
        graph.node.push(node);
        return Ok(());
    };
    let gathers = node.op_type == "Gather";
    let x = input(usize::from(gathers)).to_owned();
    node.op_type = if gathers { ROWS } else { PRODUCT }.to_owned();
    node.attribute = [("axis", axis), ("block_size", block)].map(|(name, i)| number(name, i)).into();
    let is_row = |name: &String| {
        let constant = graph.initializer.iter().find(|tensor| tensor.name == *name);
        constant.is_some_and(|tensor| {
            let mut dims = tensor.dims.iter().rev();
            dims.next().is_some_and(|&width| width != 1) && dims.all(|&d| d == 1)
        })
    };
    let held = bias.clone().filter(is_row);
    let added = bias.filter(|_| held.is_none());
    node.input = vec![x, values, scales, zeros, held.unwrap_or_default()];
    let sum = added.map(|added| {
        let product = format!("{}.product", node.name);
        let output = std::mem::replace(&mut node.output, vec![product.clone()]);
        let name = format!("{}.sum", node.name);
        NodeProto { name, op_type: "Add".to_owned(), input: vec![product, added], output, ..NodeProto::default() }
    });
    graph.node.push(node);
    graph.node.extend(sum);
    Ok(())
}

fn number(name: &str, i: i64) -> AttributeProto {
    AttributeProto { name: name.to_owned(), r#type: AttributeType::Int as i32, i, ..AttributeProto::default() }
}
