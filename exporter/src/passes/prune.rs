//! Removes nodes and constants whose values nothing reads: a router whose gates became
//! an input, a body's constant that its variant does not need; and bodies of operators without nodes.

use super::Pass;
use crate::error::Error;
use crate::graph::Graph;
use moh_operators::DOMAIN;
use std::collections::BTreeSet;

/// The pass.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct Prune {}

impl Pass for Prune {
    fn run(&self, graph: &mut Graph) -> Result<(), Error> {
        let mut used: BTreeSet<String> = graph.outputs.iter().map(|output| output.name.clone()).collect();
        let mut kept = Vec::with_capacity(graph.nodes.len());
        for node in std::mem::take(&mut graph.nodes).into_iter().rev() {
            if node.outputs.iter().any(|output| used.contains(output)) {
                used.extend(node.inputs.iter().cloned());
                kept.push(node);
            }
        }
        kept.reverse();
        graph.nodes = kept;
        let operators: BTreeSet<&str> = graph.nodes.iter().filter(|n| n.domain == DOMAIN).map(|n| n.op_type).collect();
        graph.functions.retain(|body| operators.contains(body.operator.name));
        graph.initializers.retain(|init| used.contains(&init.name));
        graph.values.retain(|name, _| used.contains(name));
        Ok(())
    }
}
