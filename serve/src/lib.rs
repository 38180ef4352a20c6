//! A server of exported models, in one process and without Python.
//!
//! Language models are served by OpenAI's API (completions and chat completions), every model by the Open Inference Protocol, version 2, over REST
//! and gRPC: all on one port. [`Server::start`] loads the models and answers; `moh-run serve` is the program.
//!
//! ```text
//! connection -- door (request id, key, time, errors) -- openai -- text: queue -- engine, a thread an instance
//!                                                   \-- oip  -- tensors: queue -- worker, a thread an instance
//! ```
//!
//! Handlers check everything that a client can get wrong, and wait; models run in threads of their own, which know nothing of HTTP. What a client
//! has left, or waited too long for, is dropped by the thread that has it.
#![forbid(unsafe_code)]

mod config;
mod deadline;
mod door;
mod error;
mod keys;
mod log;
mod measure;
mod memory;
mod model;
mod oip;
mod openai;
mod problem;
mod queue;
mod server;
mod tensors;
mod text;
mod worker;

pub use config::{Config, Limits, ModelSpec};
pub use error::{Error, Result};
pub use keys::ApiKeys;
pub use log::init as init_log;
/// The messages of the Open Inference Protocol's gRPC service, and a client of it.
pub use oip::proto;
pub use server::Server;
