//! `moh_export::export` as a library: what it writes, what it refuses, and what it leaves behind.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod commit;
mod dtype;
mod existing;
mod refusal;
mod support;
mod versions;
mod weights;
