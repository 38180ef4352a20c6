//! Runs that another thread breaks off.

use ort::session::RunOptions;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, OnceLock};

/// Breaks runs off: see [`Model::run_until`](crate::Model::run_until). Clones break off the same runs.
#[derive(Debug, Clone, Default)]
pub struct Interrupt(Arc<State>);

#[derive(Default)]
struct State {
    interrupted: AtomicBool,
    /// What onnxruntime looks at between two operators, once a run of it has begun.
    options: OnceLock<RunOptions>,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State").field("interrupted", &self.interrupted).finish_non_exhaustive()
    }
}

impl Interrupt {
    /// Breaks off the runs that have this interrupt, and each that begins with it afterwards.
    pub fn interrupt(&self) {
        self.0.interrupted.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if let Some(options) = self.0.options.get() {
            // Without it the run goes on to its end, and its outputs are dropped.
            let _ = options.terminate();
        }
    }

    /// Whether [`Interrupt::interrupt`] was called.
    pub fn is_interrupted(&self) -> bool {
        self.0.interrupted.load(Ordering::SeqCst)
    }

    /// The options of a run in onnxruntime; who calls this looks at [`Interrupt::is_interrupted`] afterwards, so that no interrupt is lost.
    pub(crate) fn options(&self) -> ort::Result<&RunOptions> {
        if let Some(options) = self.0.options.get() {
            return Ok(options);
        }
        let options = RunOptions::new()?;
        let options = self.0.options.get_or_init(|| options);
        // Either this is seen by the one that interrupts, or that by the one that looks after this.
        fence(Ordering::SeqCst);
        Ok(options)
    }
}
