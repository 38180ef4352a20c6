//! What every backend's tests run: calls of the `ai.moh` operators on random data, the outputs that the f64 reference gives
//! for them, and how far a backend may be from those.
//!
//! Whatever a call does not use holds NaN, and so does the memory around every tensor: what reads there spoils its results.

// For tests alone: what is wrong ends the test.
#![allow(clippy::unwrap_used, clippy::panic)]

pub mod aggregated_attention;
mod call;
mod data;
mod examples;
pub mod head_linear;
pub mod routed_attention;
pub mod routed_mlp;
pub mod top_k_router;

pub use call::Call;
pub use data::{Buffer, Random};
pub use examples::examples;
