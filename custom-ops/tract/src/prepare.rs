//! Brings a model into a form that tract can parse, and need not copy.

pub(crate) mod hold;
pub(crate) mod join;

use tract_onnx::pb::{GraphProto, ModelProto};
use tract_onnx::tract_hir::internal::*;

/// Prepares a model for tract, before tract parses it.
///
/// - A DequantizeLinear in blocks is joined to the products that read it: tract knows no 4-bit tensors.
/// - Our operators, and products, hold their constant inputs as attributes. What other files keep of those is mapped, where tract would
///   copy it.
///
/// # Errors
/// A blocked DequantizeLinear that something other than a product or a Gather reads.
pub fn prepare(model: &mut ModelProto) -> TractResult<()> {
    let Some(graph) = &mut model.graph else { return Ok(()) };
    join::join(graph)?;
    hold::hold(graph);
    Ok(())
}

/// Names that nodes of the graph, and of the graphs in its nodes, read.
pub(super) fn reads(graph: &GraphProto) -> Box<dyn Iterator<Item = &str> + '_> {
    let inner = graph.node.iter().flat_map(|node| &node.attribute);
    let inner = inner.flat_map(|attribute| attribute.g.iter().chain(&attribute.graphs)).flat_map(reads);
    let inputs = graph.node.iter().flat_map(|node| &node.input).map(String::as_str);
    Box::new(inputs.chain(inner).chain(graph.output.iter().map(|output| output.name.as_str())))
}
