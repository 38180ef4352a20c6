//! The models of `ci/bench.sh --against`, written to files: two revisions run the same ones.

use crate::graphs::{Builder, FLOAT, MOH, float, int, ints};
use crate::machine;
use crate::measure::Settings;
use crate::models;
use crate::operators::Attention;
use anyhow::{Context, Result};
use moh_export::{Options, export};
use serde_json::{Value as Json, json};
use std::path::Path;

const LIBRARY: &[&str] = &["library"];
const PACKED: &[&str] = &["library", "packed"];
const TRACT: &[&str] = &["library", "tract"];

/// Sizes of symbolic dimensions.
type Sizes = [(&'static str, usize)];

/// Writes the models into the empty `folder`, and `cases.json`: the machine, and each case's name, model, ways to run it, share of the
/// heads that are on, and sizes of its symbolic dimensions.
pub(crate) fn write(folder: &Path, large: bool, settings: &Settings) -> Result<()> {
    let mut cases = Vec::new();
    for (name, graph, ways, share) in operators() {
        if settings.wants(name) {
            let file = format!("{}.onnx", words(name));
            graph.write(&folder.join(&file))?;
            cases.push(case(name, &file, ways, share, &[]));
        }
    }
    for (name, checkpoint, sizes) in CHECKPOINTS {
        if settings.wants(name) {
            let file = format!("{}/model.onnx", words(name));
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/checkpoints").join(checkpoint);
            let options = Options { verify: Some(false), ..Options::default() };
            export(&source, &folder.join(&file), &options).context(*name)?;
            cases.push(case(name, &file, TRACT, 1.0, sizes));
        }
    }
    for (name, ways, is_large) in RANDOM {
        if settings.wants(name) && (large || !is_large) {
            let file = format!("{}/model.onnx", words(name));
            let random = models::case(name)?;
            models::write(random, &folder.join(&file)).context(*name)?;
            cases.push(case(name, &file, ways, 1.0, random.sizes));
        }
    }
    let all = json!({ "machine": machine::description(&settings.threads), "cases": cases });
    Ok(std::fs::write(folder.join("cases.json"), serde_json::to_vec_pretty(&all)?)?)
}

fn case(name: &str, file: &str, ways: &[&str], share: f64, sizes: &Sizes) -> Json {
    let mut symbols = serde_json::Map::from_iter([("batch".to_owned(), json!(1))]);
    symbols.extend(sizes.iter().map(|&(symbol, size)| (symbol.to_owned(), json!(size))));
    json!({ "name": name, "model": file, "ways": ways, "share": share, "sizes": symbols })
}

/// The case's name as a file's.
fn words(case: &str) -> String {
    let words: Vec<&str> = case.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()).collect();
    words.join("-")
}

const CHECKPOINTS: &[(&str, &str, &Sizes)] = &[
    (
        "shakespeare, prefill of 256 tokens",
        "shakespeare-moh-llama",
        &[("sequence", 256), ("past", 0), ("past+sequence", 256)],
    ),
    (
        "shakespeare, 1 token after 128",
        "shakespeare-moh-llama",
        &[("sequence", 1), ("past", 128), ("past+sequence", 129)],
    ),
    ("digits, 1 image", "digits-moh-dit", &[]),
];

/// Names in `models`, ways, and whether the case is a large one.
const RANDOM: &[(&str, &[&str], bool)] = &[
    ("moh-dit-s-75, 256 tokens", TRACT, false),
    ("moh-vit-small-75, 224 pixels", TRACT, false),
    ("moh-dit-xl-90, 256 tokens", TRACT, true),
    // In tract, two of them would need 20 GB.
    ("llama-1b, 512 tokens", LIBRARY, true),
];

/// Models of one node. A quarter of the heads is off, of RoutedMLP's experts three quarters.
fn operators() -> Vec<(&'static str, Builder, &'static [&'static str], f64)> {
    let attention = |dim, len, causal| Attention { batch: 1, len, heads: 32, dim, causal };
    vec![
        ("RoutedAttention, width 64, 256 tokens", attention(64, 256, false).routed(false), LIBRARY, 0.75),
        ("RoutedAttention, width 64, 2048 tokens", attention(64, 2048, false).routed(false), LIBRARY, 0.75),
        ("RoutedAttention, width 64, 2048 tokens, causal", attention(64, 2048, true).routed(false), LIBRARY, 0.75),
        ("RoutedAttention, width 128, 512 tokens", attention(128, 512, false).routed(false), LIBRARY, 0.75),
        ("RoutedAttention, width 64, 512 tokens, bf16", attention(64, 512, false).routed(true), LIBRARY, 0.75),
        ("RoutedAttention, 1 query, 2048 cached keys", decode(), LIBRARY, 0.75),
        ("RoutedProjection, width 2048, 256 tokens", linear("RoutedProjection"), PACKED, 0.75),
        ("RoutedCombine, width 2048, 256 tokens", linear("RoutedCombine"), PACKED, 0.75),
        ("RoutedMLP, 8 experts, 256 tokens", mlp(), PACKED, 0.25),
        ("RoutedAggregatedAttention, 28 x 28 tokens", aggregated(), LIBRARY, 0.75),
        ("TopKRouter, 32 heads, 2048 tokens", router(), LIBRARY, 0.75),
    ]
}

fn decode() -> Builder {
    let (heads, keys, dim) = (32, 2048, 64);
    let cache = [1, heads, keys, dim];
    let attributes =
        vec![int("num_heads", heads), int("kv_num_heads", heads), float("scale", 0.125), int("is_causal", 1)];
    Builder::default()
        .input("q", FLOAT, &[1, 1, heads * dim])
        .input("k", FLOAT, &cache)
        .input("v", FLOAT, &cache)
        .input("gates", FLOAT, &[1, 1, heads])
        .output("o", FLOAT, &[1, 1, heads * dim])
        .node(MOH, "RoutedAttention", "q k v gates", "o", attributes)
}

fn linear(operator: &str) -> Builder {
    let (heads, len, width) = (32, 256, 2048);
    Builder::default()
        .input("x", FLOAT, &[1, len, width])
        .weight("w", &[width, width])
        .input("gates", FLOAT, &[1, len, heads])
        .output("o", FLOAT, &[1, len, width])
        .node(MOH, operator, "x w gates", "o", vec![int("num_heads", heads), int("weight_layout", 0)])
}

fn mlp() -> Builder {
    let (experts, len, width, hidden) = (8, 256, 512, 2048);
    Builder::default()
        .input("x", FLOAT, &[1, len, width])
        .weight("w1", &[experts, width, hidden])
        .weight("w2", &[experts, hidden, width])
        .input("gates", FLOAT, &[1, len, experts])
        .output("o", FLOAT, &[1, len, width])
        .node(MOH, "RoutedMLP", "x w1 w2 gates", "o", vec![int("num_experts", experts), int("activation", 1)])
}

fn aggregated() -> Builder {
    let (heads, dim, side, window, pooled) = (12, 24, 28, 3, 49);
    let (tokens, cells) = (side * side, window * window);
    let (grid, pool) = ([1, tokens, heads * dim], [1, pooled, heads * dim]);
    let attributes = vec![int("num_heads", heads), int("height", side), int("width", side), int("window", window)];
    Builder::default()
        .input("q", FLOAT, &grid)
        .input("k", FLOAT, &grid)
        .input("v", FLOAT, &grid)
        .input("pk", FLOAT, &pool)
        .input("pv", FLOAT, &pool)
        .input("gates", FLOAT, &[1, tokens, heads])
        .weight("qe", &[heads, dim])
        .weight("qs", &[tokens, heads])
        .weight("lb", &[heads, cells])
        .weight("pb", &[heads, tokens, pooled])
        .weight("lt", &[heads, dim, cells])
        .weight("ltb", &[heads, cells])
        .output("o", FLOAT, &grid)
        .node(MOH, "RoutedAggregatedAttention", "q k v pk pv gates qe qs lb pb lt ltb", "o", attributes)
}

/// 8 shared heads, and 16 of 24 routed ones.
fn router() -> Builder {
    let (heads, len, shared) = (32, 2048, 8);
    // A score a routed head, 2 of the balance, and a score a shared head.
    let width = heads + 2;
    let attributes = vec![
        int("kind", 0),
        int("num_heads", heads),
        int("top_k", 16),
        ints("shared_heads", &(0..shared).collect::<Vec<i64>>()),
    ];
    Builder::default().input("scores", FLOAT, &[1, len, width]).output("o", FLOAT, &[1, len, heads]).node(
        MOH,
        "TopKRouter",
        "scores",
        "o",
        attributes,
    )
}
