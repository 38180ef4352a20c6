//! Products of dense layers by NVIDIA's cuBLASLt, where the process has loaded it, as every onnxruntime with CUDA has: nothing is linked, and
//! no other process pays for the library. Elsewhere our own kernels multiply. Whether it is there is asked once, by the first dense layer.
//!
//! The functions' declarations and the numbers of attributes are those of `cublasLt.h`, which are the same in CUDA 12 and 13.

use crate::driver::{RawPtr, RawStream};
use crate::stream::Stream;
use crate::workspace::Workspace;
use libloading::Library;
use moh_operators::{DType, Error};
use std::collections::HashMap;
use std::ffi::{OsStr, c_int, c_void};
use std::ptr::{self, null_mut};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Environment variable with the path of the library; with `0`, none is used.
pub const CUBLASLT_VARIABLE: &str = "MOH_CUDA_CUBLASLT";

/// Names of the library, of which one that the process has loaded is used.
const NAMES: [&str; 2] = ["libcublasLt.so.13", "libcublasLt.so.12"];

/// Bytes of workspace that a product may take; NVIDIA recommends 32 MiB for Hopper.
const WORKSPACE: usize = 32 << 20;
/// Alignment of pointers in bytes up to which the library tells them apart.
const ALIGN: u64 = 256;
/// Products whose choice is kept: every number of rows is one.
const KEPT: usize = 4096;

/// What is done with a sum, and a bias, before it is rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Epilogue {
    Nothing,
    Relu,
    /// With the approximation by tanh.
    Gelu,
}

impl Epilogue {
    /// `cublasLtEpilogue_t`.
    fn number(self, has_bias: bool) -> u32 {
        match (self, has_bias) {
            (Epilogue::Nothing, false) => 1,
            (Epilogue::Nothing, true) => 4,
            (Epilogue::Relu, false) => 2,
            (Epilogue::Relu, true) => 6,
            (Epilogue::Gelu, false) => 32,
            (Epilogue::Gelu, true) => 36,
        }
    }
}

/// `x (rows, depth) W (depth, columns)`, row by row, with what is done to it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Product {
    pub(crate) x: RawPtr,
    pub(crate) weight: RawPtr,
    /// (columns); null if there is none.
    pub(crate) bias: RawPtr,
    /// (rows, columns), added to the sums; null if there is none.
    pub(crate) residual: RawPtr,
    pub(crate) output: RawPtr,
    pub(crate) rows: usize,
    pub(crate) depth: usize,
    pub(crate) columns: usize,
    pub(crate) dtype: DType,
    pub(crate) epilogue: Epilogue,
}

/// What a choice depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    context: u64,
    sizes: [usize; 3],
    dtype: DType,
    epilogue: u32,
    /// Of the weight, x, the residual, and the output.
    aligned: [u32; 4],
}

impl Product {
    /// What is added to the sums, times 0 if there is no residual.
    fn added(&self) -> RawPtr {
        if self.residual == 0 { self.output } else { self.residual }
    }

    fn key(&self, context: u64) -> Key {
        let aligned = |at: RawPtr| (1u64 << at.trailing_zeros().min(ALIGN.trailing_zeros())) as u32;
        Key {
            context,
            sizes: [self.rows, self.depth, self.columns],
            dtype: self.dtype,
            epilogue: self.epilogue.number(self.bias != 0),
            aligned: [self.weight, self.x, self.added(), self.output].map(aligned),
        }
    }
}

/// A handle of the library.
type Handle = *mut c_void;
type Status = c_int;

/// The library's functions. They can be called by several threads at once.
struct Functions {
    create: unsafe extern "C" fn(*mut Handle) -> Status,
    create_product: unsafe extern "C" fn(*mut Handle, c_int, c_int) -> Status,
    set_product: unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Status,
    destroy_product: unsafe extern "C" fn(Handle) -> Status,
    create_layout: unsafe extern "C" fn(*mut Handle, c_int, u64, u64, i64) -> Status,
    destroy_layout: unsafe extern "C" fn(Handle) -> Status,
    create_preference: unsafe extern "C" fn(*mut Handle) -> Status,
    set_preference: unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Status,
    destroy_preference: unsafe extern "C" fn(Handle) -> Status,
    choose: unsafe extern "C" fn(
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        c_int,
        *mut Choice,
        *mut c_int,
    ) -> Status,
    multiply: unsafe extern "C" fn(
        Handle,
        Handle,
        *const c_void,
        *const c_void,
        Handle,
        *const c_void,
        Handle,
        *const c_void,
        *const c_void,
        Handle,
        *mut c_void,
        Handle,
        *const Algorithm,
        *mut c_void,
        usize,
        RawStream,
    ) -> Status,
}

/// `cublasLtMatmulAlgo_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Algorithm([u64; 8]);

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Choice {
    algorithm: Algorithm,
    workspace: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

/// `cudaDataType_t`.
const REAL_32: c_int = 0;
/// `cublasComputeType_t`: sums in float32, and of float32 without narrower types.
const COMPUTE_32: c_int = 68;
/// `cublasLtMatmulDescAttributes_t`.
const EPILOGUE: c_int = 7;
const BIAS_POINTER: c_int = 8;
/// `cublasLtMatmulPreferenceAttributes_t`: of the workspace, of how parts of sums are added up, and the first of four alignments.
const MOST_WORKSPACE: c_int = 1;
const REDUCTIONS: c_int = 3;
const ALIGNMENTS: c_int = 5;

/// `cublasLtReductionScheme_t`: parts are added up in float32. (Others round them to the output's type.)
const IN_FLOAT32: u32 = 2;

fn data_type(dtype: DType) -> c_int {
    match dtype {
        DType::F16 => 2,
        DType::BF16 => 14,
        _ => REAL_32,
    }
}

impl Functions {
    /// Those of the library that the process has loaded, or of the one that is named; `None` if there is none.
    ///
    /// # Errors
    /// The named library cannot be used.
    fn get() -> Result<Option<&'static Functions>, Error> {
        static FUNCTIONS: OnceLock<Result<Option<Functions>, String>> = OnceLock::new();
        let found = FUNCTIONS.get_or_init(Functions::find).as_ref();
        found
            .map(Option::as_ref)
            .map_err(|error| Error::Cuda { what: CUBLASLT_VARIABLE.to_owned(), error: error.clone() })
    }

    fn find() -> Result<Option<Functions>, String> {
        let named = std::env::var_os(CUBLASLT_VARIABLE).filter(|path| !path.is_empty());
        let functions = |library| Functions::of(library).map_err(|error| error.to_string());
        match named {
            Some(path) if path == "0" => Ok(None),
            Some(path) => {
                // SAFETY: loading NVIDIA's library runs only its own initialisers.
                let library = unsafe { Library::new(path) };
                library.map_err(|error| error.to_string()).and_then(functions).map(Some)
            }
            None => Ok(NAMES.into_iter().find_map(|name| Functions::of(loaded(name.as_ref())?).ok())),
        }
    }

    fn of(library: Library) -> Result<Functions, libloading::Error> {
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the function has this type in `cublasLt.h`.
                *unsafe { library.get(concat!($name, "\0").as_bytes()) }?
            };
        }
        let functions = Functions {
            create: symbol!("cublasLtCreate"),
            create_product: symbol!("cublasLtMatmulDescCreate"),
            set_product: symbol!("cublasLtMatmulDescSetAttribute"),
            destroy_product: symbol!("cublasLtMatmulDescDestroy"),
            create_layout: symbol!("cublasLtMatrixLayoutCreate"),
            destroy_layout: symbol!("cublasLtMatrixLayoutDestroy"),
            create_preference: symbol!("cublasLtMatmulPreferenceCreate"),
            set_preference: symbol!("cublasLtMatmulPreferenceSetAttribute"),
            destroy_preference: symbol!("cublasLtMatmulPreferenceDestroy"),
            choose: symbol!("cublasLtMatmulAlgoGetHeuristic"),
            multiply: symbol!("cublasLtMatmul"),
        };
        // Never unloaded.
        std::mem::forget(library);
        Ok(functions)
    }
}

/// The library of that name if the process has loaded it.
#[cfg(target_os = "linux")]
fn loaded(name: &OsStr) -> Option<Library> {
    use libloading::os::unix;
    /// `RTLD_NOLOAD`.
    const NO_LOAD: c_int = 4;
    // SAFETY: the library is loaded, so nothing of it runs.
    unsafe { unix::Library::open(Some(name), unix::RTLD_NOW | NO_LOAD) }.ok().map(Library::from)
}

#[cfg(not(target_os = "linux"))]
fn loaded(_: &OsStr) -> Option<Library> {
    None
}

/// An object of the library, and what frees it.
struct Owned(Handle, unsafe extern "C" fn(Handle) -> Status);

impl Owned {
    /// The object that `make` creates, unless it fails.
    fn new(free: unsafe extern "C" fn(Handle) -> Status, make: impl FnOnce(*mut Handle) -> Status) -> Option<Owned> {
        let mut made = null_mut();
        (make(&raw mut made) == 0).then_some(Owned(made, free))
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: nothing uses the object any more.
        unsafe { (self.1)(self.0) };
    }
}

/// How a product is computed.
struct Plan {
    functions: &'static Functions,
    handle: Handle,
    weight: Owned,
    x: Owned,
    output: Owned,
    choice: Choice,
}

// SAFETY: the library's objects can be used on any thread; these are not changed any more.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

impl Plan {
    /// The library's own choice; `None` if it has none.
    fn new(functions: &'static Functions, handle: Handle, product: &Product, key: &Key) -> Option<Plan> {
        let (rows, depth, columns) = (product.rows as u64, product.depth as u64, product.columns as u64);
        // The library's matrices are column by column, so these are the transposed ones: W^T x^T.
        let layout = |rows: u64, columns: u64| {
            // SAFETY: an object is created in a local variable.
            let make =
                |at| unsafe { (functions.create_layout)(at, data_type(product.dtype), rows, columns, rows as i64) };
            Owned::new(functions.destroy_layout, make)
        };
        let (weight, x, output) = (layout(columns, depth)?, layout(depth, rows)?, layout(columns, rows)?);
        let described = describe(functions, product, key)?;
        // SAFETY: as above.
        let preference = Owned::new(functions.destroy_preference, |at| unsafe { (functions.create_preference)(at) })?;
        let set = |attribute: c_int, value: *const c_void, bytes: usize| {
            // SAFETY: the value has so many bytes.
            (unsafe { (functions.set_preference)(preference.0, attribute, value, bytes) } == 0).then_some(())
        };
        set(MOST_WORKSPACE, ptr::from_ref(&WORKSPACE).cast(), size_of_val(&WORKSPACE))?;
        set(REDUCTIONS, ptr::from_ref(&IN_FLOAT32).cast(), size_of_val(&IN_FLOAT32))?;
        for (i, aligned) in key.aligned.iter().enumerate() {
            set(ALIGNMENTS + i as c_int, ptr::from_ref(aligned).cast(), size_of_val(aligned))?;
        }
        let (mut choice, mut found) = (Choice::default(), 0);
        let (description, output_layout) = (described.0, output.0);
        // SAFETY: the objects are alive, and there is room for one choice.
        let status = unsafe {
            let (weight, x, preference) = (weight.0, x.0, preference.0);
            (functions.choose)(
                handle,
                description,
                weight,
                x,
                output_layout,
                output_layout,
                preference,
                1,
                &raw mut choice,
                &raw mut found,
            )
        };
        let usable = status == 0 && found > 0 && choice.state == 0 && choice.workspace <= WORKSPACE;
        usable.then_some(Plan { functions, handle, weight, x, output, choice })
    }
}

/// The operation, with the product's pointers.
fn describe(functions: &'static Functions, product: &Product, key: &Key) -> Option<Owned> {
    // SAFETY: an object is created in a local variable.
    let described =
        Owned::new(functions.destroy_product, |at| unsafe { (functions.create_product)(at, COMPUTE_32, REAL_32) })?;
    let set = |attribute: c_int, value: *const c_void, bytes: usize| {
        // SAFETY: the value has so many bytes.
        (unsafe { (functions.set_product)(described.0, attribute, value, bytes) } == 0).then_some(())
    };
    set(EPILOGUE, ptr::from_ref(&key.epilogue).cast(), size_of_val(&key.epilogue))?;
    if product.bias != 0 {
        set(BIAS_POINTER, ptr::from_ref(&product.bias).cast(), size_of_val(&product.bias))?;
    }
    Some(described)
}

/// Handles by context, and choices; `None` is a product for which the library has no choice.
#[derive(Default)]
struct Known {
    handles: HashMap<u64, usize>,
    plans: HashMap<Key, Option<Arc<Plan>>>,
}

fn plan(functions: &'static Functions, product: &Product, key: &Key) -> Option<Arc<Plan>> {
    static KNOWN: Mutex<Option<Known>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    if let Some(plan) = known.plans.get(key) {
        return plan.clone();
    }
    let handle = match known.handles.get(&key.context) {
        Some(handle) => *handle,
        None => {
            let mut handle = null_mut();
            // SAFETY: a context is current. The handle lives as long as the process.
            if unsafe { (functions.create)(&raw mut handle) } != 0 {
                // For want of memory, perhaps: the next call tries again.
                return None;
            }
            *known.handles.entry(key.context).or_insert(handle as usize)
        }
    };
    let plan = Plan::new(functions, handle as Handle, product, key).map(Arc::new);
    if known.plans.len() >= KEPT {
        known.plans.clear();
    }
    known.plans.insert(*key, plan.clone());
    plan
}

/// Multiplies on the stream; `false` where there is no library, it has no way to do so, or the workspace has no memory for it, and nothing was
/// launched.
///
/// # Safety
/// The pointers are device memory of the product's sizes, which stays valid until the product has been computed.
///
/// # Errors
/// An error of the library.
pub(crate) unsafe fn multiply(
    product: &Product,
    stream: &Stream<'_>,
    workspace: &dyn Workspace,
) -> Result<bool, Error> {
    let Some(functions) = Functions::get()? else { return Ok(false) };
    let key = product.key(stream.context());
    let Some(plan) = plan(functions, product, &key) else { return Ok(false) };
    let bytes = plan.choice.workspace;
    let memory = if bytes > 0 { workspace.allocate(bytes) } else { Ok(0) };
    // A library whose handle could not be made when the call's memory was counted can have one by now.
    let Ok(memory) = memory else { return Ok(false) };
    if !stream.launches() {
        return Ok(true);
    }
    let failed = |error: String| Error::Cuda { what: "cublasLtMatmul".to_owned(), error };
    let described = describe(plan.functions, product, &key).ok_or_else(|| failed("no description".to_owned()))?;
    let (one, factor) = (1f32, if product.residual == 0 { 0f32 } else { 1f32 });
    // SAFETY: the caller's contract; factors are read before the call returns.
    let status = unsafe {
        (plan.functions.multiply)(
            plan.handle,
            described.0,
            ptr::from_ref(&one).cast(),
            product.weight as *const c_void,
            plan.weight.0,
            product.x as *const c_void,
            plan.x.0,
            ptr::from_ref(&factor).cast(),
            product.added() as *const c_void,
            plan.output.0,
            product.output as *mut c_void,
            plan.output.0,
            &raw const plan.choice.algorithm,
            memory as *mut c_void,
            bytes,
            stream.raw(),
        )
    };
    stream.others_launched();
    if status == 0 { Ok(true) } else { Err(failed(format!("status {status}"))) }
}
