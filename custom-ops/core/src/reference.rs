//! f64 loops that follow the definitions word by word: the oracle of every kernel.

pub mod aggregated_attention;
pub mod routed_attention;
pub mod routed_linear;
pub mod routed_mlp;
pub mod top_k_router;
