//! Tests of the whole: exports, runtimes and tasks together. A module a topic, in one program.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod batch;
mod cache;
mod docs;
mod every_operator;
mod examples;
mod graph_snapshots;
mod mixed_bodies;
mod operators;
mod operators_aggregated;
mod operators_router;
mod parity;
mod parity_llama;
mod parity_moa;
mod parity_vit;
mod quality;
mod sharing;
mod tasks;
