//! Threads that run models, and are started again after a panic.

use crate::measure;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Between two tries to load a model again.
const PAUSE: Duration = Duration::from_secs(5);

/// How a model's threads are, and what the server wants of them.
#[derive(Debug, Default)]
pub(crate) struct Health {
    /// Threads that serve.
    serving: AtomicUsize,
    /// What runs is to be given up.
    abort: AtomicBool,
    /// Nothing new is taken.
    closing: AtomicBool,
}

impl Health {
    pub(crate) fn is_ready(&self) -> bool {
        self.serving.load(Ordering::Acquire) > 0 && !self.closing.load(Ordering::Acquire)
    }

    pub(crate) fn close(&self) {
        self.closing.store(true, Ordering::Release);
    }

    pub(crate) fn abort(&self) {
        self.abort.store(true, Ordering::Release);
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.abort.load(Ordering::Acquire)
    }
}

/// A thread that loads a model and serves with it, until `serve` returns. The first loading is over when this returns; `load` says what it
/// found.
pub(crate) fn spawn<M, F, E>(
    name: String,
    health: Arc<Health>,
    load: impl Fn() -> Result<(M, F), E> + Send + 'static,
    serve: impl Fn(&mut M) + Send + 'static,
) -> std::io::Result<Result<(F, JoinHandle<()>), E>>
where
    M: 'static,
    F: Send + 'static,
    E: std::fmt::Display + Send + 'static,
{
    let (found, first) = std::sync::mpsc::sync_channel(1);
    let thread = std::thread::Builder::new().name(name.clone()).spawn(move || {
        let mut model = match caught(&load) {
            Ok(Ok((model, facts))) => {
                health.serving.fetch_add(1, Ordering::AcqRel);
                let _ = found.send(Ok(facts));
                model
            }
            // Without an answer, the one who waits knows that the thread failed.
            Ok(Err(error)) => return drop(found.send(Err(error))),
            Err(()) => return,
        };
        while caught(|| serve(&mut model)).is_err() {
            health.serving.fetch_sub(1, Ordering::AcqRel);
            tracing::error!(model = name, "the model's thread panicked; the model is loaded again");
            measure::restart(&name);
            // What it holds is in no known state.
            drop(model);
            model = loop {
                if health.is_aborted() {
                    return;
                }
                match caught(&load) {
                    Ok(Ok((model, _))) => break model,
                    Ok(Err(error)) => tracing::error!(model = name, "cannot load the model again: {error}"),
                    Err(()) => tracing::error!(model = name, "loading the model panicked"),
                }
                std::thread::sleep(PAUSE);
            };
            health.serving.fetch_add(1, Ordering::AcqRel);
        }
        health.serving.fetch_sub(1, Ordering::AcqRel);
    })?;
    match first.recv() {
        Ok(Ok(facts)) => Ok(Ok((facts, thread))),
        Ok(Err(error)) => Ok(Err(error)),
        Err(_) => Err(std::io::Error::other("it panicked while it loaded the model")),
    }
}

/// The result, or that it panicked, which the panic hook has told.
fn caught<R>(work: impl FnOnce() -> R) -> Result<R, ()> {
    catch_unwind(AssertUnwindSafe(work)).map_err(drop)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;

    #[test]
    fn a_panic_loads_the_model_again() {
        let (loads, health) = (Arc::new(AtomicUsize::new(0)), Arc::new(Health::default()));
        let counted = loads.clone();
        let load = move || Ok::<_, String>((counted.fetch_add(1, Ordering::SeqCst), "facts"));
        let (facts, thread) = spawn("m".to_owned(), health.clone(), load, |number| {
            assert!(*number >= 2, "the first two fail");
        })
        .unwrap()
        .unwrap();
        thread.join().unwrap();
        assert_eq!((facts, loads.load(Ordering::SeqCst), health.is_ready()), ("facts", 3, false));
    }

    #[test]
    fn what_does_not_load_is_told() {
        let health = Arc::new(Health::default());
        let load = || Err::<((), ()), _>("no such file".to_owned());
        let error = spawn("m".to_owned(), health, load, |()| {}).unwrap().err();
        assert_eq!(error.as_deref(), Some("no such file"));
    }
}
