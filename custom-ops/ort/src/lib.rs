//! The `ai.moh` operators as a custom-operator library, `libmoh_ops.so`, for onnxruntime 1.17 and later.
//!
//! A host loads the library and calls [`RegisterCustomOps`]; in Python,
//! `session_options.register_custom_ops_library("libmoh_ops.so")`. The operators of [`moh_operators::OPERATORS`] are
//! registered for every [`moh_operators::DType`] on the CPU provider, and run [`moh_cpu::run_into`]. Not registered are those
//! that [`moh_cpu::is_left_to_body`] on this processor and with the session's settings: the host runs their bodies. With
//! feature `cuda`, and a driver, those that have CUDA kernels are registered on the CUDA provider too, and none of these is
//! left to its body.
//!
//! A model that the host saved in optimised form has no bodies: it loads only where the same operators are registered, which
//! depends on the library, the settings and the processor.
//!
//! The session's config entry `ai.moh.pack_weights`, or the environment variable `MOH_PACK_WEIGHTS`, says which constant
//! weights are kept packed for the kernels in a second copy, which is faster: all (`1`), none (`0`), or, where nothing is said,
//! those that the host maps from a file, whose pages the system can take back. A copy takes 4 bytes per element.
//!
//! The host's C API is accessed through raw tables of version [`API_VERSION`], so one binary works with all hosts.
//! Panics do not unwind into the host; they become error statuses.

mod announce;
mod api;
mod context;
mod cuda;
mod element;
mod failure;
mod guard;
mod host;
mod infer;
mod kernel;
mod label;
mod notice;
mod objects;
mod op;
mod pages;
mod registry;
mod settings;
mod threads;

#[cfg(test)]
mod fake;
#[cfg(test)]
mod tests;

use api::Api;
use failure::Failure;
use guard::{guard, status};
use ort_sys::{OrtApiBase, OrtSessionOptions, OrtStatusPtr};
use std::ffi::CStr;
use std::ptr::NonNull;

/// The version of onnxruntime's C API that the library uses: that of onnxruntime 1.17.
pub const API_VERSION: u32 = 17;

/// Adds the operators to a session's options. onnxruntime looks up this entry point by name.
///
/// Returns null on success; otherwise a status for the host to release: the host does not support API version
/// [`API_VERSION`], or rejects the operators; `MOH_CPU_ISA` names no instruction set of this processor; `MOH_PACK_WEIGHTS`
/// or the session's entry has no valid value. Registering again for the same session options changes nothing.
///
/// # Safety
/// Both pointers are null or belong to a live onnxruntime: its session options, and the result of its `OrtGetApiBase`.
#[unsafe(no_mangle)]
pub unsafe extern "system" fn RegisterCustomOps(
    options: *mut OrtSessionOptions,
    base: *const OrtApiBase,
) -> OrtStatusPtr {
    // SAFETY: a non-null base is valid, by the caller's contract.
    let Some(base) = (unsafe { base.as_ref() }) else {
        return OrtStatusPtr::default();
    };
    // SAFETY: the base belongs to the host.
    match unsafe { Api::new(base, API_VERSION) } {
        Some(api) => guard(api, || {
            let options = NonNull::new(options).ok_or_else(|| Failure::Host("no session options".to_owned()))?;
            // SAFETY: the caller promises live options of this host.
            unsafe { registry::register(api, base, options) }
        }),
        None => unsupported(base),
    }
}

/// The error status for a host that is too old.
fn unsupported(base: &OrtApiBase) -> OrtStatusPtr {
    // SAFETY: the host's function takes no arguments and returns null or a string that lives as long as the host.
    let found = unsafe { (base.GetVersionString)() };
    let found = match found.is_null() {
        true => "an unknown version".into(),
        // SAFETY: not null, hence a NUL-terminated string.
        false => unsafe { CStr::from_ptr(found) }.to_string_lossy(),
    };
    // CreateStatus is the first function of every API version.
    // SAFETY: the base belongs to the host.
    let oldest = (1..API_VERSION).find_map(|version| unsafe { Api::new(base, version) });
    oldest.map_or(OrtStatusPtr::default(), |api| {
        let error = format!("the ai.moh operators need onnxruntime 1.{API_VERSION} or newer, found {found}");
        status(Failure::Host(error), api)
    })
}
