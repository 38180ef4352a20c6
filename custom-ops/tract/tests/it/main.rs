//! Tests of the operators in tract, and of the optimisation of whole models. One module per topic, in one program.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod constants;
mod operators;
mod optimize;
mod quantised;
mod support;
