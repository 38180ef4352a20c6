//! What becomes of the routers' gates, which are recorded as outputs.

use crate::graph::{Graph, Value};
use crate::record::GATES;
use std::collections::BTreeMap;

/// Where an exported model shows its gates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gates {
    /// Nowhere.
    Hidden,
    /// In outputs `gates.<module path>`, (batch, q_len, num_heads) in float32.
    Output,
    /// They are inputs of those names instead, and no router is left: for comparing models of other precision.
    Input,
}

pub(super) fn run(graph: &mut Graph, gates: Gates) {
    if gates == Gates::Output {
        return;
    }
    let (shown, outputs): (Vec<Value>, Vec<Value>) =
        std::mem::take(&mut graph.outputs).into_iter().partition(|output| output.name.starts_with(GATES));
    graph.outputs = outputs;
    if gates == Gates::Hidden {
        return;
    }
    let is_shown = |name: &String| shown.iter().any(|value| value.name == *name);
    let (copies, rest) =
        std::mem::take(&mut graph.nodes).into_iter().partition(|node| node.outputs.iter().any(is_shown));
    graph.nodes = rest;
    let copies: Vec<crate::graph::Node> = copies;
    let replaced: BTreeMap<&String, &String> = copies.iter().map(|node| (&node.inputs[0], &node.outputs[0])).collect();
    for name in graph.nodes.iter_mut().flat_map(|node| &mut node.inputs) {
        if let Some(input) = replaced.get(name) {
            *name = (*input).clone();
        }
    }
    graph.inputs.extend(shown);
}
