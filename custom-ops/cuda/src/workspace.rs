//! Device memory that a call works in.

use crate::driver::RawPtr;
use moh_operators::Error;
use std::cell::Cell;

/// Alignment of workspace blocks in bytes: what TMA and 16-byte accesses need, and what the driver's allocator gives.
pub const WORKSPACE_ALIGN: usize = 256;

/// What a runtime lends to an operator for the length of one call.
///
/// # Safety
/// Blocks are device memory of the stream's context, aligned to [`WORKSPACE_ALIGN`], that nothing else uses from this point of
/// the stream until the work that the call puts there is done. They are given back in stream order when the call has returned.
pub unsafe trait Workspace {
    /// A block of `bytes` bytes, undefined at first.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] where there is none.
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
    /// `base` is device memory of `bytes` bytes, aligned to [`WORKSPACE_ALIGN`], for this arena alone as long as the calls that
    /// use it run.
    pub unsafe fn new(base: RawPtr, bytes: usize) -> Arena {
        Arena { base, bytes, used: Cell::new(0) }
    }

    /// Bytes that were asked for, each block rounded up to the alignment; also what did not fit.
    pub fn used(&self) -> usize {
        self.used.get()
    }
}

// SAFETY: the blocks are disjoint parts of memory that is the arena's, as `new` was promised.
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
