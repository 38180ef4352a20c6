//! Notes on how a shared value was used.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Notes that are taken through a shared reference. A copy of what they are about begins without notes.
#[derive(Debug, Default)]
pub(super) struct Record<T>(Mutex<T>);

impl<T: Default> Clone for Record<T> {
    fn clone(&self) -> Record<T> {
        Record::default()
    }
}

impl<T> Record<T> {
    /// The notes. Nothing else may be asked of them meanwhile.
    pub(super) fn get(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
