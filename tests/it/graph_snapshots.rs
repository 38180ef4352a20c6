//! The exported graphs as text: a change of what is written shows up as a change that a person reviews.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use moh::{golden, passes};
use moh_export::graph::Graph;
use moh_export::passes::Gates;
use moh_export::record::{self, Options};
use moh_export::{AttentionStyle, ElementType};
use moh_models::{Checkpoint, Model};

fn graph(case: &str, dtype: ElementType, gates: Gates, style: AttentionStyle) -> Graph {
    let model = Model::load(&Checkpoint::open(&golden(case), None).unwrap(), None).unwrap();
    let mut graph = record::record(&model, Options { dtype, opset: 21, ir_version: 10 }).unwrap();
    moh_export::passes::run(&mut graph, &passes(style, gates)).unwrap();
    graph
}

#[test]
fn dit() {
    let graph = graph("dit-tiny-75", ElementType::F32, Gates::Hidden, AttentionStyle::Routed);
    insta::assert_snapshot!("dit", graph.to_text());
}

#[test]
fn llama() {
    let graph = graph("llama-moh-tiny", ElementType::F16, Gates::Output, AttentionStyle::Routed);
    insta::assert_snapshot!("llama_f16_gates", graph.to_text());
}

#[test]
fn llama_with_given_gates() {
    let graph = graph("llama-moh-tiny", ElementType::F32, Gates::Input, AttentionStyle::Routed);
    let text = graph.to_text();
    assert!(!text.contains("TopK") && text.contains("input gates.model.layers.0.self_attn"), "{text}");
}

#[test]
fn portable_attention() {
    let graph = graph("llama-moh-tiny", ElementType::F32, Gates::Hidden, AttentionStyle::Portable);
    assert!(graph.nodes.iter().all(|node| node.domain.is_empty()) && graph.functions.is_empty());
    let text = graph.to_text();
    let first: Vec<&str> =
        text.lines().filter(|line| line.contains("model.layers.0.self_attn/RoutedAttention")).collect();
    insta::assert_snapshot!("portable_attention", first.join("\n"));
}
