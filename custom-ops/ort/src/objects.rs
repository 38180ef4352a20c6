//! The host's objects that this library owns.

use crate::api::{Api, call};
use crate::failure::Failure;
use ort_sys::{
    ONNXTensorElementDataType, OrtAllocator, OrtAllocatorType, OrtMemType, OrtMemoryInfo, OrtTensorTypeAndShapeInfo,
};
use std::ffi::c_char;
use std::ptr::{self, NonNull};

/// Memory info of CPU memory, by which the host selects its CPU allocator.
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

// SAFETY: the host's allocators are thread-safe and can be released on any thread.
unsafe impl Send for Allocator {}
// SAFETY: as above.
unsafe impl Sync for Allocator {}

impl Allocator {
    /// Takes ownership of an allocator that the host created for this library.
    ///
    /// # Safety
    /// Nothing else releases `raw`.
    pub(crate) unsafe fn from_raw(api: Api, raw: NonNull<OrtAllocator>) -> Allocator {
        Allocator { api, raw }
    }

    /// Allocates `bytes` bytes; `None` if the host has no memory.
    pub(crate) fn allocate(&self, bytes: usize) -> Option<NonNull<u8>> {
        let mut memory = ptr::null_mut();
        // SAFETY: the allocator is alive. AllocatorAlloc converts exceptions of the allocator's own function into a
        // status.
        unsafe { call!(self.api, AllocatorAlloc(self.raw.as_ptr(), bytes, &raw mut memory)) }.ok()?;
        NonNull::new(memory.cast())
    }

    /// The memory info of the memory that this allocates.
    #[cfg(feature = "cuda")]
    pub(crate) fn memory(&self) -> Result<*const OrtMemoryInfo, Failure> {
        let mut memory = ptr::null();
        // SAFETY: the allocator is alive and owns the object that the host writes to the local variable.
        unsafe { call!(self.api, AllocatorGetInfo(self.raw.as_ptr(), &raw mut memory))? };
        Ok(memory)
    }

    /// Frees memory.
    ///
    /// # Safety
    /// `memory` is from an earlier `allocate` on this allocator, and not yet released.
    pub(crate) unsafe fn release(&self, memory: NonNull<u8>) {
        // SAFETY: the caller's contract. An error is ignored, since nothing can be done about it.
        let _ = unsafe { call!(self.api, AllocatorFree(self.raw.as_ptr(), memory.as_ptr().cast())) };
    }
}

impl Drop for Allocator {
    fn drop(&mut self) {
        // SAFETY: owned by self, released only here.
        unsafe { ((*self.api.as_ptr()).ReleaseAllocator)(self.raw.as_ptr()) }
    }
}

/// A tensor's type and shape, created by the host for this library.
pub(crate) struct TensorInfo {
    api: Api,
    raw: NonNull<OrtTensorTypeAndShapeInfo>,
}

impl TensorInfo {
    /// Creates a type and shape for the host. A dimension is its size, or -1 and a name.
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
        // SAFETY: the slices have the passed lengths; the names are NUL-terminated, and the host copies them.
        unsafe {
            call!(api, SetTensorElementType(info.raw.as_ptr(), ty))?;
            call!(api, SetDimensions(info.raw.as_ptr(), sizes.as_ptr(), sizes.len()))?;
            call!(api, SetSymbolicDimensions(info.raw.as_ptr(), names.as_mut_ptr(), names.len()))?;
        }
        Ok(info)
    }

    /// Takes ownership of an object that the host created.
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

/// Checks a pointer returned by the host: returning null without an error breaks the API's contract.
pub(crate) fn made<T>(raw: *mut T, what: &str) -> Result<NonNull<T>, Failure> {
    NonNull::new(raw).ok_or_else(|| Failure::Host(format!("onnxruntime returned no {what}")))
}
