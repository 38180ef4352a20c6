//! Which weights decide the heads of a model that routes by query norms: it has no router whose weights could stay as they are.
//!
//! The norms of some tokens' queries lie close to one another. Rounded query projections and embeddings then choose other heads for one
//! token in a hundred; the errors of all other layers together, for one in five hundred.

use super::candidates::{Candidate, Kind};
use crate::graph::{Attribute, Graph, Node, Source};
use moh_operators::{DOMAIN, Definition, TopKRouter, top_k_router};
use std::collections::{BTreeMap, BTreeSet};

/// The query projections that routers read, and the embedding where it is not the output head too; by the weights' names.
pub(super) fn deciding(graph: &Graph, candidates: &[Candidate]) -> BTreeSet<String> {
    let routers: Vec<&Node> = graph.nodes.iter().filter(|node| reads_queries(node)).collect();
    if routers.is_empty() {
        return BTreeSet::new();
    }
    let weights = graph.initializers.iter().filter_map(|init| match &init.source {
        Source::Weight { weight, .. } => Some((init.name.as_str(), weight.name())),
        _ => None,
    });
    let weights: BTreeMap<&str, &str> = weights.collect();
    let producers = graph.nodes.iter().flat_map(|node| node.outputs.iter().map(move |output| (output.as_str(), node)));
    let producers: BTreeMap<&str, &Node> = producers.collect();
    let factor = |node: &Node| weights.get(node.inputs.get(1)?.as_str()).copied();
    let product = |router: &Node| {
        // Biases and reshapes stand between the product and the router.
        let mut node = producers.get(router.inputs.first()?.as_str())?;
        while node.op_type != "MatMul" {
            node = producers.get(node.inputs.first()?.as_str())?;
        }
        factor(node)
    };
    let queries: BTreeSet<&str> = routers.into_iter().filter_map(product).collect();
    let dense: BTreeSet<&str> = graph.nodes.iter().filter(|node| node.op_type == "MatMul").filter_map(factor).collect();
    let decides = |candidate: &&Candidate| {
        let name = candidate.weight.name();
        queries.contains(name) || candidate.kind == Kind::Embedding && !dense.contains(name)
    };
    candidates.iter().filter(decides).map(|candidate| candidate.weight.name().to_owned()).collect()
}

fn reads_queries(node: &Node) -> bool {
    let kind = Attribute::Int(top_k_router::Kind::QueryNorms as i64);
    node.domain == DOMAIN
        && node.op_type == TopKRouter::NAME
        && node.attributes.iter().any(|(name, value)| *name == "kind" && *value == kind)
}
