//! Tests of validation (attributes, shapes, types, lengths) and of shape inference with partly known shapes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod aggregated_attention;
mod any;
mod depthwise_conv;
mod head_linear;
mod layer_norm;
mod linear;
mod nbits;
mod routed_attention;
mod routed_mlp;
mod top_k_router;
