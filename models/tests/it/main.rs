//! Models and checkpoints from outside the crate. A module a topic, in one program.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod families;
mod golden;
mod grouped;
mod keys;
mod moa;
mod names;
mod presets;
mod sharing;
mod switchhead;
mod weights;
