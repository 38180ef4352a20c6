//! NVIDIA's driver library, found at run time: without it there are no CUDA kernels, and nothing else changes.

use crate::modules::TOOLKIT;
use cudarc::driver::{DriverError, sys};
use libloading::Library;
use moh_operators::Error;
use std::ffi::OsString;
use std::fmt;
use std::path::Path;
use std::sync::OnceLock;

pub use sys::{CUdeviceptr as RawPtr, CUstream as RawStream};

/// Name of the environment variable that holds the path of the driver library, instead of the system's.
///
/// The library has to bear the name `libcuda.so` or `libcuda.so.1` (its soname): cudarc looks for the driver by name, and finds the
/// one that is loaded already.
pub const DRIVER_VARIABLE: &str = "MOH_CUDA_DRIVER";

/// The driver is loaded: without this, cudarc's functions panic.
#[derive(Debug, Clone, Copy)]
pub struct Driver {
    version: i32,
}

impl Driver {
    /// The driver of this machine, loaded at the first call: [`DRIVER_VARIABLE`], or the system's.
    ///
    /// It is not initialised here: hosts with streams have done that, and others may want to fork.
    ///
    /// # Errors
    /// [`Error::NoCuda`] saying why: there is no library, or the driver is older than the compiler of the kernels.
    pub fn get() -> Result<Driver, Error> {
        static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
        let named = || std::env::var_os(DRIVER_VARIABLE).filter(|path: &OsString| !path.is_empty());
        let driver = DRIVER.get_or_init(|| Driver::open(named().as_ref().map(Path::new)));
        driver.clone().map_err(|reason| Error::NoCuda { reason })
    }

    /// The driver in that library, which stays loaded; a process has one driver. Tests use it; everything else, [`Driver::get`].
    ///
    /// # Errors
    /// As [`Driver::get`].
    pub fn at(path: &Path) -> Result<Driver, Error> {
        Driver::open(Some(path)).map_err(|reason| Error::NoCuda { reason })
    }

    fn open(path: Option<&Path>) -> Result<Driver, String> {
        let named = path.map(|path| load(path).map(|library| (path, library))).transpose()?;
        // SAFETY: the driver's library runs nothing but its own initialisers.
        if !unsafe { sys::is_culib_present() } {
            return Err("no driver library libcuda.so.1".to_owned());
        }
        if let Some((path, library)) = named {
            // SAFETY: a symbol's address, which is not called.
            let address = |library: &Library| unsafe { library.get::<*const ()>(b"cuInit\0").map(|init| *init) };
            // SAFETY: the library is there.
            let found = address(unsafe { sys::culib() });
            if !matches!((address(&library), found), (Ok(own), Ok(found)) if own == found) {
                return Err(format!("{} is not the driver: another libcuda.so is", path.display()));
            }
            // Loaded for good, as cudarc's handle is.
            std::mem::forget(library);
        }
        let mut version = 0;
        // SAFETY: the driver writes a number to a local variable; this call needs no `cuInit`.
        let read = unsafe { sys::cuDriverGetVersion(&raw mut version) }.result();
        read.map_err(|error| format!("cuDriverGetVersion: {}", name(error)))?;
        // Machine code of a toolkit runs on every driver of the same major version.
        let needed = TOOLKIT / 1000;
        if version / 1000 < needed {
            let (major, minor) = (version / 1000, version % 1000 / 10);
            return Err(format!("the driver knows CUDA {major}.{minor}, the kernels need {needed}.0"));
        }
        Ok(Driver { version })
    }

    /// The newest CUDA version that the driver knows: 1000 * major + 10 * minor.
    pub fn version(self) -> i32 {
        self.version
    }
}

fn load(path: &Path) -> Result<Library, String> {
    // SAFETY: the driver's library runs nothing but its own initialisers.
    unsafe { Library::new(path) }.map_err(|error| format!("no driver library {}: {error}", path.display()))
}

/// The driver's name and number of an error.
fn name(error: DriverError) -> String {
    let name = error.error_name().map_or("unknown error".into(), |name| name.to_string_lossy().into_owned());
    format!("{name} ({})", error.0 as i32)
}

/// Results of the driver's functions.
pub trait Checked {
    /// What the function gives.
    type Value;

    /// The value, or an error that says which function failed, and what it was called for.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    fn about(self, what: impl fmt::Display) -> Result<Self::Value, Error>;
}

impl<T> Checked for Result<T, DriverError> {
    type Value = T;

    fn about(self, what: impl fmt::Display) -> Result<T, Error> {
        self.map_err(|error| Error::Cuda { what: what.to_string(), error: name(error) })
    }
}

impl Checked for sys::CUresult {
    type Value = ();

    fn about(self, what: impl fmt::Display) -> Result<(), Error> {
        self.result().about(what)
    }
}
