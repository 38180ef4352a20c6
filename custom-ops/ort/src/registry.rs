//! The operators of the process, as the host sees them: one domain for each host and each choice of settings.
//!
//! Sessions keep pointers to a domain and to its operators, and onnxruntime may unload a library with the last session
//! that loaded it. Domains and operators are therefore made once, never freed, and shared by all sessions, and the linker
//! is told (`build.rs`) to keep the library loaded, so that loading it again finds them.

use crate::announce::announce;
use crate::api::{Api, call};
use crate::cuda;
use crate::failure::Failure;
use crate::kernel::Kernel;
use crate::objects::made;
use crate::op::CustomOp;
use crate::settings::{PackWeights, Settings};
use moh_operators::{DOMAIN, DType, OPERATORS};
use ort_sys::{OrtApiBase, OrtCustomOpDomain, OrtSessionOptions};
use std::ffi::CString;
use std::ptr::{self, NonNull};
use std::sync::{Mutex, PoisonError};

struct Domain {
    api: Api,
    settings: Settings,
    raw: NonNull<OrtCustomOpDomain>,
}

// SAFETY: complete before it is stored, and only read from then on.
unsafe impl Send for Domain {}

/// A process may hold several hosts: copies of onnxruntime in different libraries.
static DOMAINS: Mutex<Vec<Domain>> = Mutex::new(Vec::new());

/// Adds the operators to a session's options.
///
/// # Safety
/// `options` are live options of the host.
pub(crate) unsafe fn register(api: Api, base: &OrtApiBase, options: NonNull<OrtSessionOptions>) -> Result<(), Failure> {
    // A name that is no instruction set fails here, when the session is made, and not in its first run.
    moh_cpu::instruction_set()?;
    // SAFETY: the options are alive, as promised.
    let settings = unsafe { Settings::read(api, options)? };
    // SAFETY: as above.
    if unsafe { settings.are_registered(api, options)? } {
        return Ok(());
    }
    let domain = domain(api, base, settings)?;
    // SAFETY: the options are alive, as promised; the domain is never freed.
    unsafe {
        call!(api, AddCustomOpDomain(options.as_ptr(), domain.as_ptr()))?;
        settings.note(api, options)
    }
}

/// The host's domain for these settings, made at its first use.
fn domain(api: Api, base: &OrtApiBase, settings: Settings) -> Result<NonNull<OrtCustomOpDomain>, Failure> {
    let mut domains = DOMAINS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(domain) = domains.iter().find(|domain| domain.api == api && domain.settings == settings) {
        return Ok(domain.raw);
    }
    let name = CString::new(DOMAIN).unwrap_or_default();
    let mut raw = ptr::null_mut();
    // SAFETY: the name is terminated, and copied; the host writes a new object to a local variable.
    unsafe { call!(api, CreateCustomOpDomain(name.as_ptr(), &raw mut raw))? };
    let raw = made(raw, "operator domain")?;
    let cuda = cuda::host(base);
    let packs = settings.pack_weights != PackWeights::Never;
    for (operator, dtype) in OPERATORS.iter().flat_map(|operator| DType::ALL.map(|dtype| (*operator, dtype))) {
        let on_cuda = cuda.clone().and_then(|api| cuda::custom_op(api, operator, dtype, settings));
        // An operator that is registered for GPUs alone would have no kernel in sessions on the CPU: they would not run its body.
        if on_cuda.is_err() && moh_cpu::is_left_to_body(operator, settings.precision, packs) {
            continue;
        }
        let on_cpu = CustomOp::new::<Kernel>(api, operator, dtype, settings, on_cuda.as_ref().err().cloned());
        for op in [Some(on_cpu), on_cuda.ok()].into_iter().flatten() {
            let op: &'static CustomOp = Box::leak(Box::new(op));
            // SAFETY: domain and operator are alive for good.
            unsafe { call!(api, CustomOpDomain_Add(raw.as_ptr(), op.as_ptr()))? };
        }
    }
    // Without it all works but for the first sessions made at once, which is no reason to refuse this one.
    if !domains.iter().any(|domain| domain.api == api) {
        let _ = announce(api, raw);
    }
    domains.push(Domain { api, settings, raw });
    Ok(raw)
}
