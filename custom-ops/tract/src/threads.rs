//! Executors of a given number of threads.

use rayon::ThreadPoolBuilder;
use std::sync::Arc;
use tract_linalg::multithread::{Executor, set_default_executor};

/// The operating system gave no threads.
#[derive(Debug, thiserror::Error)]
#[error("cannot start {threads} threads: {reason}")]
pub struct ThreadsError {
    /// The number asked for.
    pub threads: usize,
    /// What the system said.
    pub reason: String,
}

/// An executor of `threads` threads (0 counts as 1), for the `executor` of tract's `RunOptions`.
///
/// # Errors
/// [`ThreadsError`] where the threads cannot be started.
pub fn executor(threads: usize) -> Result<Executor, ThreadsError> {
    if threads <= 1 {
        return Ok(Executor::SingleThread);
    }
    let pool = ThreadPoolBuilder::new().thread_name(|i| format!("moh-tract-{i}")).num_threads(threads).build();
    match pool {
        Ok(pool) => Ok(Executor::MultiThread(Arc::new(pool))),
        Err(e) => Err(ThreadsError { threads, reason: e.to_string() }),
    }
}

/// Makes `threads` threads the default of every plan of this process that has no executor of its own.
///
/// # Errors
/// As [`executor`].
pub fn set_threads(threads: usize) -> Result<(), ThreadsError> {
    set_default_executor(executor(threads)?);
    Ok(())
}
