//! Loads kernels from images at their first use: each image once per context.

use crate::driver::Checked;
use crate::modules::Module;
use cudarc::driver::{result, sys};
use moh_operators::Error;
use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::sync::{Mutex, PoisonError};

/// An entry point of a module.
#[derive(Debug, Clone, Copy)]
pub struct Kernel<'n> {
    /// The module that contains it.
    pub module: Module,
    /// Its name, as `MOH_KERNEL` declares it.
    pub name: &'n CStr,
}

/// A kernel loaded in a context.
#[derive(Clone, Copy)]
struct Function {
    raw: sys::CUfunction,
    /// Bytes of dynamic shared memory that it is allowed to use.
    shared_bytes: u32,
}

#[derive(Default)]
struct Loaded {
    module: Option<sys::CUmodule>,
    functions: HashMap<CString, Function>,
}

// SAFETY: the driver's objects can be used on any thread.
unsafe impl Send for Loaded {}

/// Keys are the context's id, which is never reused, and the module's name. Modules are unloaded with their context.
static LOADED: Mutex<Option<HashMap<(u64, &'static str), Loaded>>> = Mutex::new(None);

/// Dynamic shared memory that every kernel can use without an attribute.
const SHARED_BYTES: u32 = 48 << 10;

/// The kernel in the current context (with id `context`), allowed to use `shared_bytes` of dynamic shared memory.
/// Loads its module at the first use.
///
/// # Safety
/// `context` is the id of the current context.
pub(crate) unsafe fn function(context: u64, kernel: Kernel<'_>, shared_bytes: u32) -> Result<sys::CUfunction, Error> {
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let loaded = loaded.get_or_insert_default().entry((context, kernel.module.name())).or_default();
    if let Some(function) = loaded.functions.get(kernel.name).filter(|f| f.shared_bytes >= shared_bytes) {
        return Ok(function.raw);
    }
    let module = match loaded.module {
        Some(module) => module,
        None => {
            // SAFETY: the image is a fat binary, which contains its length; a context is current.
            let module = unsafe { result::module::load_data(kernel.module.image().as_ptr().cast()) };
            *loaded.module.insert(module.about(format_args!("module {}: cuModuleLoadData", kernel.module.name()))?)
        }
    };
    let named = |call: &str| format!("kernel {}: {call}", kernel.name.to_string_lossy());
    // SAFETY: the module is loaded in the current context.
    let raw = unsafe { result::module::get_function(module, kernel.name.to_owned()) };
    let raw = raw.about(named("cuModuleGetFunction"))?;
    let allowed = shared_bytes.max(SHARED_BYTES);
    if allowed > SHARED_BYTES {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a function of the current context.
        let set = unsafe { result::function::set_function_attribute(raw, attribute, allowed as i32) };
        set.about(named("cuFuncSetAttribute"))?;
    }
    loaded.functions.insert(kernel.name.to_owned(), Function { raw, shared_bytes: allowed });
    Ok(raw)
}
