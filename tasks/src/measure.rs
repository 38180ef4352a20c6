//! Benchmarks and profiles of models on synthetic inputs.

mod bench;
mod part;
mod profile;
mod timings;
pub(crate) mod trace;
mod workload;

pub use bench::{Effort, bench};
pub use part::{Kernel, Part};
pub use profile::{NodeTime, Profile, Profiled, profile};
pub use timings::Timings;
pub use workload::{Phase, Runs, SEQUENCE, Sizes, Workload};
