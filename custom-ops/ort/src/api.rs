//! The host's function table, and its errors.

use ort_sys::{OrtApi, OrtApiBase, OrtErrorCode, OrtStatus, OrtStatusPtr};
use std::ffi::{CStr, CString};
use std::fmt;
use std::ptr::NonNull;

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
