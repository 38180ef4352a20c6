//! MoH and MoA checkpoints, routers and model families

#![deny(unsafe_code)]

mod algebra;
pub mod checkpoint;
pub mod count;
pub mod eager;
pub mod error;
pub mod families;
mod fused;
mod graph;
pub mod heads;
pub mod initial;
pub mod layers;
mod macs;
pub mod mixture;
pub mod operators;
pub mod ops;
mod parameters;
mod prefix;
pub mod presets;
pub mod router;
pub mod routing;
pub mod sample;
mod shape;
pub mod sharing;
mod tape;
mod unused_key;
mod warning;
mod weight_type;

pub use checkpoint::{Checkpoint, Config, Loader, Weight, WeightType};
pub use error::Error;
pub use families::Model;
pub use parameters::Parameters;
pub use warning::Warning;
