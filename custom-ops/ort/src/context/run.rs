//! A node that runs.

use super::tensor::{TensorPtr, tensor};
use crate::api::{Api, Status, call};
use crate::failure::Failure;
use crate::objects::{Allocator, CpuMemory, made};
use ort_sys::{OrtKernelContext, OrtValue};
use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr;

/// A node that is being run.
pub(crate) struct KernelContext<'a> {
    api: Api,
    raw: *mut OrtKernelContext,
    lifetime: PhantomData<&'a OrtKernelContext>,
}

// SAFETY: threads share a context only through a `SessionHost`, which uses the session's allocator and threads; any
// thread that works for a running node may do so.
unsafe impl Sync for KernelContext<'_> {}

impl KernelContext<'_> {
    /// # Safety
    /// `raw` belongs to the host and is alive.
    pub(crate) unsafe fn new(api: Api, raw: *mut OrtKernelContext) -> Self {
        KernelContext { api, raw, lifetime: PhantomData }
    }

    /// The number of the node's inputs, including absent optional ones.
    pub(crate) fn input_count(&self) -> Result<usize, Failure> {
        let mut count = 0;
        // SAFETY: the context is alive; the host writes a number to a local variable.
        unsafe { call!(self.api, KernelContext_GetInputCount(self.raw, &raw mut count))? };
        Ok(count)
    }

    /// An input; `None` if it is absent. Its data live as long as the context.
    pub(crate) fn input(&self, index: usize) -> Result<Option<TensorPtr>, Failure> {
        let mut value: *const OrtValue = ptr::null();
        // SAFETY: the context is alive and owns the value that the host writes to the local variable.
        unsafe { call!(self.api, KernelContext_GetInput(self.raw, index, &raw mut value))? };
        // SAFETY: the context owns the value.
        (!value.is_null()).then(|| unsafe { tensor(self.api, value.cast_mut()) }).transpose()
    }

    /// Creates the output; its data are writable and live as long as the context.
    pub(crate) fn output(&self, dims: &[usize]) -> Result<*mut c_void, Failure> {
        let sizes: Vec<i64> = dims.iter().map(|&dim| dim as i64).collect();
        let mut value: *mut OrtValue = ptr::null_mut();
        let mut data = ptr::null_mut();
        // SAFETY: the context is alive and owns the objects that the host writes to local variables; the slice has the
        // passed length.
        unsafe {
            call!(self.api, KernelContext_GetOutput(self.raw, 0, sizes.as_ptr(), sizes.len(), &raw mut value))?;
            call!(self.api, GetTensorMutableData(made(value, "output")?.as_ptr(), &raw mut data))?;
        }
        Ok(data)
    }

    /// The session's allocator, which reuses memory between calls.
    pub(crate) fn allocator(&self, memory: &CpuMemory) -> Result<Allocator, Failure> {
        let mut raw = ptr::null_mut();
        // SAFETY: context and memory info are alive; the host writes a new object to a local variable.
        unsafe {
            call!(self.api, KernelContext_GetAllocator(self.raw, memory.as_ptr(), &raw mut raw))?;
            Ok(Allocator::from_raw(self.api, made(raw, "allocator")?))
        }
    }

    /// The CUDA stream on which the node runs; null if there is none.
    #[cfg(feature = "cuda")]
    pub(crate) fn gpu_stream(&self) -> Result<*mut c_void, Failure> {
        let mut stream = ptr::null_mut();
        // SAFETY: the context is alive; the host writes a pointer to a local variable.
        unsafe { call!(self.api, KernelContext_GetGPUComputeStream(self.raw, &raw mut stream))? };
        Ok(stream)
    }

    /// Scratch memory of the provider. The host does not give it to another stream before this stream has passed its
    /// release.
    ///
    /// # Safety
    /// The node runs on a stream (otherwise the host crashes); `memory` describes the provider's memory.
    #[cfg(feature = "cuda")]
    pub(crate) unsafe fn scratch(
        &self,
        memory: *const ort_sys::OrtMemoryInfo,
        bytes: usize,
    ) -> Result<*mut c_void, Status> {
        let mut scratch = ptr::null_mut();
        // SAFETY: context and memory info are alive; the host writes a pointer to a local variable.
        unsafe { call!(self.api, KernelContext_GetScratchBuffer(self.raw, memory, bytes, &raw mut scratch))? };
        Ok(scratch)
    }

    /// Calls `task(data, i)` for every `i < tasks` on the session's threads.
    ///
    /// # Safety
    /// `task` may be called with `data` on any thread, and does not unwind.
    pub(crate) unsafe fn parallel_for(
        &self,
        tasks: usize,
        task: unsafe extern "C" fn(*mut c_void, usize),
        data: *mut c_void,
    ) -> Result<(), Status> {
        // SAFETY: the context is alive; the task is as in the caller's contract. 0 batches: every task is scheduled
        // separately.
        unsafe { call!(self.api, KernelContext_ParallelFor(self.raw, task, tasks, 0, data)) }
    }
}
