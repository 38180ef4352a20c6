//! Device memory for a call's intermediates.

use crate::driver::RawPtr;
use moh_operators::Error;
use std::cell::{Cell, RefCell};

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

/// Another workspace's blocks, used again in every round of a call whose rounds run one after the other.
pub(crate) struct Reused<'w> {
    workspace: &'w dyn Workspace,
    /// Pointer and bytes of the blocks, in the order of allocation.
    blocks: RefCell<Vec<(RawPtr, usize)>>,
    /// Number of blocks that this round has.
    used: Cell<usize>,
}

impl Reused<'_> {
    pub(crate) fn new(workspace: &dyn Workspace) -> Reused<'_> {
        Reused { workspace, blocks: RefCell::default(), used: Cell::new(0) }
    }

    /// Starts a round. All work of the previous ones is before it on the stream.
    pub(crate) fn start_round(&self) {
        self.used.set(0);
    }
}

// SAFETY: the blocks of a round are disjoint blocks of `workspace`, and no other round runs at the same time.
unsafe impl Workspace for Reused<'_> {
    fn allocate(&self, bytes: usize) -> Result<RawPtr, Error> {
        let (mut blocks, used) = (self.blocks.borrow_mut(), self.used.get());
        self.used.set(used + 1);
        if let Some(&(ptr, size)) = blocks.get(used)
            && bytes <= size
        {
            return Ok(ptr);
        }
        let ptr = self.workspace.allocate(bytes)?;
        match blocks.get_mut(used) {
            Some(block) => *block = (ptr, bytes),
            None => blocks.push((ptr, bytes)),
        }
        Ok(ptr)
    }
}

#[cfg(test)]
mod tests {
    use super::{Arena, Reused, Workspace};

    #[test]
    fn rounds_use_the_same_blocks() {
        // SAFETY: the memory is not accessed.
        let arena = unsafe { Arena::new(4096, 1 << 20) };
        let rounds = Reused::new(&arena);
        let allocate = |bytes| rounds.allocate(bytes).unwrap_or_default();
        let (first, second) = (allocate(1000), allocate(10));
        assert_ne!(first, second);
        rounds.start_round();
        assert_eq!((allocate(600), allocate(10)), (first, second));
        let third = allocate(1);
        assert!(![first, second].contains(&third));
        rounds.start_round();
        let larger = allocate(2000);
        assert!(![first, second, third].contains(&larger), "a block that is too small is not used");
        assert_eq!((allocate(10), allocate(1)), (second, third));
        assert_eq!(arena.used(), 1024 + 256 + 256 + 2048);
    }
}
