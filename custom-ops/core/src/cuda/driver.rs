//! NVIDIA's driver library, found at run time: without it there are no CUDA kernels, and nothing else changes.

use crate::Error;
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::path::Path;
use std::ptr;
use std::sync::OnceLock;

/// Name of the environment variable that holds the path of the driver library, instead of the system's `libcuda.so.1`.
pub const DRIVER_VARIABLE: &str = "MOH_CUDA_DRIVER";

/// Types of the driver's opaque pointers.
macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct $name(pub *mut c_void);

        impl $name {
            /// No object; of streams, the default one.
            pub const NULL: $name = $name(ptr::null_mut());
        }

        // SAFETY: the driver's objects may be used on any thread.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
    )*};
}

handles! {
    /// `CUcontext`.
    RawContext;
    /// `CUstream`.
    RawStream;
    /// `CUmodule`.
    RawModule;
    /// `CUfunction`.
    RawFunction;
    /// `CUgraph`, or `CUgraphExec`.
    RawGraph;
}

/// A number of the driver's, `CUdeviceptr`: an address in the memory of a GPU.
pub type RawPtr = u64;

/// A function of the driver that failed.
#[derive(Debug)]
pub struct Failure {
    call: &'static str,
    code: c_int,
    name: String,
}

impl Failure {
    /// As an error that says what the call was for.
    pub fn about(self, what: impl fmt::Display) -> Error {
        Error::Cuda { what: format!("{what}: {}", self.call), error: format!("{} ({})", self.name, self.code) }
    }
}

impl From<Failure> for Error {
    fn from(Failure { call, code, name }: Failure) -> Error {
        Error::Cuda { what: call.to_owned(), error: format!("{name} ({code})") }
    }
}

/// The table of functions, and a method for each, which returns the code that is not 0 as a [`Failure`].
macro_rules! functions {
    ($($method:ident = $symbol:ident($($argument:ident: $ty:ty),*);)*) => {
        /// The driver's functions. Their contracts are the driver API's.
        #[allow(non_snake_case)]
        pub struct Driver {
            $($symbol: unsafe extern "C" fn($($ty),*) -> c_int,)*
            version: c_int,
            /// Never unloaded: [`Driver::get`] keeps it.
            _library: Library,
        }

        impl Driver {
            fn load(library: Library) -> Result<Driver, String> {
                // SAFETY: the symbols are the driver's, of these types in every version that has them.
                unsafe {
                    Ok(Driver {
                        $($symbol: *library.get(concat!(stringify!($symbol), "\0").as_bytes())
                            .map_err(|_| concat!("the driver is too old: it lacks ", stringify!($symbol)))?,)*
                        version: 0,
                        _library: library,
                    })
                }
            }

            $(
                #[doc = concat!("`", stringify!($symbol), "`.")]
                ///
                /// # Safety
                /// As the driver API says.
                ///
                /// # Errors
                /// The driver's code.
                pub unsafe fn $method(&self, $($argument: $ty),*) -> Result<(), Failure> {
                    // SAFETY: as the caller promises.
                    let code = unsafe { (self.$symbol)($($argument),*) };
                    if code == 0 { Ok(()) } else { Err(self.failure(stringify!($symbol), code)) }
                }
            )*
        }
    };
}

functions! {
    init = cuInit(flags: c_uint);
    driver_get_version = cuDriverGetVersion(version: *mut c_int);
    get_error_name = cuGetErrorName(code: c_int, name: *mut *const c_char);
    device_get_count = cuDeviceGetCount(count: *mut c_int);
    device_get = cuDeviceGet(device: *mut c_int, ordinal: c_int);
    device_get_name = cuDeviceGetName(name: *mut c_char, room: c_int, device: c_int);
    device_get_attribute = cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int);
    device_primary_ctx_retain = cuDevicePrimaryCtxRetain(context: *mut RawContext, device: c_int);
    ctx_get_current = cuCtxGetCurrent(context: *mut RawContext);
    ctx_push_current = cuCtxPushCurrent_v2(context: RawContext);
    ctx_pop_current = cuCtxPopCurrent_v2(context: *mut RawContext);
    ctx_get_device = cuCtxGetDevice(device: *mut c_int);
    ctx_get_id = cuCtxGetId(context: RawContext, id: *mut u64);
    stream_create = cuStreamCreate(stream: *mut RawStream, flags: c_uint);
    stream_get_ctx = cuStreamGetCtx(stream: RawStream, context: *mut RawContext);
    stream_synchronize = cuStreamSynchronize(stream: RawStream);
    stream_begin_capture = cuStreamBeginCapture_v2(stream: RawStream, mode: c_uint);
    stream_end_capture = cuStreamEndCapture(stream: RawStream, graph: *mut RawGraph);
    graph_instantiate = cuGraphInstantiateWithFlags(executable: *mut RawGraph, graph: RawGraph, flags: u64);
    graph_launch = cuGraphLaunch(executable: RawGraph, stream: RawStream);
    module_load_data = cuModuleLoadData(module: *mut RawModule, image: *const c_void);
    module_get_function = cuModuleGetFunction(function: *mut RawFunction, module: RawModule, name: *const c_char);
    func_set_attribute = cuFuncSetAttribute(function: RawFunction, attribute: c_int, value: c_int);
    launch_kernel = cuLaunchKernel(
        function: RawFunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: RawStream,
        params: *mut *mut c_void, extra: *mut *mut c_void
    );
    tensor_map_encode_tiled = cuTensorMapEncodeTiled(
        map: *mut c_void, data_type: c_uint, rank: c_uint, address: *mut c_void, sizes: *const u64, strides: *const u64,
        box_sizes: *const u32, element_strides: *const u32, interleave: c_uint, swizzle: c_uint, l2_promotion: c_uint,
        out_of_bounds: c_uint
    );
    mem_alloc = cuMemAlloc_v2(ptr: *mut RawPtr, bytes: usize);
    mem_free = cuMemFree_v2(ptr: RawPtr);
    memcpy_htod = cuMemcpyHtoD_v2(to: RawPtr, from: *const c_void, bytes: usize);
    memcpy_dtoh = cuMemcpyDtoH_v2(to: *mut c_void, from: RawPtr, bytes: usize);
    memset_d8 = cuMemsetD8_v2(ptr: RawPtr, value: u8, bytes: usize);
    memset_d8_async = cuMemsetD8Async(ptr: RawPtr, value: u8, bytes: usize, stream: RawStream);
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA driver {}", self.version)
    }
}

impl Driver {
    /// The driver of this machine, loaded at the first call: [`DRIVER_VARIABLE`], or `libcuda.so.1`.
    ///
    /// It is not initialised here: hosts with streams have done that, and others may want to fork.
    ///
    /// # Errors
    /// [`Error::NoCuda`] saying why: there is no library, or the driver is older than the compiler of the kernels.
    pub fn get() -> Result<&'static Driver, Error> {
        static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
        let path =
            || std::env::var_os(DRIVER_VARIABLE).filter(|path| !path.is_empty()).unwrap_or("libcuda.so.1".into());
        DRIVER
            .get_or_init(|| Driver::open(path().as_ref()))
            .as_ref()
            .map_err(|reason| Error::NoCuda { reason: reason.clone() })
    }

    /// The driver in that library, which stays loaded. Tests use it; everything else, [`Driver::get`].
    ///
    /// # Errors
    /// As [`Driver::get`].
    pub fn at(path: &Path) -> Result<&'static Driver, Error> {
        let driver = Driver::open(path).map_err(|reason| Error::NoCuda { reason })?;
        Ok(Box::leak(Box::new(driver)))
    }

    fn open(path: &Path) -> Result<Driver, String> {
        // SAFETY: the driver's library runs nothing but its own initialisers.
        let library =
            unsafe { Library::new(path) }.map_err(|error| format!("no driver library {}: {error}", path.display()))?;
        let mut driver = Driver::load(library)?;
        let mut version = 0;
        // SAFETY: the driver writes a number to a local variable; this call needs no `cuInit`.
        unsafe { driver.driver_get_version(&raw mut version) }.map_err(|error| Error::from(error).to_string())?;
        driver.version = version;
        // Machine code of a toolkit runs on every driver of the same major version.
        let needed = super::modules::TOOLKIT / 1000;
        if driver.version / 1000 < needed {
            let (major, minor) = (driver.version / 1000, driver.version % 1000 / 10);
            return Err(format!("the driver knows CUDA {major}.{minor}, the kernels need {needed}.0"));
        }
        Ok(driver)
    }

    /// The newest CUDA version that the driver knows: 1000 * major + 10 * minor.
    pub fn version(&self) -> i32 {
        self.version
    }

    fn failure(&self, call: &'static str, code: c_int) -> Failure {
        let mut name = ptr::null();
        // SAFETY: the driver writes null or a constant string.
        let name = unsafe {
            (self.cuGetErrorName)(code, &raw mut name);
            if name.is_null() { None } else { Some(CStr::from_ptr(name)) }
        };
        Failure { call, code, name: name.map_or("unknown error".into(), |name| name.to_string_lossy().into_owned()) }
    }
}
