//! Adds the bodies of the `ai.moh` operators that the nodes use: one body an operator. Nodes that it does not serve are written as
//! standard operators; or all nodes, for tools that know no functions.

mod inline;
#[cfg(test)]
mod tests;

use super::{DenseStyle, Options, Pass};
use crate::call::{Call, element_type};
use crate::error::Error;
use crate::graph::{Graph, Node};
use moh_operators::{DOMAIN, OPERATORS, Operator, Variant};
use std::collections::BTreeMap;

/// How the routed operators are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum AttentionStyle {
    /// As `ai.moh` nodes, with their bodies as functions of the model.
    #[default]
    Routed,
    /// As standard ONNX operators, for tools that know no functions; nothing is skipped then.
    Portable,
}

/// The pass.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct WriteBodies {
    /// How routed attention is written: as an operator with its body, or as standard operators only.
    #[arg(long, value_enum, default_value_t)]
    pub attention: AttentionStyle,
}

impl Pass for WriteBodies {
    fn check(&self, all: &Options) -> Result<(), Error> {
        let styles = [
            ("--dense-layers moh", all.dense.style),
            ("--norms moh", all.norms.style),
            ("--convolutions moh", all.convolutions.style),
        ];
        let ours = styles.into_iter().find(|(_, style)| *style == Some(DenseStyle::Moh));
        match ours {
            Some((option, _)) if self.attention == AttentionStyle::Portable => Err(Error::Portable { option }),
            _ => Ok(()),
        }
    }

    fn run(&self, graph: &mut Graph) -> Result<(), Error> {
        let served = match self.attention {
            AttentionStyle::Routed => common_variants(graph)?,
            AttentionStyle::Portable => BTreeMap::new(),
        };
        for mut node in std::mem::take(&mut graph.nodes) {
            let Some(call) = Call::of(graph, &node)? else {
                graph.nodes.push(node);
                continue;
            };
            match served.get(call.operator().name) {
                Some(&body)
                    if body.common(call.variant()?) == Some(body) && complete(graph, &mut node, &call, body) =>
                {
                    graph.nodes.push(node);
                }
                _ => inline::expand(&node, &call, &mut graph.nodes)?,
            }
        }
        let variant = |operator: &&Operator| served.get(operator.name).map(|&variant| operator.body(variant));
        graph.functions.extend(OPERATORS.iter().filter_map(variant));
        Ok(())
    }
}

/// For each operator the body that serves its first node, and as many of the others as possible.
fn common_variants(graph: &Graph) -> Result<BTreeMap<&'static str, Variant>, Error> {
    let mut common: BTreeMap<&str, Variant> = BTreeMap::new();
    for node in graph.nodes.iter().filter(|node| node.domain == DOMAIN) {
        let Some(call) = Call::of(graph, node)? else { continue };
        let own = call.variant()?;
        let body = common.entry(call.operator().name).or_insert(own);
        *body = body.common(own).unwrap_or(*body);
    }
    Ok(common)
}

/// Gives the node constants for the optional inputs that it lacks and the body takes; `false` where their shape is not known.
fn complete(graph: &mut Graph, node: &mut Node, call: &Call, body: Variant) -> bool {
    let operator = call.operator();
    let taken = operator.required_inputs() + body.optional_inputs;
    let mut constants = Vec::new();
    for (i, operand) in operator.inputs.iter().enumerate().take(taken).skip(node.inputs.len()) {
        let Some(dims) = call.zeros(i) else { return false };
        constants.push((element_type(operand.ty, call.ty), dims, call.filler(i)));
    }
    node.inputs.extend(constants.into_iter().map(|(ty, dims, number)| graph.constant(ty, dims, number)));
    true
}
