//! Adds the bodies of the `ai.moh` operators that the nodes use: one body an operator, for nodes of one kind. Those of another kind are
//! written as standard operators.

use super::inline;
use crate::graph::{Attribute, ElementType, Graph, Initializer, Node, Source};
use moh_kernels::function::Variant;
use moh_kernels::schema::{DOMAIN, OPERATORS};
use std::collections::BTreeMap;

/// Name of the zero that stands in for an optional input where some nodes have it and some do not.
const ZERO: &str = "ai.moh/zero";

pub(super) fn run(graph: &mut Graph) {
    let mut kinds: BTreeMap<&str, Option<i64>> = BTreeMap::new();
    inline::run(graph, |node| {
        let kind = node.attributes.iter().find_map(kind);
        *kinds.entry(node.op_type).or_insert(kind) != kind
    });
    for operator in OPERATORS {
        let at: Vec<usize> = (0..graph.nodes.len()).filter(|&i| is(&graph.nodes[i], operator.name)).collect();
        let variants: Vec<Variant> = at.iter().map(|&i| variant_of(graph, &graph.nodes[i])).collect();
        let Some(&first) = variants.first() else { continue };
        let variant = variants.iter().fold(first, |a, b| Variant {
            per_head: a.per_head,
            kind: a.kind,
            optional_inputs: a.optional_inputs || b.optional_inputs,
            causal: a.causal || b.causal,
            portable: false,
        });
        for (&i, own) in at.iter().zip(&variants) {
            if variant.optional_inputs && !own.optional_inputs {
                add_zero(graph, i);
            }
        }
        graph.functions.push((operator.body)(variant));
    }
}

fn is(node: &Node, operator: &str) -> bool {
    node.domain == DOMAIN && node.op_type == operator
}

/// What the node's inputs and attributes ask of a body.
pub(super) fn variant_of(graph: &Graph, node: &Node) -> Variant {
    let rank = |i: usize| node.inputs.get(i).and_then(|name| graph.value(name)).map_or(0, |v| v.dims.len());
    let operator = OPERATORS.iter().find(|operator| is(node, operator.name));
    Variant {
        per_head: operator.is_some_and(|operator| rank(1) == operator.per_head_rank),
        optional_inputs: operator.is_some_and(|operator| node.inputs.len() == operator.inputs.len()),
        causal: node.attributes.contains(&("is_causal", Attribute::Int(1))),
        kind: node.attributes.iter().find_map(kind).unwrap_or(0),
        portable: false,
    }
}

fn kind((name, value): &(&'static str, Attribute)) -> Option<i64> {
    match value {
        Attribute::Int(value) if ["activation", "kind"].contains(name) => Some(*value),
        _ => None,
    }
}

/// Gives node `i` a zero of shape (1, 1, 1, 1) as its optional input.
fn add_zero(graph: &mut Graph, i: usize) {
    let ty = graph.nodes[i].inputs.first().and_then(|name| graph.value(name)).map_or(ElementType::F32, |v| v.ty);
    let name = format!("{ZERO}.{ty}");
    if !graph.initializers.iter().any(|init| init.name == name) {
        let source = Source::Bytes(vec![0; ty.size()]);
        graph.initializers.push(Initializer { name: name.clone(), ty, dims: vec![1; 4], source });
    }
    graph.nodes[i].inputs.push(name);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Dim, Value};

    fn graph(biased: [bool; 2]) -> Graph {
        let value = |name: &str| Value { name: name.to_owned(), ty: ElementType::F32, dims: vec![Dim::Unknown; 3] };
        let names = ["query", "key", "value", "gates", "bias"];
        let node = |i: usize| Node {
            op_type: "RoutedAttention",
            domain: DOMAIN,
            name: format!("n{i}"),
            inputs: names[..if biased[i] { 5 } else { 4 }].iter().map(|&n| n.to_owned()).collect(),
            outputs: vec![format!("n{i}")],
            attributes: vec![("is_causal", Attribute::Int(i as i64))],
        };
        Graph {
            name: String::new(),
            opset: 21,
            ir_version: 10,
            inputs: names.map(value).to_vec(),
            outputs: vec![value("n0"), value("n1")],
            initializers: vec![],
            nodes: vec![node(0), node(1)],
            values: BTreeMap::new(),
            functions: vec![],
            metadata: BTreeMap::new(),
        }
    }

    #[test]
    fn one_body_serves_nodes_with_and_without_a_bias() {
        let mut mixed = graph([true, false]);
        run(&mut mixed);
        assert_eq!(mixed.functions.len(), 1);
        assert_eq!(mixed.functions[0].inputs.len(), 5);
        assert_eq!(mixed.nodes[1].inputs[4], "ai.moh/zero.f32");
        assert_eq!(mixed.initializers[0].dims, [1, 1, 1, 1]);
        assert!(mixed.functions[0].nodes.iter().any(|node| node.output == "allowed"), "a node is causal");

        let mut plain = graph([false, false]);
        run(&mut plain);
        assert_eq!(plain.functions[0].inputs.len(), 4);
        assert!(plain.initializers.is_empty());
    }

    #[test]
    fn nodes_of_another_kind_become_standard_operators() {
        let mut mixed = graph([false, false]);
        for (node, kind) in mixed.nodes.iter_mut().zip([0, 3]) {
            node.op_type = "TopKRouter";
            node.inputs.truncate(1);
            let shared_heads = ("shared_heads", Attribute::Ints(vec![0]));
            let counts = [("kind", kind), ("num_heads", 4), ("top_k", 2)].map(|(name, v)| (name, Attribute::Int(v)));
            node.attributes = counts.into_iter().chain([shared_heads]).collect();
        }
        run(&mut mixed);
        assert_eq!(mixed.functions.len(), 1);
        assert_eq!(mixed.nodes.iter().filter(|node| node.op_type == "TopKRouter").count(), 1);
        let outputs = |op_type: &str| mixed.nodes.iter().find(|node| node.op_type == op_type).map(|n| &n.outputs[..]);
        assert_eq!(outputs("TopK"), Some(&["n1/selected".to_owned(), "n1/selected_indices".to_owned()][..]));
        assert_eq!(mixed.nodes.last().map(|node| &node.outputs[0][..]), Some("n1"));
    }
}
