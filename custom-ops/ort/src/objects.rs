//! The objects of the host that this library owns.

use crate::api::{Api, call};
use crate::failure::Failure;
use ort_sys::{
    ONNXTensorElementDataType, OrtAllocator, OrtAllocatorType, OrtMemType, OrtMemoryInfo, OrtTensorTypeAndShapeInfo,
};
use std::ffi::c_char;
use std::ptr::{self, NonNull};

/// The description of ordinary memory, by which the host finds its CPU allocator.
pub(crate) struct CpuMemory {
    api: Api,
    raw: NonNull<OrtMemoryInfo>,
}

// SAFETY: constant after its creation.
unsafe impl Send for CpuMemory {}
// SAFETY: as above.
unsafe impl Sync for CpuMemory {}

impl CpuMemory {
    pub(crate) fn new(api: Api) -> Result<CpuMemory, Failure> {
        let mut raw = ptr::null_mut();
        // SAFETY: the host writes a new object to a local variable.
        unsafe {
            call!(
                api,
                CreateCpuMemoryInfo(OrtAllocatorType::OrtArenaAllocator, OrtMemType::OrtMemTypeDefault, &raw mut raw)
            )?;
        }
        Ok(CpuMemory { api, raw: made(raw, "memory description")? })
    }

    pub(crate) fn as_ptr(&self) -> *const OrtMemoryInfo {
        self.raw.as_ptr()
    }
}

impl Drop for CpuMemory {
    fn drop(&mut self) {
        // SAFETY: owned by self, released only here.
        unsafe { ((*self.api.as_ptr()).ReleaseMemoryInfo)(self.raw.as_ptr()) }
    }
}

/// An allocator of the host.
pub(crate) struct Allocator {
    api: Api,
    raw: NonNull<OrtAllocator>,
}

// SAFETY: the host's allocators lock, and may be used and released on any thread.
unsafe impl Send for Allocator {}
// SAFETY: as above.
unsafe impl Sync for Allocator {}

impl Allocator {
    /// Takes over an allocator that the host made for this library.
    ///
    /// # Safety
    /// Nothing else releases `raw`.
    pub(crate) unsafe fn from_raw(api: Api, raw: NonNull<OrtAllocator>) -> Allocator {
        Allocator { api, raw }
    }

    /// `bytes` bytes, or `None` where the host has no memory.
    pub(crate) fn allocate(&self, bytes: usize) -> Option<NonNull<u8>> {
        let mut memory = ptr::null_mut();
        // SAFETY: the allocator is alive. AllocatorAlloc reports the exception that the allocator's own function would throw.
        unsafe { call!(self.api, AllocatorAlloc(self.raw.as_ptr(), bytes, &raw mut memory)) }.ok()?;
        NonNull::new(memory.cast())
    }

    /// What kind of memory this allocates.
    #[cfg(feature = "cuda")]
    pub(crate) fn memory(&self) -> Result<*const OrtMemoryInfo, Failure> {
        let mut memory = ptr::null();
        // SAFETY: the allocator is alive, and owns what the host writes to the local variable.
        unsafe { call!(self.api, AllocatorGetInfo(self.raw.as_ptr(), &raw mut memory))? };
        Ok(memory)
    }

    /// Gives memory back.
    ///
    /// # Safety
    /// `memory` is of an earlier `allocate` on this allocator, and not released yet.
    pub(crate) unsafe fn release(&self, memory: NonNull<u8>) {
        // SAFETY: as promised. A failure to free leaves nothing to be done.
        let _ = unsafe { call!(self.api, AllocatorFree(self.raw.as_ptr(), memory.as_ptr().cast())) };
    }
}

impl Drop for Allocator {
    fn drop(&mut self) {
        // SAFETY: owned by self, released only here.
        unsafe { ((*self.api.as_ptr()).ReleaseAllocator)(self.raw.as_ptr()) }
    }
}

/// A tensor's type and shape that the host made for this library.
pub(crate) struct TensorInfo {
    api: Api,
    raw: NonNull<OrtTensorTypeAndShapeInfo>,
}

impl TensorInfo {
    /// A type and shape for the host; a dimension is its size, or -1 and a name.
    pub(crate) fn new(
        api: Api,
        ty: ONNXTensorElementDataType,
        sizes: &[i64],
        names: &mut [*const c_char],
    ) -> Result<TensorInfo, Failure> {
        let mut raw = ptr::null_mut();
        // SAFETY: the host writes a new object to a local variable.
        unsafe { call!(api, CreateTensorTypeAndShapeInfo(&raw mut raw))? };
        let info = TensorInfo { api, raw: made(raw, "shape")? };
        // SAFETY: the slices are as long as said; the names are terminated strings, and copied.
        unsafe {
            call!(api, SetTensorElementType(info.raw.as_ptr(), ty))?;
            call!(api, SetDimensions(info.raw.as_ptr(), sizes.as_ptr(), sizes.len()))?;
            call!(api, SetSymbolicDimensions(info.raw.as_ptr(), names.as_mut_ptr(), names.len()))?;
        }
        Ok(info)
    }

    /// Takes over what the host made.
    ///
    /// # Safety
    /// Nothing else releases `raw`.
    pub(crate) unsafe fn from_raw(api: Api, raw: NonNull<OrtTensorTypeAndShapeInfo>) -> TensorInfo {
        TensorInfo { api, raw }
    }

    pub(crate) fn as_ptr(&self) -> *const OrtTensorTypeAndShapeInfo {
        self.raw.as_ptr()
    }
}

impl Drop for TensorInfo {
    fn drop(&mut self) {
        // SAFETY: owned by self, released only here.
        unsafe { ((*self.api.as_ptr()).ReleaseTensorTypeAndShapeInfo)(self.raw.as_ptr()) }
    }
}

/// What the host made; to return nothing without an error breaks its contract.
pub(crate) fn made<T>(raw: *mut T, what: &str) -> Result<NonNull<T>, Failure> {
    NonNull::new(raw).ok_or_else(|| Failure::Host(format!("onnxruntime returned no {what}")))
}
