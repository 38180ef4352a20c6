//! Brings a model into a form that tract can parse, and need not copy.

pub(crate) mod hold;
pub(crate) mod join;

use tract_onnx::pb::{GraphProto, ModelProto, TensorProto};
use tract_onnx::tract_hir::internal::*;

/// Prepares a model for tract, before tract parses it.
///
/// - The tensors of Constant nodes become initializers, to be treated alike.
/// - A DequantizeLinear in blocks is joined to the products that read it: tract knows no 4-bit tensors.
/// - Our operators, and products, hold their constant inputs as attributes. What other files keep of those is mapped, where tract would
///   copy it.
///
/// # Errors
/// A blocked DequantizeLinear that something other than a product or a Gather reads.
pub fn prepare(model: &mut ModelProto) -> TractResult<()> {
    let Some(graph) = &mut model.graph else { return Ok(()) };
    constants(graph);
    join::join(graph)?;
    hold::hold(graph);
    Ok(())
}

/// Makes initializers of the tensors of Constant nodes.
fn constants(graph: &mut GraphProto) {
    let GraphProto { node: nodes, initializer: initializers, .. } = graph;
    nodes.retain_mut(|node| {
        let is_constant = node.op_type == "Constant" && matches!(node.domain.as_str(), "" | "ai.onnx");
        let Some(name) = node.output.first().filter(|name| is_constant && !name.is_empty()) else { return true };
        let value = node.attribute.iter_mut().find(|attribute| attribute.name == "value");
        let Some(tensor) = value.and_then(|value| value.t.take()) else { return true };
        initializers.push(TensorProto { name: name.clone(), ..tensor });
        false
    });
}

/// Names that nodes of the graph, and of the graphs in its nodes, read.
pub(super) fn reads(graph: &GraphProto) -> Box<dyn Iterator<Item = &str> + '_> {
    let inner = graph.node.iter().flat_map(|node| &node.attribute);
    let inner = inner.flat_map(|attribute| attribute.g.iter().chain(&attribute.graphs)).flat_map(reads);
    let inputs = graph.node.iter().flat_map(|node| &node.input).map(String::as_str);
    Box::new(inputs.chain(inner).chain(graph.output.iter().map(|output| output.name.as_str())))
}
