//! The host's stream, on which an operator's kernels are launched.

use crate::driver::{Checked, Driver, RawPtr, RawStream};
use crate::kernel::{Kernel, function};
use crate::params::Params;
use cudarc::driver::{result, sys};
use moh_operators::Error;
use std::collections::HashMap;
use std::ffi::c_void;
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
}

/// A borrowed stream. Its context is current while this value lives.
#[derive(Debug)]
pub struct Stream<'a> {
    raw: RawStream,
    context: u64,
    properties: Properties,
    /// Whether this value made the context current.
    pushed: bool,
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
    /// [`Error::Cuda`] if the driver returns an error.
    pub unsafe fn borrow(_: Driver, raw: RawStream) -> Result<Self, Error> {
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
            let empty = Properties { capability: (0, 0), multiprocessors: 0, shared_bytes: 0, l2_bytes: 0 };
            let mut stream = Stream { raw, context, properties: empty, pushed, lifetime: PhantomData };
            stream.properties = properties(context)?;
            Ok(stream)
        }
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
    /// # Safety
    /// The kernel's parameter is a `P`; the memory that it describes is valid until the kernel has run.
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
        let available = self.properties.shared_bytes;
        if shared_bytes > available {
            let what = format!("kernel {}", kernel.name.to_string_lossy());
            let error = format!("needs {shared_bytes} bytes of shared memory per block, the GPU has {available}");
            return Err(Error::Cuda { what, error });
        }
        let mut list = [ptr::from_ref(params).cast_mut().cast::<c_void>()];
        // SAFETY: the context is current; the driver copies the parameter, whose size is part of the kernel.
        unsafe {
            let function = function(self.context, kernel, shared_bytes)?;
            let launched =
                result::launch_kernel(function, grid.into(), (block, 1, 1), shared_bytes, self.raw, &mut list);
            launched.about(format_args!("kernel {}: cuLaunchKernel", kernel.name.to_string_lossy()))
        }
    }

    /// Sets `bytes` bytes of device memory to `value`, in stream order.
    ///
    /// # Safety
    /// `ptr` is device memory of at least `bytes` bytes.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the driver returns an error.
    pub unsafe fn fill(&self, ptr: RawPtr, value: u8, bytes: usize) -> Result<(), Error> {
        if bytes == 0 {
            return Ok(());
        }
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
unsafe fn properties(context: u64) -> Result<Properties, Error> {
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
    };
    let number = |variable: &str| std::env::var(variable).ok().and_then(|value| value.parse::<u32>().ok());
    let properties = Properties {
        capability: number(CAPABILITY_VARIABLE).map_or(capability, |limit| capability.min((limit / 10, limit % 10))),
        multiprocessors: number(MULTIPROCESSORS_VARIABLE).unwrap_or(found.multiprocessors).max(1),
        shared_bytes: number(SHARED_VARIABLE).map_or(found.shared_bytes, |limit| limit.min(found.shared_bytes)),
        ..found
    };
    known.insert(context, properties);
    Ok(properties)
}
