//! Who still waits for a run: when nobody does, it is broken off.

use moh_runtime::Interrupt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Held by the one who waits; dropping it gives the request up.
#[derive(Debug)]
pub(crate) struct Waiter(Claim);

/// Held by the request.
#[derive(Debug, Clone, Default)]
pub(crate) struct Claim(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    given_up: bool,
    run: Option<Arc<Shared>>,
}

/// A run that requests share.
#[derive(Debug)]
struct Shared {
    waiting: AtomicUsize,
    interrupt: Interrupt,
}

impl Shared {
    fn leave(&self) {
        if self.waiting.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.interrupt.interrupt();
        }
    }
}

impl Claim {
    /// A claim, and who has it.
    pub(crate) fn new() -> (Waiter, Claim) {
        let claim = Claim::default();
        (Waiter(claim.clone()), claim)
    }

    /// The content is whole after every statement, so a panic elsewhere leaves nothing to fear.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiter {
    /// Whether a run has begun.
    pub(crate) fn has_begun(&self) -> bool {
        self.0.lock().run.is_some()
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.given_up = true;
        if let Some(run) = state.run.take() {
            run.leave();
        }
    }
}

/// For a run that begins: interrupted once all of these are given up.
pub(super) fn interrupt<'c>(claims: impl Iterator<Item = &'c Claim>) -> Interrupt {
    // One for this function, so that a request that is given up meanwhile is not the last one.
    let shared = Arc::new(Shared { waiting: AtomicUsize::new(1), interrupt: Interrupt::default() });
    for claim in claims {
        let mut state = claim.lock();
        if !state.given_up {
            shared.waiting.fetch_add(1, Ordering::AcqRel);
            state.run = Some(shared.clone());
        }
    }
    shared.leave();
    shared.interrupt.clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_broken_off_when_all_of_its_requests_are_given_up() {
        let ((a, first), (b, second)) = (Claim::new(), Claim::new());
        assert!(!a.has_begun());
        let shared = interrupt([&first, &second].into_iter());
        assert!(a.has_begun() && b.has_begun());
        drop(a);
        assert!(!shared.is_interrupted());
        // As after a shared run that failed: the rest runs alone, and the first is not asked any more.
        let alone = interrupt([&second].into_iter());
        assert!(interrupt([&first].into_iter()).is_interrupted());
        drop(b);
        assert!(alone.is_interrupted() && !shared.is_interrupted());
    }
}
