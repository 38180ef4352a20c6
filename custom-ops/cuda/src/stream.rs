//! The host's stream, on which an operator's kernels are launched.

use crate::driver::{Checked, Driver, RawPtr, RawStream};
use crate::kernel::{Kernel, function};
use crate::params::Params;
use cudarc::driver::{result, sys};
use moh_operators::Error;
use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{OsString, c_void};
use std::marker::PhantomData;
use std::ptr;
use std::sync::{Mutex, PoisonError};

/// Environment variable with a maximum compute capability, such as `80`: kernels for later ones are not used.
pub const CAPABILITY_VARIABLE: &str = "MOH_CUDA_CAPABILITY";
/// Environment variable with a number of multiprocessors, such as `4`: kernels are sized as for a GPU that has so many.
pub const MULTIPROCESSORS_VARIABLE: &str = "MOH_CUDA_MULTIPROCESSORS";
/// Environment variable with a maximum of shared memory per block in bytes, such as `101376`: kernels are chosen and
/// sized as for a GPU that has no more.
pub const SHARED_VARIABLE: &str = "MOH_CUDA_SHARED_BYTES";

/// Environment variable: with `0`, all kernels are launched normally.
pub const DEPENDENT_LAUNCH_VARIABLE: &str = "MOH_CUDA_DEPENDENT_LAUNCH";

/// The oldest compute capability for dependent launches.
const DEPENDENT_CAPABILITY: (u32, u32) = (9, 0);
/// The oldest driver for dependent launches, CUDA 12.3: older ones do not capture them in graphs.
const DEPENDENT_DRIVER: i32 = 12030;

/// GPU properties by which kernels are chosen and sized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Properties {
    /// Compute capability, such as (9, 0) for Hopper.
    pub capability: (u32, u32),
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// Maximum bytes of shared memory per block (opt-in).
    pub shared_bytes: u32,
    /// Bytes of the L2 cache.
    pub l2_bytes: u32,
    /// Whether later kernels of a node may start before earlier ones have ended: see [`Stream::launch`].
    pub dependent_launch: bool,
    /// The newest CUDA version that the driver supports: 1000 * major + 10 * minor.
    pub driver_version: i32,
}

/// What [`Stream::launch`] does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Launches {
    /// Nothing.
    Skipped,
    /// Launches a node's first kernel.
    First,
    /// Launches a further kernel of the node.
    Later,
}

/// A borrowed stream. Its context is current while this value lives. The kernels launched with one value are those of
/// one node, with nothing else between them on the stream.
#[derive(Debug)]
pub struct Stream<'a> {
    raw: RawStream,
    context: u64,
    properties: Properties,
    /// Whether this value made the context current.
    pushed: bool,
    launches: Cell<Launches>,
    /// Not Send: a context is current to one thread.
    lifetime: PhantomData<(&'a (), *mut ())>,
}

impl Stream<'_> {
    /// Borrows a stream of the host; null is the default stream of the current context.
    ///
    /// # Safety
    /// `raw` is a stream of a live context, or null while a context is current; it outlives the borrow.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the driver returns an error; [`Error::Setting`] if [`CAPABILITY_VARIABLE`],
    /// [`MULTIPROCESSORS_VARIABLE`] or [`SHARED_VARIABLE`] is not a number.
    pub unsafe fn borrow(driver: Driver, raw: RawStream) -> Result<Self, Error> {
        let (mut own, mut current) = (ptr::null_mut(), ptr::null_mut());
        let mut context = 0;
        // SAFETY: the stream is alive; the driver writes to local variables.
        unsafe {
            sys::cuStreamGetCtx(raw, &raw mut own).about("cuStreamGetCtx")?;
            sys::cuCtxGetCurrent(&raw mut current).about("cuCtxGetCurrent")?;
            sys::cuCtxGetId(own, &raw mut context).about("cuCtxGetId")?;
            let pushed = own != current;
            if pushed {
                sys::cuCtxPushCurrent_v2(own).about("cuCtxPushCurrent")?;
            }
            // From here on, dropping `self` pops the context.
            let properties = Properties {
                capability: (0, 0),
                multiprocessors: 0,
                shared_bytes: 0,
                l2_bytes: 0,
                dependent_launch: false,
                driver_version: 0,
            };
            let launches = Cell::new(Launches::First);
            let mut stream = Stream { raw, context, properties, pushed, launches, lifetime: PhantomData };
            stream.properties = self::properties(context, driver)?;
            Ok(stream)
        }
    }

    /// The same stream for another node.
    pub(crate) fn another_node(&self) -> Stream<'_> {
        let launches = Cell::new(Launches::First);
        Stream { pushed: false, launches, lifetime: PhantomData, ..*self }
    }

    /// The same stream, on which nothing is launched: to learn what a node needs.
    pub(crate) fn without_launches(&self) -> Stream<'_> {
        Stream { launches: Cell::new(Launches::Skipped), ..self.another_node() }
    }

    /// Whether kernels are launched.
    pub(crate) fn launches(&self) -> bool {
        self.launches.get() != Launches::Skipped
    }

    /// The id of its context.
    pub(crate) fn context(&self) -> u64 {
        self.context
    }

    /// Says that something else has launched kernels on the stream, which know nothing of those that start early.
    pub(crate) fn others_launched(&self) {
        self.launches.set(Launches::First);
    }

    /// The driver's handle.
    pub fn raw(&self) -> RawStream {
        self.raw
    }

    /// The GPU's properties, as limited by [`CAPABILITY_VARIABLE`], [`MULTIPROCESSORS_VARIABLE`] and
    /// [`SHARED_VARIABLE`].
    pub fn properties(&self) -> Properties {
        self.properties
    }

    /// The stream of a GPU that pretends to have these properties. For tests.
    #[must_use]
    pub fn with_properties(mut self, properties: Properties) -> Self {
        self.properties = properties;
        self
    }

    /// Launches a kernel with one parameter on `grid` blocks of `block` threads, with `shared_bytes` of dynamic shared
    /// memory.
    ///
    /// An empty grid launches nothing.
    ///
    /// The first kernel of a node starts when all earlier work on the stream has ended. Where
    /// [`Properties::dependent_launch`], the others may start earlier, when all blocks of the kernel before have called
    /// `start_next_kernel()` or ended; they wait for its end themselves, by `wait_for_previous_kernel()`
    /// (`kernels/device.cuh`).
    ///
    /// # Safety
    /// The kernel's parameter is a `P`; the memory that it describes is valid until the kernel has run. The kernel waits
    /// for the previous one as `kernels/device.cuh` says.
    ///
    /// # Errors
    /// [`Error::Cuda`] naming the kernel if it needs more shared memory than the GPU has, or if the launch fails. Errors
    /// during the kernel's execution are not reported here.
    pub unsafe fn launch<P: Params>(
        &self,
        kernel: Kernel<'_>,
        grid: [u32; 3],
        block: u32,
        shared_bytes: u32,
        params: &P,
    ) -> Result<(), Error> {
        if grid.contains(&0) {
            return Ok(());
        }
        // Before what is counted only: a call is refused before its first kernel is launched.
        let available = self.properties.shared_bytes;
        if shared_bytes > available {
            let what = format!("kernel {}", kernel.name.to_string_lossy());
            let error = format!("needs {shared_bytes} bytes of shared memory per block, the GPU has {available}");
            return Err(Error::Cuda { what, error });
        }
        let launches = self.launches.get();
        if launches == Launches::Skipped {
            return Ok(());
        }
        let mut list = [ptr::from_ref(params).cast_mut().cast::<c_void>()];
        let named = |call: &str| format!("kernel {}: {call}", kernel.name.to_string_lossy());
        // SAFETY: the context is current; the driver copies the parameter, whose size is part of the kernel.
        unsafe {
            let function = function(self.context, kernel, shared_bytes)?;
            if launches == Launches::Later && self.properties.dependent_launch {
                let mut early = sys::CUlaunchAttribute {
                    id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                    pad: [0; 4],
                    value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
                };
                let config = sys::CUlaunchConfig {
                    gridDimX: grid[0],
                    gridDimY: grid[1],
                    gridDimZ: grid[2],
                    blockDimX: block,
                    blockDimY: 1,
                    blockDimZ: 1,
                    sharedMemBytes: shared_bytes,
                    hStream: self.raw,
                    attrs: &raw mut early,
                    numAttrs: 1,
                };
                sys::cuLaunchKernelEx(&raw const config, function, list.as_mut_ptr(), ptr::null_mut())
                    .about(named("cuLaunchKernelEx"))?;
            } else {
                result::launch_kernel(function, grid.into(), (block, 1, 1), shared_bytes, self.raw, &mut list)
                    .about(named("cuLaunchKernel"))?;
            }
        }
        self.launches.set(Launches::Later);
        Ok(())
    }

    /// Sets `bytes` bytes of device memory to `value`, in stream order.
    ///
    /// # Safety
    /// `ptr` is device memory of at least `bytes` bytes.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the driver returns an error.
    pub unsafe fn fill(&self, ptr: RawPtr, value: u8, bytes: usize) -> Result<(), Error> {
        if bytes == 0 || self.launches.get() == Launches::Skipped {
            return Ok(());
        }
        // The next kernel has no kernel before it.
        self.launches.set(Launches::First);
        // SAFETY: the caller's contract.
        unsafe { sys::cuMemsetD8Async(ptr, value, bytes, self.raw) }.about("cuMemsetD8Async")
    }

    /// Waits until everything on the stream has finished. For tests and tools; operators never wait.
    ///
    /// # Errors
    /// [`Error::Cuda`], including errors during the execution of kernels.
    pub fn synchronize(&self) -> Result<(), Error> {
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(self.raw) }.about("cuStreamSynchronize")
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut context = ptr::null_mut();
            // SAFETY: pushed by `borrow` on this thread. An error is ignored, since drop cannot report it.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut context) };
        }
    }
}

/// The properties of the current context's GPU, cached per context.
///
/// # Safety
/// `context` is the id of the current context.
unsafe fn properties(context: u64, driver: Driver) -> Result<Properties, Error> {
    use sys::CUdevice_attribute::*;
    static KNOWN: Mutex<Option<HashMap<u64, Properties>>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    if let Some(properties) = known.get(&context) {
        return Ok(*properties);
    }
    let mut device = 0;
    // SAFETY: a context is current; the driver writes a number to a local variable.
    unsafe { sys::cuCtxGetDevice(&raw mut device) }.about("cuCtxGetDevice")?;
    let get = |attribute| {
        // SAFETY: the device belongs to the context.
        let value = unsafe { result::device::get_attribute(device, attribute) }.about("cuDeviceGetAttribute")?;
        Ok::<u32, Error>(u32::try_from(value).unwrap_or(0))
    };
    let capability =
        (get(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?, get(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?);
    let found = Properties {
        capability,
        multiprocessors: get(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_bytes: get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        l2_bytes: get(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
        // Not the limited capability: the driver chooses machine code by the GPU.
        dependent_launch: capability >= DEPENDENT_CAPABILITY
            && driver.version() >= DEPENDENT_DRIVER
            && std::env::var_os(DEPENDENT_LAUNCH_VARIABLE).is_none_or(|value| value != "0"),
        driver_version: driver.version(),
    };
    let set = |variable| number(variable, std::env::var_os(variable));
    let properties = Properties {
        capability: set(CAPABILITY_VARIABLE)?.map_or(capability, |limit| capability.min((limit / 10, limit % 10))),
        multiprocessors: set(MULTIPROCESSORS_VARIABLE)?.unwrap_or(found.multiprocessors).max(1),
        shared_bytes: set(SHARED_VARIABLE)?.map_or(found.shared_bytes, |limit| limit.min(found.shared_bytes)),
        ..found
    };
    known.insert(context, properties);
    Ok(properties)
}

/// The number that an environment variable has; nothing if it is not set, or empty.
fn number(variable: &'static str, value: Option<OsString>) -> Result<Option<u32>, Error> {
    let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(None) };
    let number = value.to_str().and_then(|value| value.parse().ok());
    let refused = || Error::Setting { variable, reason: format!("expected a whole number, found {value:?}") };
    number.map(Some).ok_or_else(refused)
}

#[cfg(test)]
mod tests {
    use super::{CAPABILITY_VARIABLE, number};

    #[test]
    fn a_variable_that_is_no_number_is_an_error() {
        let number = |value: &str| number(CAPABILITY_VARIABLE, Some(value.into())).map_err(|e| e.to_string());
        assert_eq!((number("80"), number("")), (Ok(Some(80)), Ok(None)));
        for value in ["8.0", "sm_80", "-1", "4294967296"] {
            let expected =
                format!("environment variable MOH_CUDA_CAPABILITY: expected a whole number, found {value:?}");
            assert_eq!(number(value), Err(expected));
        }
    }
}
