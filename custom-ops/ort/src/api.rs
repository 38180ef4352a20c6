//! The host's table of API functions, and its errors.

use ort_sys::{OrtApi, OrtApiBase, OrtErrorCode, OrtStatus, OrtStatusPtr};
use std::ffi::{CStr, CString};
use std::fmt;
use std::ptr::NonNull;

/// The host's API functions.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Api(NonNull<OrtApi>);

// SAFETY: the table is constant and lives as long as the host's library; its functions can be called on any thread.
unsafe impl Send for Api {}
// SAFETY: as above.
unsafe impl Sync for Api {}

/// Calls a function of an [`Api`] that returns a status, converted to `Err` with a [`Status`] on failure.
///
/// Reads the function through the raw pointer: an older host's table is shorter than `OrtApi`, so a reference to the
/// whole must not exist.
macro_rules! call {
    ($api:expr, $function:ident($($argument:expr),* $(,)?)) => {{
        let api = $api;
        let status = ((*api.as_ptr()).$function)($($argument),*);
        $crate::api::Status::check(api, status)
    }};
}
pub(crate) use call;

impl Api {
    /// The host's API functions of this version; `None` if the host does not support it.
    ///
    /// # Safety
    /// `base` belongs to a live onnxruntime.
    pub(crate) unsafe fn new(base: &OrtApiBase, version: u32) -> Option<Api> {
        // SAFETY: `GetApi` accepts any version number.
        let api = unsafe { (base.GetApi)(version) };
        NonNull::new(api.cast_mut()).map(Api)
    }

    pub(crate) fn as_ptr(self) -> *const OrtApi {
        self.0.as_ptr()
    }

    /// Creates a status, which the host releases. NUL bytes are removed from the message.
    pub(crate) fn status(self, code: OrtErrorCode, message: &str) -> OrtStatusPtr {
        let message = CString::new(message.replace('\0', "")).unwrap_or_default();
        // SAFETY: the message is NUL-terminated, and the host copies it.
        unsafe { ((*self.as_ptr()).CreateStatus)(code, message.as_ptr()) }
    }
}

/// An error of the host.
pub(crate) struct Status {
    api: Api,
    raw: NonNull<OrtStatus>,
}

impl Status {
    /// `Err` if the host returned a status, of which this takes ownership.
    pub(crate) fn check(api: Api, status: OrtStatusPtr) -> Result<(), Status> {
        NonNull::new(status.0).map_or(Ok(()), |raw| Err(Status { api, raw }))
    }

    /// Passes ownership of the status to the caller, who releases it.
    pub(crate) fn into_raw(self) -> OrtStatusPtr {
        let raw = self.raw;
        std::mem::forget(self);
        OrtStatusPtr(raw.as_ptr())
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: the status is alive; its message is a NUL-terminated string inside it.
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
