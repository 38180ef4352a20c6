//! Trains MoH and MoA models, so that what is saved exports as it is.
//!
//! A [`Task`] gives the loss of a batch; the [`Trainer`] does the rest: AdamW with warm-up and a cosine ([`Options`]), clipping, a moving
//! average of the weights, accumulated gradients, checkpoints. The models' own `forward` is what is differentiated
//! ([`moh_models::eager::Eager::with_parameters`]): there is no second definition of a model for training.
//!
//! A training is a folder. `step-N` in it is a checkpoint, with `model.safetensors` and `config.json` as the exporter reads them. A
//! checkpoint appears as a whole or not at all, and a training that was killed goes on from the last one to the same bits, on the
//! same machine with the same number of threads.

#![deny(unsafe_code)]

mod adamw;
mod average;
mod checkpoint;
mod error;
mod history;
pub mod loss;
#[allow(unsafe_code)]
mod memory;
mod options;
pub mod plot;
mod progress;
mod slices;
mod trainer;

pub use error::{Error, Result};
pub use history::{History, Load};
pub use memory::Memory;
pub use options::{Options, Precision};
pub use progress::Progress;
pub use trainer::{Loss, Task, Trainer};

/// Makes the calling thread, which will train, one of rayon's threads.
///
/// Otherwise it sleeps while they compute, and every operation wakes one of them and waits to be woken. It does nothing if rayon's threads have
/// begun already. For programs, to be called first: a thread that belongs to rayon's has to be in one of its operations to help other threads.
pub fn join_pool() {
    // What fails is a second call, or one that comes too late: then everything is slower, and right.
    let _ = rayon::ThreadPoolBuilder::new().use_current_thread().build_global();
}
