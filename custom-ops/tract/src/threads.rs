//! Executors with a given number of threads.

use rayon::ThreadPoolBuilder;
use std::sync::Arc;
use tract_linalg::multithread::{Executor, set_default_executor};

/// The operating system could not start the threads.
#[derive(Debug, thiserror::Error)]
#[error("cannot start {threads} threads: {reason}")]
pub struct ThreadsError {
    /// The requested number.
    pub threads: usize,
    /// The system's error message.
    pub reason: String,
}

/// Creates an executor of `threads` threads (at least 1), for the `executor` field of tract's `RunOptions`.
///
/// # Errors
/// [`ThreadsError`] if the threads cannot be started.
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

/// Sets the default executor of this process, for all plans without their own, to `threads` threads.
///
/// # Errors
/// As [`executor`].
pub fn set_threads(threads: usize) -> Result<(), ThreadsError> {
    set_default_executor(executor(threads)?);
    Ok(())
}
