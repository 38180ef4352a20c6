//! A node's GPU kernel: launches on the session's stream, without waiting.

use crate::api::Api;
use crate::context::{KernelContext, KernelInfo, TensorPtr};
use crate::failure::Failure;
use crate::kernel::{check_input, read_node};
use crate::objects::Allocator;
use crate::op::NodeKernel;
use crate::settings::Settings;
use moh_cuda::{DeviceTensor, Driver, RawPtr, RawStream, Stream, Workspace};
use moh_operators::{Attributes, DType, Error, Operator};
use std::cell::RefCell;
use std::ffi::CStr;
use std::ptr::NonNull;

/// A node's checked attributes, and the provider's allocator.
pub(crate) struct CudaKernel {
    api: Api,
    attributes: Attributes,
    allocator: Allocator,
}

impl NodeKernel for CudaKernel {
    const PROVIDER: Option<&'static CStr> = Some(c"CUDAExecutionProvider");

    fn new(
        api: Api,
        operator: &'static Operator,
        _: DType,
        _: Settings,
        info: &KernelInfo<'_>,
    ) -> Result<CudaKernel, Failure> {
        Ok(CudaKernel { api, attributes: read_node(operator, info)?, allocator: info.allocator()? })
    }

    fn api(&self) -> Api {
        self.api
    }

    fn compute(&self, context: &KernelContext<'_>) -> Result<(), Failure> {
        let operator = self.attributes.operator();
        let read = |index| context.input(index)?.map(|input| Input::new(operator, index, input)).transpose();
        let inputs: Vec<Option<Input>> = (0..context.input_count()?).map(read).collect::<Result<_, Failure>>()?;
        let tensors: Vec<Option<DeviceTensor<'_>>> = inputs.iter().map(|i| i.as_ref().map(Input::tensor)).collect();
        let stream: RawStream = context.gpu_stream()?.cast();
        let workspace = SessionWorkspace { kernel: self, context, stream, blocks: RefCell::default() };
        // SAFETY: the stream belongs to the provider, which made its context current. The provider's tensors are in
        // this context's memory, have the stated sizes, and are accessed in stream order. The output has the
        // registered element type, which is the operator's for these inputs.
        unsafe {
            let stream = Stream::borrow(Driver::get()?, stream)?;
            moh_cuda::run_into(&self.attributes, &tensors, &stream, &workspace, |_, shape| {
                Ok::<_, Failure>(context.output(shape)? as RawPtr)
            })
        }
    }
}

/// An input of a call.
struct Input {
    tensor: TensorPtr,
    dtype: DType,
}

impl Input {
    fn new(operator: &Operator, index: usize, tensor: TensorPtr) -> Result<Input, Failure> {
        Ok(Input { dtype: check_input(operator, index, &tensor)?, tensor })
    }

    fn tensor(&self) -> DeviceTensor<'_> {
        let TensorPtr { rank, dims, data, .. } = &self.tensor;
        DeviceTensor { shape: &dims[..*rank], dtype: self.dtype, ptr: *data as RawPtr }
    }
}

/// The session's device memory during one call.
struct SessionWorkspace<'c> {
    kernel: &'c CudaKernel,
    context: &'c KernelContext<'c>,
    stream: RawStream,
    blocks: RefCell<Vec<NonNull<u8>>>,
}

// SAFETY: the session's allocator returns memory of its device, aligned to 256 bytes, and reserves it for the stream
// for which it was allocated.
unsafe impl Workspace for SessionWorkspace<'_> {
    fn allocate(&self, bytes: usize) -> Result<RawPtr, Error> {
        let out_of_memory = || Error::OutOfMemory { bytes };
        let allocator = &self.kernel.allocator;
        // The stream-aware function ends the process if there is no memory, this one returns an error. The memory it
        // allocates is freed again, so that the other one finds it.
        let mut block = allocator.allocate(bytes.max(1)).ok_or_else(out_of_memory)?;
        // On the default stream all work is in order.
        if !self.stream.is_null() {
            // SAFETY: the block is not in use yet; the node has a stream.
            let scratch = unsafe {
                allocator.release(block);
                allocator.memory().and_then(|memory| Ok(self.context.scratch(memory, bytes.max(1))?))
            };
            block = scratch.ok().and_then(|scratch| NonNull::new(scratch.cast())).ok_or_else(out_of_memory)?;
        }
        self.blocks.borrow_mut().push(block);
        Ok(block.as_ptr() as RawPtr)
    }
}

impl Drop for SessionWorkspace<'_> {
    fn drop(&mut self) {
        for block in self.blocks.take() {
            // SAFETY: from `allocate`, released once; the allocator orders the next use of the memory by the stream.
            unsafe { self.kernel.allocator.release(block) };
        }
    }
}
