//! Small models in every runtime that is here.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod blocks;
mod models;
mod support;
mod tract;
