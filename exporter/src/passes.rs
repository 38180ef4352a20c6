//! What happens to a recorded graph before it is encoded. A pass is one file and one line.

mod attention_type;
mod bodies;
mod fold;
mod gates;
mod gemm;
mod inline;
mod prune;

pub use gates::Gates;

use crate::graph::Graph;

pub use attention_type::{AttentionType, set_attention_type};

/// How the routed operators are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum AttentionStyle {
    /// As `ai.moh` nodes, with their bodies as functions of the model.
    Routed,
    /// As standard ONNX operators, for tools that know no functions; nothing is skipped then.
    Portable,
}

/// Runs every pass.
pub fn run(graph: &mut Graph, gates: Gates, style: AttentionStyle) {
    gates::run(graph, gates);
    match style {
        AttentionStyle::Routed => bodies::run(graph),
        AttentionStyle::Portable => inline::run(graph, |_| true),
    }
    gemm::run(graph);
    fold::run(graph);
    prune::run(graph);
}
