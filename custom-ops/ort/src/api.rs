//! The host's function table, and the objects of the host that this library owns.

use crate::failure::Failure;
use ort_sys::{
    ONNXTensorElementDataType, OrtAllocator, OrtAllocatorType, OrtApi, OrtApiBase, OrtErrorCode, OrtMemType,
    OrtMemoryInfo, OrtStatus, OrtStatusPtr, OrtTensorTypeAndShapeInfo,
};
use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::ptr::{self, NonNull};

/// The host's functions.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Api(NonNull<OrtApi>);

// SAFETY: the table is constant and lives as long as the host's library; its functions may be called on any thread.
unsafe impl Send for Api {}
// SAFETY: as above.
unsafe impl Sync for Api {}

/// Calls a function of an [`Api`] that returns a status; `Err` is a [`Status`].
///
/// The function is read through the raw pointer: an older host's table is shorter than `OrtApi`, so that no reference to
/// the whole may exist.
macro_rules! call {
    ($api:expr, $function:ident($($argument:expr),* $(,)?)) => {{
        let api = $api;
        let status = ((*api.as_ptr()).$function)($($argument),*);
        $crate::api::Status::check(api, status)
    }};
}
pub(crate) use call;

impl Api {
    /// The host's functions of that API version, or `None` where it does not have them.
    ///
    /// # Safety
    /// `base` is a live onnxruntime's.
    pub(crate) unsafe fn new(base: &OrtApiBase, version: u32) -> Option<Api> {
        // SAFETY: any version may be asked for.
        let api = unsafe { (base.GetApi)(version) };
        NonNull::new(api.cast_mut()).map(Api)
    }

    pub(crate) fn as_ptr(self) -> *const OrtApi {
        self.0.as_ptr()
    }

    /// A new status, which the host releases. NUL bytes are left out of the message.
    pub(crate) fn status(self, code: OrtErrorCode, message: &str) -> OrtStatusPtr {
        let message = CString::new(message.replace('\0', "")).unwrap_or_default();
        // SAFETY: the message is terminated, and copied by the host.
        unsafe { ((*self.as_ptr()).CreateStatus)(code, message.as_ptr()) }
    }
}

/// An error of the host.
pub(crate) struct Status {
    api: Api,
    raw: NonNull<OrtStatus>,
}

impl Status {
    /// `Err` where the host returned a status; takes it over.
    pub(crate) fn check(api: Api, status: OrtStatusPtr) -> Result<(), Status> {
        NonNull::new(status.0).map_or(Ok(()), |raw| Err(Status { api, raw }))
    }

    /// Gives the status to the caller, who releases it.
    pub(crate) fn into_raw(self) -> OrtStatusPtr {
        let raw = self.raw;
        std::mem::forget(self);
        OrtStatusPtr(raw.as_ptr())
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: the status is alive, and the host's message is a terminated string inside it.
        let message = unsafe { CStr::from_ptr(((*self.api.as_ptr()).GetErrorMessage)(self.raw.as_ptr())) };
        f.write_str(&message.to_string_lossy())
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Drop for Status {
    fn drop(&mut self) {
        // SAFETY: owned by self, released only here.
        unsafe { ((*self.api.as_ptr()).ReleaseStatus)(self.raw.as_ptr()) }
    }
}

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
