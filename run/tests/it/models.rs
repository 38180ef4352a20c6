//! A language model that counts, and its tokenizer.

use crate::support::onnx::{DataType, Graph};
use crate::support::write;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Number of tokens that [`counter`] knows.
pub(crate) const VOCABULARY: i64 = 11;

/// A language model whose next token is `(sum of tokens + 3 * sum of positions) % 11` over what the mask lets it see, all of
/// it read back from the cache.
pub(crate) fn counter() -> (TempDir, PathBuf) {
    write(&counter_graph())
}

/// [`counter`] with a layer of three heads, of which a token does not use the one of its number.
pub(crate) fn counter_with_gates() -> (TempDir, PathBuf) {
    let mut graph = counter_graph();
    graph.floats("heads", &[0.0, 1.0, 2.0]);
    graph.node("Unsqueeze", &["key_f", "two"], "key_column", &[]);
    graph.node("Sub", &["key_column", "heads"], "gates.layers.0.attn", &[]);
    graph.output("gates.layers.0.attn", DataType::Float, &["batch", "sequence", "3"]);
    for (key, value) in [("moh.family", "moh-llama"), ("moh.num_shared_heads", "0"), ("moh.top_k", "2")] {
        graph.metadata(key, value);
    }
    write(&graph)
}

fn counter_graph() -> Graph {
    let mut graph = Graph::new();
    graph.input("input_ids", DataType::Int64, &["batch", "sequence"]);
    graph.input("attention_mask", DataType::Int64, &["batch", "total"]);
    graph.input("position_ids", DataType::Int64, &["batch", "sequence"]);
    for name in ["key", "value"] {
        graph.input(&format!("past_key_values.0.{name}"), DataType::Float, &["batch", "1", "past", "1"]);
    }
    graph.ints("outer", &[1, 3]);
    graph.ints("all", &[1, 2, 3]);
    graph.ints("two", &[2]);
    graph.ints("last", &[-1]);
    graph.ints("middle", &[1, 2]);
    graph.floats("three", &[3.0]);
    graph.floats("count", &[VOCABULARY as f32]);
    graph.floats("vocabulary", &(0..VOCABULARY).map(|id| id as f32).collect::<Vec<f32>>());

    graph.cast_to_float("attention_mask", "mask_f");
    graph.node("Unsqueeze", &["mask_f", "outer"], "mask", &[]);
    for (input, name) in [("input_ids", "key"), ("position_ids", "value")] {
        graph.cast_to_float(input, &format!("{name}_f"));
        graph.node("Unsqueeze", &[&format!("{name}_f"), "outer"], &format!("new_{name}"), &[]);
        let present = format!("present.0.{name}");
        let past = format!("past_key_values.0.{name}");
        graph.node("Concat", &[&past, &format!("new_{name}")], &present, &[("axis", 2)]);
        graph.node("Mul", &[&present, "mask"], &format!("seen_{name}"), &[]);
        let sum = format!("sum_{name}");
        graph.node("ReduceSum", &[&format!("seen_{name}"), "all"], &sum, &[("keepdims", 0)]);
    }
    graph.node("Mul", &["sum_value", "three"], "sum_positions", &[]);
    graph.node("Add", &["sum_key", "sum_positions"], "sum", &[]);
    graph.node("Mod", &["sum", "count"], "next", &[("fmod", 1)]);
    graph.node("Unsqueeze", &["next", "middle"], "next_row", &[]);
    graph.node("Sub", &["vocabulary", "next_row"], "distance", &[]);
    // Only the last token's logits are right: those of a token before are moved by its distance to the end.
    graph.node("Gather", &["value_f", "last"], "last_position", &[("axis", 1)]);
    graph.node("Sub", &["value_f", "last_position"], "to_end", &[]);
    graph.node("Unsqueeze", &["to_end", "two"], "to_end_column", &[]);
    graph.node("Sub", &["distance", "to_end_column"], "error", &[]);
    graph.node("Mul", &["error", "error"], "square", &[]);
    graph.node("Neg", &["square"], "logits", &[]);

    graph.output("logits", DataType::Float, &["batch", "sequence", "11"]);
    for name in ["key", "value"] {
        graph.output(&format!("present.0.{name}"), DataType::Float, &["batch", "1", "present", "1"]);
    }
    graph
}

/// What [`counter`] continues one prompt with.
pub(crate) fn count_on(prompt: &[i64], steps: usize) -> Vec<i64> {
    let mut tokens = prompt.to_vec();
    for _ in 0..steps {
        let positions: i64 = (0..tokens.len() as i64).sum();
        tokens.push((tokens.iter().sum::<i64>() + 3 * positions) % VOCABULARY);
    }
    tokens.split_off(prompt.len())
}

/// A tokenizer of [`VOCABULARY`] letters, a to k.
pub(crate) fn write_tokenizer(folder: &Path) {
    let vocab: Vec<String> = ('a'..='k').enumerate().map(|(id, letter)| format!(r#""{letter}": {id}"#)).collect();
    let json = format!(
        r#"{{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "truncation": null, "padding": null,
        "decoder": {{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}},
        "model": {{"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": {{{}}}, "merges": []}}}}"#,
        vocab.join(", ")
    );
    std::fs::write(folder.join("tokenizer.json"), json).unwrap();
}
