//! The interface between kernels and the runtime that calls them: threads and scratch memory.

use crate::settings::{self, Precision};
use moh_operators::Error;
use std::alloc::Layout;
use std::ptr::NonNull;

/// Alignment of scratch memory in bytes: a cache line, which is also the widest vector register.
pub const SCRATCH_ALIGN: usize = 64;

/// What a runtime provides to a kernel during a call.
///
/// # Safety
/// `allocate` returns `None` or memory of at least `bytes` bytes that nothing else uses until `release`.
pub unsafe trait Host: Sync {
    /// The number of tasks that can run concurrently, for which a kernel should ask.
    fn parallelism(&self) -> usize;

    /// Calls `task(i)` once for every `i < tasks`, possibly concurrently, and returns when all are done.
    ///
    /// Kernels ask for at most [`Host::parallelism`] tasks, each of which takes work items from a shared counter.
    /// Results are therefore correct with any number of threads.
    fn parallel_for(&self, tasks: usize, task: &(dyn Fn(usize) + Sync));

    /// How exactly float32 is to be multiplied: what the environment says, unless the host knows better.
    fn precision(&self) -> Precision {
        settings::precision()
    }

    /// Allocates `bytes` bytes (at any alignment); `None` if out of memory.
    fn allocate(&self, bytes: usize) -> Option<NonNull<u8>>;

    /// Frees memory.
    ///
    /// # Safety
    /// `ptr` and `bytes` are from one earlier `allocate` on this host, not yet released.
    unsafe fn release(&self, ptr: NonNull<u8>, bytes: usize);
}

/// A kernel's scratch memory: zeroed, aligned to [`SCRATCH_ALIGN`], released on drop.
pub struct Scratch<'h> {
    host: &'h dyn Host,
    base: NonNull<u8>,
    bytes: usize,
    offset: usize,
    len: usize,
}

/// Types of which scratch memory can be a slice.
///
/// # Safety
/// Any bit pattern is a valid value, and the alignment divides [`SCRATCH_ALIGN`].
pub unsafe trait Pod: Copy + 'static {}
// SAFETY: a plain 4-byte number.
unsafe impl Pod for f32 {}
// SAFETY: a plain 4-byte number.
unsafe impl Pod for u32 {}

impl<'h> Scratch<'h> {
    /// Allocates `len` elements of `P` from `host`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the host has no memory, or the size overflows the address space.
    pub fn new<P: Pod>(host: &'h dyn Host, len: usize) -> Result<Scratch<'h>, Error> {
        let scratch = Scratch::allocate::<P>(host, len)?;
        // SAFETY: the host returned `bytes` bytes for our use alone; zeroing initialises them.
        unsafe { scratch.base.as_ptr().write_bytes(0, scratch.bytes) };
        Ok(scratch)
    }

    /// As [`Scratch::new`], but the memory is not zeroed.
    fn allocate<P: Pod>(host: &'h dyn Host, len: usize) -> Result<Scratch<'h>, Error> {
        let size = len.checked_mul(size_of::<P>()).filter(|&n| n <= isize::MAX as usize - SCRATCH_ALIGN);
        let Some(size) = size else { return Err(Error::OutOfMemory { bytes: usize::MAX }) };
        let bytes = size + SCRATCH_ALIGN;
        let base = host.allocate(bytes).ok_or(Error::OutOfMemory { bytes })?;
        let offset = base.as_ptr().align_offset(SCRATCH_ALIGN).min(SCRATCH_ALIGN);
        Ok(Scratch { host, base, bytes, offset, len: size })
    }

    /// The memory as elements of `P`.
    pub fn as_mut_slice<P: Pod>(&mut self) -> &mut [P] {
        // SAFETY: offset + len <= bytes; the start is aligned to SCRATCH_ALIGN, which P's alignment divides; the bytes are
        // initialised and every bit pattern is a P; the exclusive borrow of self makes the slice unique.
        unsafe {
            let start = self.base.as_ptr().add(self.offset).cast::<P>();
            std::slice::from_raw_parts_mut(start, self.len / size_of::<P>())
        }
    }
}

/// Scratch memory that is not zeroed, for what is written before it is read.
pub(crate) struct Unwritten<'h>(Scratch<'h>);

impl<'h> Unwritten<'h> {
    /// As [`Scratch::new`].
    pub(crate) fn new<P: Pod>(host: &'h dyn Host, len: usize) -> Result<Unwritten<'h>, Error> {
        Scratch::allocate::<P>(host, len).map(Unwritten)
    }

    /// The start of the memory.
    pub(crate) fn as_mut_ptr<P: Pod>(&self) -> *mut P {
        // SAFETY: offset <= bytes.
        unsafe { self.0.base.as_ptr().add(self.0.offset).cast() }
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        // SAFETY: base and bytes are those of `allocate` in `new`, released only here.
        unsafe { self.host.release(self.base, self.bytes) }
    }
}

/// A host with scoped threads and the global allocator, for tests, benchmarks and callers without a runtime.
#[derive(Debug, Clone, Copy)]
pub struct Threads {
    threads: usize,
}

impl Threads {
    /// A host of `threads` workers, at least one.
    pub fn new(threads: usize) -> Threads {
        Threads { threads: threads.max(1) }
    }

    /// One worker per processor.
    pub fn all() -> Threads {
        Threads::new(std::thread::available_parallelism().map_or(1, usize::from))
    }
}

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.max(1), SCRATCH_ALIGN).ok()
}

// SAFETY: memory comes from the global allocator with the requested size and is freed with the same layout.
unsafe impl Host for Threads {
    fn parallelism(&self) -> usize {
        self.threads
    }

    fn parallel_for(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        let next = std::sync::atomic::AtomicUsize::new(0);
        let drain = || {
            loop {
                let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                if i >= tasks {
                    return;
                }
                task(i);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..self.threads.min(tasks) {
                scope.spawn(drain);
            }
            drain();
        });
    }

    fn allocate(&self, bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: the layout's size is not zero.
        layout(bytes).and_then(|layout| NonNull::new(unsafe { std::alloc::alloc(layout) }))
    }

    unsafe fn release(&self, ptr: NonNull<u8>, bytes: usize) {
        if let Some(layout) = layout(bytes) {
            // SAFETY: `allocate` gave this pointer for the same layout.
            unsafe { std::alloc::dealloc(ptr.as_ptr(), layout) }
        }
    }
}
