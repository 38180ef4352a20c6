//! moh-export as users call it. A module a topic, in one program.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod checkpoints;
mod cli;
mod convert;
mod export;
mod files;
mod help;
mod inspect;
mod json;
#[cfg(unix)]
mod link;
mod malformed;
mod messages;
mod own_family;
mod published;
mod reference;
mod seq2seq;
mod side_files;
#[cfg(unix)]
mod signals;
mod size;
mod support;
