//! The operators in tract, and the rewrites of whole models. A module a topic, in one program.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod operators;
mod optimize;
mod support;
