//! Tests of every CPU kernel that this processor supports: against the f64 reference, errors, threads and memory.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod aggregated_attention;
mod cache;
mod depthwise_conv;
mod errors;
mod every_operator;
mod head_linear;
mod layer_norm;
mod layers;
mod linear;
mod nbits;
mod packed;
mod routed_attention;
mod routed_mlp;
mod selection;
mod support;
mod top_k_router;
