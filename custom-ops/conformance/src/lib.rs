//! Shared test cases for all backends: calls of the `ai.moh` operators on random data, expected outputs from the f64
//! reference, and the comparison of a backend's output with them.
//!
//! Elements that a call must not read are NaN, and so is the memory before and after every tensor: reading them makes
//! results NaN.

// Used by tests only, which panics fail.
#![allow(clippy::unwrap_used, clippy::panic)]

pub mod aggregated_attention;
pub mod cache;
mod call;
mod data;
pub mod depthwise_conv;
mod examples;
pub mod head_linear;
pub mod layer_norm;
pub mod linear;
pub mod nbits;
pub mod routed_attention;
pub mod routed_mlp;
pub mod top_k_router;

pub use call::Call;
pub use data::{Buffer, Random};
pub use examples::examples;
