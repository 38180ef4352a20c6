//! Tests of the CUDA kernels against the f64 reference, on a GPU or on the emulator.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod aggregated_attention;
mod cache_update;
mod depthwise_conv;
mod device;
mod driver;
mod emulator;
mod every_operator;
mod graph;
mod head_linear;
mod launches;
mod layer_norm;
mod linear;
mod memory;
mod nbits;
mod params;
mod plan;
mod routed_attention;
mod routed_cached_attention;
mod routed_mlp;
mod top_k_router;
