//! A node's GPU kernel: launches on the session's stream, without waiting.

use crate::api::Api;
use crate::context::{KernelContext, KernelInfo, TensorPtr};
use crate::failure::Failure;
use crate::infer;
use crate::kernel::{check_input, read_node};
use crate::objects::Allocator;
use crate::op::NodeKernel;
use crate::settings::Settings;
use half::{bf16, f16};
use moh_cuda::{DeviceTensor, Driver, RawPtr, RawStream, Stream, Workspace};
use moh_operators::{Attributes, DType, Error, Operator};
use std::cell::OnceCell;
use std::ffi::CStr;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

/// Bytes up to which a constant is read to see what it is.
const LOOKED_AT: usize = 1 << 16;

/// A node's checked attributes, and the provider's allocator.
pub(crate) struct CudaKernel {
    api: Api,
    attributes: Attributes,
    allocator: Allocator,
    /// Which inputs stand in for absent ones, because the operator's body needs them, and change nothing.
    fillers: Vec<bool>,
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
        // Rather no session than one whose runs fail.
        Driver::get()?.check_gpu()?;
        let attributes = read_node(operator, info)?;
        let fillers = fillers(&attributes, info)?;
        Ok(CudaKernel { api, attributes, allocator: info.allocator()?, fillers })
    }

    fn api(&self) -> Api {
        self.api
    }

    fn compute(&self, context: &KernelContext<'_>) -> Result<(), Failure> {
        let operator = self.attributes.operator();
        let is_used = |index: usize| !self.fillers.get(index).is_some_and(|filler| *filler);
        let read = |index| {
            let input = context.input(index)?.filter(|_| is_used(index));
            input.map(|input| Input::new(operator, index, input)).transpose()
        };
        let inputs: Vec<Option<Input>> = (0..context.input_count()?).map(read).collect::<Result<_, Failure>>()?;
        let tensors: Vec<Option<DeviceTensor<'_>>> = inputs.iter().map(|i| i.as_ref().map(Input::tensor)).collect();
        let stream: RawStream = context.gpu_stream()?.cast();
        let workspace = SessionWorkspace { kernel: self, context, stream, block: OnceCell::new() };
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

/// Which inputs are constants that the operator has for absent ones: kernels then do nothing for them.
fn fillers(attributes: &Attributes, info: &KernelInfo<'_>) -> Result<Vec<bool>, Failure> {
    let mut sizes = info.input_sizes()?;
    let found =
        (0..sizes.len()).map(|index| is_filler(attributes, index, info)).collect::<Result<Vec<_>, Failure>>()?;
    let left_out = sizes.iter_mut().zip(&found).filter(|(_, filler)| **filler);
    left_out.for_each(|(size, _)| *size = None);
    // Some are only there together.
    let can_be_left_out = matches!(infer::check(attributes, &sizes), Ok(Some(_)));
    Ok(if can_be_left_out { found } else { vec![false; found.len()] })
}

/// Whether an input is the constant that an exporter writes for none.
fn is_filler(attributes: &Attributes, index: usize, info: &KernelInfo<'_>) -> Result<bool, Failure> {
    let operator = attributes.operator();
    let is_optional = operator.inputs.get(index).is_some_and(|input| input.optional);
    let Some(constant) = is_optional.then(|| info.constant(index)).transpose()?.flatten() else { return Ok(false) };
    let dtype = check_input(operator, index, &constant)?;
    let sizes = info.input_sizes()?;
    let Some((shape, number)) = infer::filler(attributes, &sizes, index) else { return Ok(false) };
    let number = bytes_of(dtype, number);
    if shape != constant.dims() {
        return Ok(false);
    }
    let len = shape.iter().product::<usize>() * number.len();
    if len == 0 || len > LOOKED_AT {
        return Ok(false);
    }
    let mut found = vec![0; len];
    // SAFETY: the session's constant has so many bytes, which nobody changes.
    let read = unsafe { Driver::get()?.read(constant.data as RawPtr, &mut found) };
    // Where it cannot be read, it is used as it is.
    Ok(read.is_ok() && found.chunks_exact(number.len()).all(|found| found == number))
}

/// The bytes of a number.
fn bytes_of(dtype: DType, number: u8) -> Vec<u8> {
    match dtype {
        DType::F32 => f32::from(number).to_ne_bytes().to_vec(),
        DType::F16 => f16::from(number).to_ne_bytes().to_vec(),
        DType::BF16 => bf16::from(number).to_ne_bytes().to_vec(),
        DType::I64 => i64::from(number).to_ne_bytes().to_vec(),
        DType::U8 => vec![number],
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

/// The session's device memory during one call: one block, if the operator has intermediates.
struct SessionWorkspace<'c> {
    kernel: &'c CudaKernel,
    context: &'c KernelContext<'c>,
    stream: RawStream,
    block: OnceCell<NonNull<u8>>,
}

// SAFETY: the session's allocator returns memory of its device, aligned to 256 bytes, and reserves it for the stream
// for which it was allocated.
unsafe impl Workspace for SessionWorkspace<'_> {
    fn allocate(&self, bytes: usize) -> Result<RawPtr, Error> {
        let out_of_memory = || Error::OutOfMemory { bytes };
        let allocator = &self.kernel.allocator;
        // Only memory that was allocated for a stream may be released before the stream has passed its last use: the
        // arena gives other memory to any stream at once. The one function for that (KernelContext_GetScratchBuffer)
        // has no error: if there is no memory, an exception ends the process. Hence this allocation, which fails with a
        // status, and is released before any use. The next one finds it, or a block that an earlier node on this
        // stream has released; so it does not grow the arena. The first one does, if all free blocks large enough
        // belong to streams, which it cannot take. The arena's blocks keep their stream to the end of a run, so that
        // happens once or a few times in a run, and not again where blocks without a stream have been left over.
        // Between the two, no other node of ours takes the memory; onnxruntime's own still may.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _one_at_a_time = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let mut block = allocator.allocate(bytes).ok_or_else(out_of_memory)?;
        // On the default stream all work is in order.
        if !self.stream.is_null() {
            // SAFETY: the block is not in use yet; the node has a stream.
            let scratch = unsafe {
                allocator.release(block);
                allocator.memory().and_then(|memory| Ok(self.context.scratch(memory, bytes)?))
            };
            block = scratch.ok().and_then(|scratch| NonNull::new(scratch.cast())).ok_or_else(out_of_memory)?;
        }
        if self.block.set(block).is_err() {
            // SAFETY: not in use yet.
            unsafe { allocator.release(block) };
            return Err(out_of_memory());
        }
        Ok(block.as_ptr() as RawPtr)
    }
}

impl Drop for SessionWorkspace<'_> {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            // SAFETY: from `allocate`, released once; the allocator orders the next use of the memory by the stream.
            unsafe { self.kernel.allocator.release(block) };
        }
    }
}
