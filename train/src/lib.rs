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
/// begun already. For programs, to be called first: the calling thread runs others' tasks only while it is in an operation of rayon's itself.
pub fn join_pool() {
    let set =
        std::env::var("RAYON_NUM_THREADS").ok().and_then(|threads| threads.parse().ok()).filter(|threads| *threads > 0);
    let threads = set.or_else(|| Some(std::thread::available_parallelism().ok()?.get())).unwrap_or(1);
    // One thread alone would let others wait for as long as it does something else.
    if threads > 1 {
        // It fails where threads have begun: then everything is slower, and right.
        let _ = rayon::ThreadPoolBuilder::new().num_threads(threads).use_current_thread().build_global();
    }
}
