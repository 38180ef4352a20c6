//! NVIDIA's driver library, loaded at run time. Without it there are no CUDA kernels, and nothing else changes.

use crate::modules::TOOLKIT;
use cudarc::driver::{DriverError, result, sys};
use libloading::Library;
use moh_operators::Error;
use std::ffi::OsString;
use std::fmt;
use std::path::Path;
use std::sync::OnceLock;

/// The oldest compute capability with machine code.
const OLDEST: (u32, u32) = (8, 0);
/// The newest major one. For later GPUs there is PTX, which only drivers as new as the compiler read.
const NEWEST: u32 = 9;

pub use sys::{CUdeviceptr as RawPtr, CUstream as RawStream};

/// Environment variable with the path of the driver library, if not the system's.
///
/// The library's soname must be `libcuda.so` or `libcuda.so.1`: cudarc looks up the driver by name, which finds the
/// library that is already loaded.
pub const DRIVER_VARIABLE: &str = "MOH_CUDA_DRIVER";

/// Proof that the driver is loaded; without it, cudarc's functions panic.
#[derive(Debug, Clone, Copy)]
pub struct Driver {
    version: i32,
}

impl Driver {
    /// The driver, loaded at the first call: [`DRIVER_VARIABLE`], or the system's.
    ///
    /// It is not initialised here: a host with streams has done that, and other processes may fork later.
    ///
    /// # Errors
    /// [`Error::NoCuda`] with the reason: no library, or a driver older than the CUDA version of the kernels.
    pub fn get() -> Result<Driver, Error> {
        static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
        let named = || std::env::var_os(DRIVER_VARIABLE).filter(|path: &OsString| !path.is_empty());
        let driver = DRIVER.get_or_init(|| Driver::open(named().as_ref().map(Path::new)));
        driver.clone().map_err(|reason| Error::NoCuda { reason })
    }

    /// The driver in this library, which stays loaded; a process has one driver. For tests; otherwise use
    /// [`Driver::get`].
    ///
    /// # Errors
    /// As [`Driver::get`].
    pub fn at(path: &Path) -> Result<Driver, Error> {
        Driver::open(Some(path)).map_err(|reason| Error::NoCuda { reason })
    }

    fn open(path: Option<&Path>) -> Result<Driver, String> {
        let named = path.map(|path| load(path).map(|library| (path, library))).transpose()?;
        // SAFETY: loading the driver's library runs only its own initialisers.
        if !unsafe { sys::is_culib_present() } {
            return Err("no driver library libcuda.so.1".to_owned());
        }
        if let Some((path, library)) = named {
            // SAFETY: takes a symbol's address without calling it.
            let address = |library: &Library| unsafe { library.get::<*const ()>(b"cuInit\0").map(|init| *init) };
            // SAFETY: the library is present.
            let found = address(unsafe { sys::culib() });
            if !matches!((address(&library), found), (Ok(own), Ok(found)) if own == found) {
                return Err(format!("{} is not the driver: another libcuda.so is", path.display()));
            }
            // Never unloaded, like cudarc's handle.
            std::mem::forget(library);
        }
        let mut version = 0;
        // SAFETY: the driver writes a number to a local variable; this call needs no `cuInit`.
        let read = unsafe { sys::cuDriverGetVersion(&raw mut version) }.result();
        read.map_err(|error| format!("cuDriverGetVersion: {}", name(error)))?;
        // Machine code runs on every driver with the same major version as the toolkit; for PTX, see `check_capability`.
        let needed = TOOLKIT / 1000;
        if version / 1000 < needed {
            let (major, minor) = (version / 1000, version % 1000 / 10);
            return Err(format!("the driver supports CUDA {major}.{minor}, the kernels need {needed}.0 or later"));
        }
        Ok(Driver { version })
    }

    /// Checks that the kernels run on the current context's GPU with this driver; without a current context, nothing.
    ///
    /// # Errors
    /// [`Error::NoCuda`] with the reason: a GPU older than the machine code, or a newer one for which the driver cannot compile the kernels.
    pub fn check_gpu(self) -> Result<(), Error> {
        use sys::CUdevice_attribute::*;
        let mut device = 0;
        // SAFETY: the driver is loaded, and writes a number to a local variable.
        if unsafe { sys::cuCtxGetDevice(&raw mut device) }.result().is_err() {
            return Ok(());
        }
        let get = |attribute| {
            // SAFETY: the device of the current context.
            let value = unsafe { result::device::get_attribute(device, attribute) }.about("cuDeviceGetAttribute")?;
            Ok::<u32, Error>(u32::try_from(value).unwrap_or(0))
        };
        let major = get(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = get(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        check_capability((major, minor), self.version)
    }

    /// Copies memory of a device to the host, and waits for it; not for use in a call, nor while a stream is captured.
    ///
    /// # Safety
    /// If it is device memory, `from` has as many bytes as `to`. Nothing writes to it.
    ///
    /// # Errors
    /// [`Error::Cuda`]: no context is current, or it is not device memory.
    pub unsafe fn read(self, from: RawPtr, to: &mut [u8]) -> Result<(), Error> {
        // SAFETY: the driver is loaded; the rest is the caller's contract.
        unsafe { sys::cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), from, to.len()) }.about("cuMemcpyDtoH")
    }

    /// The newest CUDA version that the driver supports: 1000 * major + 10 * minor.
    pub fn version(self) -> i32 {
        self.version
    }
}

/// Checks that a driver of this version can run the kernels on GPUs of this compute capability.
///
/// # Errors
/// [`Error::NoCuda`] with the reason.
pub(crate) fn check_capability(capability: (u32, u32), version: i32) -> Result<(), Error> {
    let (major, minor) = capability;
    let gpu = format!("the GPU has compute capability {major}.{minor}");
    let reason = if capability < OLDEST {
        format!("{gpu}, the kernels need {}.{} or later", OLDEST.0, OLDEST.1)
    } else if major > NEWEST && version < TOOLKIT {
        let [found, needed] = [version, TOOLKIT].map(|version| format!("{}.{}", version / 1000, version % 1000 / 10));
        format!(
            "{gpu}, for which the driver must compile the kernels: it supports CUDA {found}, that needs {needed} or later"
        )
    } else {
        return Ok(());
    };
    Err(Error::NoCuda { reason })
}

fn load(path: &Path) -> Result<Library, String> {
    // SAFETY: loading the driver's library runs only its own initialisers.
    unsafe { Library::new(path) }.map_err(|error| format!("no driver library {}: {error}", path.display()))
}

/// Name and number of a driver error.
fn name(error: DriverError) -> String {
    let name = error.error_name().map_or("unknown error".into(), |name| name.to_string_lossy().into_owned());
    format!("{name} ({})", error.0 as i32)
}

/// Converts results of the driver's functions.
pub trait Checked {
    /// The function's return value.
    type Value;

    /// The value, or an error naming the function and its purpose (`what`).
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

#[cfg(test)]
mod tests {
    use super::{TOOLKIT, check_capability};

    #[test]
    fn gpus_and_drivers_that_cannot_run_the_kernels_are_refused() {
        let refused = |capability, version| check_capability(capability, version).err().map(|error| error.to_string());
        let same_major = TOOLKIT / 1000 * 1000;
        for capability in [(8, 0), (8, 6), (8, 9), (9, 0)] {
            assert_eq!(refused(capability, same_major), None);
        }
        for capability in [(10, 0), (12, 0)] {
            assert_eq!(refused(capability, TOOLKIT), None);
            let error = refused(capability, TOOLKIT - 10).unwrap_or_default();
            assert!(error.contains("it supports CUDA") && error.contains(" or later"), "{error}");
        }
        let error = refused((7, 5), TOOLKIT).unwrap_or_default();
        assert!(error.contains("compute capability 7.5, the kernels need 8.0 or later"), "{error}");
    }
}
