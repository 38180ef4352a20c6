//! Kernels for layers outside ai.moh, for hosts whose own are slower.

mod depthwise;

pub use depthwise::Depthwise;
