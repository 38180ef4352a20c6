//! A prompt in a cache in place, against the same attention on its keys and values alone.

use crate::graphs::{Builder, FLOAT, INT64, MOH, float, gates, int, random};
use crate::measure::{Settings, Table, Way};
use crate::operators::times;
use anyhow::Result;
use moh_runtime::Tensor;
use serde_json::Value as Json;

const HEADS: usize = 32;
const KV_HEADS: usize = 8;
/// Tokens that a large cache has room for.
const CAPACITY: usize = 4096;
const SHARE: f64 = 0.75;

/// Prefill: as many queries as tokens.
pub(crate) fn prefill(settings: &Settings, tables: &mut Vec<Json>) -> Result<()> {
    let columns = [
        "threads",
        "head width",
        "tokens",
        "RoutedAttention ms",
        "RoutedCachedAttention ms",
        "with room for 4096 tokens ms",
        "ratios",
    ];
    let title = "Prefill of RoutedCachedAttention against causal RoutedAttention, 32 heads over 8, 75 %, f32";
    let mut table = Table::new(title, &columns, tables);
    for &threads in &settings.threads {
        for dim in [64, 128] {
            for len in [128, 512, 2048] {
                let graphs = vec![alone(len, dim)?, cached(len, len, dim)?, cached(len, CAPACITY, dim)?];
                let times = times(graphs, threads, settings)?;
                let ratios = times[1..].iter().map(|t| format!("{:.2}", t.min / times[0].min));
                let head = [threads.to_string(), dim.to_string(), len.to_string()];
                let cells = head.into_iter().chain(times.iter().map(|t| t.cell()));
                table.row(&cells.chain([ratios.collect::<Vec<_>>().join(" / ")]).collect::<Vec<_>>());
            }
        }
    }
    Ok(())
}

type Graph = (Builder, Way, Vec<(String, moh_runtime::Value)>);

/// Inputs and output that both have; keys and values are (batch, heads, `capacity`, `dim`).
fn common(len: usize, capacity: usize, dim: usize) -> Result<(Builder, Vec<(String, moh_runtime::Value)>)> {
    let (q, kv) = ([1, len, HEADS * dim], [1, KV_HEADS, capacity, dim]);
    let builder = Builder::default()
        .input("q", FLOAT, &q)
        .input("k", FLOAT, &kv)
        .input("v", FLOAT, &kv)
        .input("gates", FLOAT, &[1, len, HEADS])
        .output("o", FLOAT, &q);
    let gates = gates(1, len, HEADS, (SHARE * HEADS as f64) as usize)?;
    Ok((builder, vec![random("q", &q)?, random("k", &kv)?, random("v", &kv)?, gates]))
}

fn alone(len: usize, dim: usize) -> Result<Graph> {
    let (builder, inputs) = common(len, len, dim)?;
    let attributes = vec![
        int("num_heads", HEADS),
        int("kv_num_heads", KV_HEADS),
        float("scale", (dim as f32).powf(-0.5)),
        int("is_causal", 1),
    ];
    Ok((builder.node(MOH, "RoutedAttention", "q k v gates", "o", attributes), Way::Library, inputs))
}

fn cached(len: usize, capacity: usize, dim: usize) -> Result<Graph> {
    let (builder, mut inputs) = common(len, capacity, dim)?;
    let attributes =
        vec![int("num_heads", HEADS), int("kv_num_heads", KV_HEADS), float("scale", (dim as f32).powf(-0.5))];
    let builder = builder.input("first", INT64, &[1]).input("start", INT64, &[1]);
    for name in ["first", "start"] {
        inputs.push((name.to_owned(), Tensor::new(vec![1], vec![0i64])?.into()));
    }
    let node = builder.node(MOH, "RoutedCachedAttention", "q k v gates first start", "o", attributes);
    Ok((node, Way::Library, inputs))
}
