//! Device memory for a call's intermediates.

use crate::driver::RawPtr;
use moh_operators::Error;
use std::cell::Cell;

/// Alignment of workspace blocks in bytes: sufficient for TMA and 16-byte accesses, and guaranteed by the driver's
/// allocator.
pub const WORKSPACE_ALIGN: usize = 256;

/// Device memory that a runtime provides to an operator during a call. An operator with intermediates allocates one
/// block a call, from which an [`Arena`] cuts its parts; others allocate nothing.
///
/// # Safety
/// Blocks are device memory of the stream's context, aligned to [`WORKSPACE_ALIGN`]. Nothing else uses them from this
/// point of the stream until the call's work on the stream has finished. They are released in stream order after the
/// call has returned.
pub unsafe trait Workspace {
    /// Allocates `bytes` bytes, uninitialised.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if there is not enough memory.
    fn allocate(&self, bytes: usize) -> Result<RawPtr, Error>;
}

/// A workspace cut from one block of device memory.
#[derive(Debug)]
pub struct Arena {
    base: RawPtr,
    bytes: usize,
    used: Cell<usize>,
}

impl Arena {
    /// # Safety
    /// `base` is device memory of `bytes` bytes, aligned to [`WORKSPACE_ALIGN`], which only this arena uses while
    /// calls with it run.
    pub unsafe fn new(base: RawPtr, bytes: usize) -> Arena {
        Arena { base, bytes, used: Cell::new(0) }
    }

    /// Bytes requested, each block rounded up to the alignment, including requests that did not fit.
    pub fn used(&self) -> usize {
        self.used.get()
    }
}

// SAFETY: the blocks are disjoint parts of the arena's memory, by the contract of `new`.
unsafe impl Workspace for Arena {
    fn allocate(&self, bytes: usize) -> Result<RawPtr, Error> {
        let start = self.used.get();
        let end = bytes.checked_next_multiple_of(WORKSPACE_ALIGN).and_then(|size| start.checked_add(size));
        self.used.set(end.unwrap_or(usize::MAX));
        match end {
            Some(end) if end <= self.bytes => Ok(self.base + start as u64),
            _ => Err(Error::OutOfMemory { bytes }),
        }
    }
}
