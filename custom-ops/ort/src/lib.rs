//! The `ai.moh` operators as a custom-operator library, `libmoh_ops.so`, for any onnxruntime from 1.17 on.
//!
//! A host loads the library and calls [`RegisterCustomOps`]; in Python,
//! `session_options.register_custom_ops_library("libmoh_ops.so")`. Every operator of [`moh_operators::OPERATORS`] is
//! registered for every [`moh_operators::DType`] on the CPU provider, and runs [`moh_cpu::run_into`]. With feature `cuda`, and
//! a driver, those that have CUDA kernels are registered on the CUDA provider too.
//!
//! A session whose config entry `ai.moh.pack_weights` is `1` when the library is registered, or whose process has
//! `MOH_PACK_WEIGHTS=1`, keeps a second copy of constant weights, packed for the kernels: faster, for 4 bytes an element more.
//!
//! The host's C API is used through raw tables of version [`API_VERSION`], so one binary serves all hosts.
//! Nothing unwinds into the host: a panic becomes an error status.

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

/// The version of onnxruntime's C API that the library asks for: that of onnxruntime 1.17.
pub const API_VERSION: u32 = 17;

/// Adds the operators to a session's options; the entry point that onnxruntime looks up by name.
///
/// Returns null on success, else a status for the host to release: the host has no API of version [`API_VERSION`], or
/// refuses the operators; `MOH_CPU_ISA` names no instruction set of this processor; `MOH_PACK_WEIGHTS` or the session's entry has no
/// such value. To register again for the same session options changes nothing.
///
/// # Safety
/// Both pointers are null, or those of a live onnxruntime: its session options, and what its `OrtGetApiBase` returns.
#[unsafe(no_mangle)]
pub unsafe extern "system" fn RegisterCustomOps(
    options: *mut OrtSessionOptions,
    base: *const OrtApiBase,
) -> OrtStatusPtr {
    // SAFETY: a non-null base is valid, as the caller promises.
    let Some(base) = (unsafe { base.as_ref() }) else {
        return OrtStatusPtr::default();
    };
    // SAFETY: the base is the host's.
    match unsafe { Api::new(base, API_VERSION) } {
        Some(api) => guard(api, || {
            let options = NonNull::new(options).ok_or_else(|| Failure::Host("no session options".to_owned()))?;
            // SAFETY: the caller promises live options of this host.
            unsafe { registry::register(api, base, options) }
        }),
        None => unsupported(base),
    }
}

/// The error for a host that is too old.
fn unsupported(base: &OrtApiBase) -> OrtStatusPtr {
    // SAFETY: the host's function takes no arguments and returns null or a string that lives as long as the host.
    let found = unsafe { (base.GetVersionString)() };
    let found = match found.is_null() {
        true => "an unknown version".into(),
        // SAFETY: not null, hence a terminated string.
        false => unsafe { CStr::from_ptr(found) }.to_string_lossy(),
    };
    // CreateStatus is the first function of every API version.
    // SAFETY: the base is the host's.
    let oldest = (1..API_VERSION).find_map(|version| unsafe { Api::new(base, version) });
    oldest.map_or(OrtStatusPtr::default(), |api| {
        let error = format!("the ai.moh operators need onnxruntime 1.{API_VERSION} or newer, found {found}");
        status(Failure::Host(error), api)
    })
}
