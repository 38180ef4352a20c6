//! A worker's memory: one allocation, cut into sections of floats.

use crate::host::{Host, Scratch, Unwritten};
use crate::isa::MAX_LANES;
use moh_operators::Error;
use std::alloc::Layout;
use std::ops::Range;
use std::ptr::NonNull;

/// The row stride of matrices with `dim` columns that are accessed in whole vectors.
pub(crate) fn pitch(dim: usize) -> usize {
    dim.saturating_add(MAX_LANES - 1) / MAX_LANES * MAX_LANES
}

/// The sizes of the sections to allocate.
#[derive(Default)]
pub(crate) struct Sections {
    len: usize,
}

impl Sections {
    /// Adds a section of `rows * columns` floats, aligned to a cache line; returns its offset.
    pub(crate) fn add(&mut self, rows: usize, columns: usize) -> Result<usize, Error> {
        let start = self.len;
        let len = rows.checked_mul(columns).and_then(|n| n.checked_next_multiple_of(MAX_LANES));
        let end = len.and_then(|n| n.checked_add(start));
        self.len = end.ok_or(Error::OutOfMemory { bytes: usize::MAX })?;
        Ok(start)
    }

    /// Allocates all sections.
    pub(crate) fn allocate<'h>(&self, host: &'h dyn Host) -> Result<Memory<'h>, Error> {
        let mut scratch = Scratch::new::<f32>(host, self.len)?;
        let base = scratch.as_mut_slice::<f32>().as_mut_ptr();
        Ok(Memory { base, len: self.len, _scratch: scratch })
    }

    /// Allocates all sections, whose contents are undefined.
    pub(crate) fn allocate_unwritten<'h>(&self, host: &'h dyn Host) -> Result<Uncleared<'h>, Error> {
        Ok(Uncleared { len: self.len, floats: Unwritten::new::<f32>(host, self.len)? })
    }
}

/// The sections as floats that are undefined until they are written.
pub(crate) struct Uncleared<'h> {
    len: usize,
    floats: Unwritten<'h>,
}

impl Uncleared<'_> {
    /// Pointer to the float at `offset`.
    #[inline(always)]
    pub(crate) fn at(&self, offset: usize) -> *mut f32 {
        assert!(offset <= self.len, "offset {offset} of {} floats", self.len);
        // SAFETY: inside the allocation, or one past its end.
        unsafe { self.floats.as_mut_ptr::<f32>().add(offset) }
    }

    /// Makes all of them 0.
    pub(crate) fn clear(&mut self) {
        // SAFETY: the allocation has this length, and `self` is borrowed exclusively.
        unsafe { self.floats.as_mut_ptr::<f32>().write_bytes(0, self.len) }
    }
}

/// The sections as one array of floats.
pub(crate) struct Memory<'h> {
    // Taken once: another exclusive borrow of the scratch would invalidate the pointers already handed out.
    base: *mut f32,
    len: usize,
    _scratch: Scratch<'h>,
}

impl Memory<'_> {
    /// Pointer to the float at `offset`.
    #[inline(always)]
    pub(crate) fn at(&self, offset: usize) -> *mut f32 {
        assert!(offset <= self.len, "offset {offset} of {} floats", self.len);
        // SAFETY: inside the allocation, or one past its end.
        unsafe { self.base.add(offset) }
    }

    /// The floats in `range`.
    pub(crate) fn slice(&mut self, range: Range<usize>) -> &mut [f32] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} floats", self.len);
        // SAFETY: inside the allocation, which is initialised; the exclusive borrow of self makes the slice unique.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(range.start), range.len()) }
    }
}

/// Memory for what is packed once: floats that are undefined until they are written. In huge pages where the system has them: kernels read
/// it from one end to the other, and from several places at a time.
pub(crate) struct Pages {
    floats: NonNull<f32>,
    layout: Layout,
}

// SAFETY: it owns its memory.
unsafe impl Send for Pages {}
// SAFETY: shared references only read.
unsafe impl Sync for Pages {}

impl Pages {
    /// `None` if there is not enough memory for `len` floats.
    pub(crate) fn new(len: usize) -> Option<Pages> {
        const LINE: usize = 64;
        const HUGE: usize = 2 << 20;
        let bytes = len.max(1).checked_mul(size_of::<f32>())?;
        let layout = Layout::from_size_align(bytes, if bytes < HUGE { LINE } else { HUGE }).ok()?;
        // SAFETY: the size is not 0.
        let floats = NonNull::new(unsafe { std::alloc::alloc(layout) })?.cast::<f32>();
        #[cfg(target_os = "linux")]
        if bytes >= HUGE {
            // A wish: without huge pages it works as well.
            // SAFETY: the memory is ours, and keeps its contents.
            unsafe { libc::madvise(floats.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
        }
        Some(Pages { floats, layout })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.layout.size()
    }

    pub(crate) fn as_ptr(&self) -> *const f32 {
        self.floats.as_ptr()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut f32 {
        self.floats.as_ptr()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `new`, and freed only here.
        unsafe { std::alloc::dealloc(self.floats.as_ptr().cast(), self.layout) }
    }
}
