//! What becomes of the routers' gates, which are recorded as outputs.

use super::Pass;
use crate::error::Error;
use crate::graph::{Graph, Node, Value};
use clap::ArgAction;
use clap::builder::{BoolValueParser, TypedValueParser};
use moh_operators::GATES;
use std::collections::BTreeMap;

/// Where an exported model shows its gates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Gates {
    /// Nowhere.
    #[default]
    Hidden,
    /// In outputs `gates.<module path>`, (batch, q_len, num_heads) in float32.
    Output,
    /// In inputs of those names, and no router is left: for comparing models of other precision.
    Input,
}

/// The pass.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct ShowGates {
    /// Add every layer's head gates as outputs, `gates.<module>`.
    #[arg(long = "output-gates", action = ArgAction::SetTrue, value_parser = BoolValueParser::new().map(asked_for))]
    pub gates: Gates,
}

/// On the command line gates are outputs or hidden.
fn asked_for(output: bool) -> Gates {
    if output { Gates::Output } else { Gates::Hidden }
}

impl Pass for ShowGates {
    fn run(&self, graph: &mut Graph) -> Result<(), Error> {
        if self.gates == Gates::Output {
            return Ok(());
        }
        let (shown, outputs): (Vec<Value>, Vec<Value>) =
            std::mem::take(&mut graph.outputs).into_iter().partition(|output| output.name.starts_with(GATES));
        graph.outputs = outputs;
        if self.gates == Gates::Input {
            let is_shown = |name: &String| shown.iter().any(|value| value.name == *name);
            let (copies, rest): (Vec<Node>, Vec<Node>) =
                std::mem::take(&mut graph.nodes).into_iter().partition(|node| node.outputs.iter().any(is_shown));
            graph.nodes = rest;
            let replaced: BTreeMap<&String, &String> =
                copies.iter().map(|node| (&node.inputs[0], &node.outputs[0])).collect();
            for name in graph.nodes.iter_mut().flat_map(|node| &mut node.inputs) {
                if let Some(input) = replaced.get(name) {
                    *name = (*input).clone();
                }
            }
            graph.inputs.extend(shown);
        }
        Ok(())
    }
}
