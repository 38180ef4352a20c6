//! MoH and MoA checkpoints, routers and model families

#![deny(unsafe_code)]

pub mod checkpoint;
pub mod error;

pub use checkpoint::{Checkpoint, Config, Loader, Weight, WeightType};
pub use error::Error;
