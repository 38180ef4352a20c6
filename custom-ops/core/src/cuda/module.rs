//! Images for the GPU, and their kernels once they are loaded: each image once a context.

use super::driver::{Driver, RawFunction, RawModule};
use crate::Error;
use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::sync::{Mutex, PoisonError};

/// Machine code and PTX of one `cuda/*.cu`; the statics are in [`super::modules`].
#[derive(Debug, Clone, Copy)]
pub struct Module {
    name: &'static str,
    image: &'static [u8],
}

impl Module {
    /// An image, as nvcc writes it.
    pub const fn new(name: &'static str, image: &'static [u8]) -> Module {
        Module { name, image }
    }

    /// Whether nothing was compiled.
    pub fn is_empty(&self) -> bool {
        self.image.is_empty()
    }

    /// The file's name without `.cu`.
    pub fn name(&self) -> &'static str {
        self.name
    }
}

/// An entry point of a module.
#[derive(Debug, Clone, Copy)]
pub struct Kernel<'n> {
    /// Where it is.
    pub module: Module,
    /// Its name, as `MOH_KERNEL` declares it.
    pub name: &'n CStr,
}

/// A kernel in a context.
#[derive(Clone, Copy)]
pub(super) struct Function {
    pub(super) raw: RawFunction,
    /// Bytes of dynamic shared memory that it may use.
    pub(super) shared_bytes: u32,
}

#[derive(Default)]
struct Loaded {
    module: Option<RawModule>,
    functions: HashMap<CString, Function>,
}

/// By the context's number, which is never used again, and the module's name. Modules are unloaded with their context.
static LOADED: Mutex<Option<HashMap<(u64, &'static str), Loaded>>> = Mutex::new(None);

/// Dynamic shared memory that every kernel may use without being asked for.
const SHARED_BYTES: u32 = 48 << 10;

/// The kernel in the current context, whose number is `context`, allowed to use `shared_bytes` of dynamic shared memory.
/// Loads its module at the first use.
///
/// # Safety
/// `context` is the number of the current context.
pub(super) unsafe fn function(
    driver: &'static Driver,
    context: u64,
    kernel: Kernel<'_>,
    shared_bytes: u32,
) -> Result<RawFunction, Error> {
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let loaded = loaded.get_or_insert_default().entry((context, kernel.module.name)).or_default();
    if let Some(function) = loaded.functions.get(kernel.name).filter(|f| f.shared_bytes >= shared_bytes) {
        return Ok(function.raw);
    }
    let module = match loaded.module {
        Some(module) => module,
        None => {
            let mut module = RawModule::NULL;
            // SAFETY: the image is a fat binary, which carries its length; a context is current.
            unsafe { driver.module_load_data(&raw mut module, kernel.module.image.as_ptr().cast()) }
                .map_err(|error| error.about(format!("module {}", kernel.module.name)))?;
            *loaded.module.insert(module)
        }
    };
    let mut raw = RawFunction::NULL;
    let named = || format!("kernel {}", kernel.name.to_string_lossy());
    // SAFETY: the module is loaded in the current context; the name is terminated.
    unsafe { driver.module_get_function(&raw mut raw, module, kernel.name.as_ptr()) }
        .map_err(|error| error.about(named()))?;
    let allowed = shared_bytes.max(SHARED_BYTES);
    if allowed > SHARED_BYTES {
        const MAX_DYNAMIC_SHARED_SIZE_BYTES: i32 = 8;
        // SAFETY: a function of the current context.
        unsafe { driver.func_set_attribute(raw, MAX_DYNAMIC_SHARED_SIZE_BYTES, allowed as i32) }
            .map_err(|error| error.about(named()))?;
    }
    loaded.functions.insert(kernel.name.to_owned(), Function { raw, shared_bytes: allowed });
    Ok(raw)
}
