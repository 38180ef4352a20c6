//! The server, as its clients see it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod client;
mod ends;
mod grpc;
mod limits;
mod models;
mod pages;
mod scores;
mod tensors;
mod texts;
