//! Tasks, and the program `moh-run`, with small models.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod classify;
mod cli;
mod doctor;
mod generate;
mod help;
mod language_models;
mod measure;
mod models;
mod program;
mod routes;
mod sample;
mod serve;
#[path = "../../../runtime-ort/tests/it/support/mod.rs"]
mod support;
mod translate;
