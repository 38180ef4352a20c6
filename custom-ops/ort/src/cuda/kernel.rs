//! A node's kernel on a GPU: launches on the session's stream, and does not wait.

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

/// A node's attributes, checked.
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
        // SAFETY: the provider's stream, whose context it has made current; its tensors are in this context's memory, of the sizes
        // that it says, and it orders by the stream what it does with them. The output is of the registered element type, which
        // is the operator's for these inputs.
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

/// Device memory of the session for one call.
struct SessionWorkspace<'c> {
    kernel: &'c CudaKernel,
    context: &'c KernelContext<'c>,
    stream: RawStream,
    blocks: RefCell<Vec<NonNull<u8>>>,
}

// SAFETY: the session's allocator gives memory of its device, aligned to 256 bytes, and keeps it for the stream that it was asked for.
unsafe impl Workspace for SessionWorkspace<'_> {
    fn allocate(&self, bytes: usize) -> Result<RawPtr, Error> {
        let out_of_memory = || Error::OutOfMemory { bytes };
        let allocator = &self.kernel.allocator;
        // The function that knows streams ends the process where there is no memory; this one reports it. What it gets, the
        // other finds free.
        let mut block = allocator.allocate(bytes.max(1)).ok_or_else(out_of_memory)?;
        // On the default stream everything is in order by itself.
        if !self.stream.is_null() {
            // SAFETY: the block is not in use yet. The node has a stream.
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
            // SAFETY: of `allocate`, given back once; the allocator orders the next use of it by the stream.
            unsafe { self.kernel.allocator.release(block) };
        }
    }
}
