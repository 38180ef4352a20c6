//! A fake host for tests: the C API functions that the library uses, with checks of their contracts.
//!
//! Objects are counted per thread: if [`live`] is 0 at the end of a test, the library has released everything.

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]

pub(crate) mod device;
mod info;
mod memory;
mod node;
mod run;
mod session;

use half::{bf16, f16};
use info::*;
use memory::*;
#[cfg(feature = "cuda")]
pub(crate) use memory::{Requests, requests_of};
use moh_operators::{DType, Data, Value};
use node::*;
use ort_sys::*;
#[cfg(feature = "cuda")]
pub(crate) use run::LOG;
use run::*;
use session::*;
use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicIsize, Ordering};

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
}

/// Number of the host's objects that the library has not yet released on this thread.
pub(crate) fn live() -> isize {
    LIVE.get()
}

fn give<T, R>(object: T) -> *mut R {
    LIVE.set(LIVE.get() + 1);
    Box::into_raw(Box::new(object)).cast()
}

unsafe fn take<T, R>(object: *mut R) {
    LIVE.set(LIVE.get() - 1);
    drop(unsafe { Box::from_raw(object.cast::<T>()) });
}

fn ok() -> OrtStatusPtr {
    OrtStatusPtr::default()
}

fn fail(message: &str) -> OrtStatusPtr {
    OrtStatusPtr(give((OrtErrorCode::ORT_FAIL, CString::new(message).unwrap())))
}

type Status = (OrtErrorCode, CString);

/// Code and message of a status, which is then released; `None` if it is null (success).
pub(crate) fn outcome(status: OrtStatusPtr) -> Option<(OrtErrorCode, String)> {
    let (code, message) = unsafe { status.0.cast::<Status>().as_ref() }?;
    let outcome = (*code, message.to_str().unwrap().to_owned());
    unsafe { take::<Status, _>(status.0) };
    Some(outcome)
}

/// A type and shape. A dimension is a size, or -1 and a name.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Info {
    pub(crate) ty: i32,
    pub(crate) sizes: Vec<i64>,
    pub(crate) names: Vec<CString>,
}

impl Info {
    pub(crate) fn new(dtype: DType, dims: &[(i64, &str)]) -> Info {
        let names = dims.iter().map(|(_, name)| CString::new(*name).unwrap()).collect();
        Info { ty: crate::element::onnx_type(dtype) as i32, sizes: dims.iter().map(|d| d.0).collect(), names }
    }

    pub(crate) fn sized(dtype: DType, dims: &[usize]) -> Info {
        Info::new(dtype, &dims.iter().map(|&d| (d as i64, "")).collect::<Vec<_>>())
    }
}

/// A node while the model is loaded.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) attributes: Vec<(&'static str, Value)>,
    pub(crate) inputs: Vec<Option<Info>>,
    /// The result of shape inference.
    pub(crate) output: Option<Info>,
    /// Constant inputs and their indices.
    pub(crate) constants: Vec<(usize, *const Tensor)>,
}

/// A tensor whose data start at `offset` in a buffer aligned to 64 bytes, or in the buffer of another tensor.
pub(crate) struct Tensor {
    pub(crate) info: Info,
    buffer: Vec<[u8; 64]>,
    offset: usize,
    /// The exposed address of the data in another tensor's buffer.
    shared: Option<usize>,
}

impl Tensor {
    pub(crate) fn new(dims: &[usize], data: Data<'_>, offset: usize) -> Tensor {
        let bytes: Vec<u8> = match data {
            Data::F32(x) => x.iter().flat_map(|x| x.to_ne_bytes()).collect(),
            Data::F16(x) => x.iter().flat_map(|x| x.to_ne_bytes()).collect(),
            Data::BF16(x) => x.iter().flat_map(|x| x.to_ne_bytes()).collect(),
            Data::U8(x) => x.to_vec(),
            Data::I64(x) => x.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        };
        let mut tensor = Tensor::filled(Info::sized(data.dtype(), dims), bytes.len(), offset);
        tensor.buffer.as_flattened_mut()[offset..][..bytes.len()].copy_from_slice(&bytes);
        tensor
    }

    /// A tensor in other memory, which is alive as long as the tensor.
    pub(crate) fn at(dims: &[usize], dtype: DType, data: *mut u8) -> Tensor {
        let shared = Some(data.expose_provenance());
        Tensor { info: Info::sized(dtype, dims), buffer: Vec::new(), offset: 0, shared }
    }

    fn filled(info: Info, bytes: usize, offset: usize) -> Tensor {
        // 0xFF bytes are NaN in every type, so elements that are not written are detected.
        Tensor { info, buffer: vec![[0xFF; 64]; (bytes + offset).div_ceil(64)], offset, shared: None }
    }

    fn data(&mut self) -> *mut u8 {
        match self.shared {
            Some(address) => std::ptr::with_exposed_provenance_mut(address),
            None => self.buffer.as_mut_ptr().cast::<u8>().wrapping_add(self.offset),
        }
    }

    /// The elements as f64, without the buffer's padding. The tensor whose buffer this one shares is alive.
    pub(crate) fn values(&self) -> Vec<f64> {
        let count = self.info.sizes.iter().product::<i64>() as usize;
        let bytes = match self.shared {
            Some(address) => unsafe {
                std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), 4 * count)
            },
            None => &self.buffer.as_flattened()[self.offset..],
        };
        let value = |i: usize| match self.info.ty {
            1 => f64::from(f32::from_ne_bytes(bytes[4 * i..][..4].try_into().unwrap())),
            10 => f64::from(f16::from_ne_bytes(bytes[2 * i..][..2].try_into().unwrap())),
            _ => f64::from(bf16::from_ne_bytes(bytes[2 * i..][..2].try_into().unwrap())),
        };
        (0..count).map(value).collect()
    }
}

/// A node that is being run.
pub(crate) struct Call {
    pub(crate) inputs: Vec<Option<Tensor>>,
    pub(crate) output_type: DType,
    pub(crate) output: Option<Tensor>,
    /// An input in whose buffer the output lies, and how many bytes after its data.
    pub(crate) shared: Option<(usize, usize)>,
    /// Number of blocks that were allocated and not released.
    pub(crate) blocks: AtomicIsize,
    /// Whether `parallel_for` fails after running its tasks.
    pub(crate) broken_threads: bool,
    /// Whether creating the output fails.
    pub(crate) no_output: bool,
    /// Whether the provider runs on the default stream.
    pub(crate) default_stream: bool,
}

impl Call {
    pub(crate) fn new(output_type: DType, inputs: Vec<Option<Tensor>>) -> Call {
        Call {
            inputs,
            output_type,
            output: None,
            shared: None,
            blocks: AtomicIsize::new(0),
            broken_threads: false,
            no_output: false,
            default_stream: false,
        }
    }
}

/// An operator domain: its name and the operator tables added to it.
pub(crate) struct Domain {
    pub(crate) name: CString,
    pub(crate) ops: Vec<*const OrtCustomOp>,
    /// Number of sessions created with it.
    pub(crate) sessions: usize,
}

/// Session options.
#[derive(Default)]
pub(crate) struct Options {
    /// The domains added to these options.
    pub(crate) domains: Vec<*mut Domain>,
    /// Config entries.
    pub(crate) entries: Vec<(CString, CString)>,
}

/// The host's function table; functions that are not listed return an error.
pub(crate) fn api() -> OrtApi {
    OrtApi {
        CreateStatus: create_status,
        GetErrorMessage: get_error_message,
        ReleaseStatus: release::<Status, _>,
        CreateCustomOpDomain: create_domain,
        CustomOpDomain_Add: add_op,
        AddCustomOpDomain: add_domain,
        CreateEnv: create_env,
        CreateSessionOptions: create_options,
        AddSessionConfigEntry: set_entry,
        HasSessionConfigEntry: has_entry,
        GetSessionConfigEntry: get_entry,
        KernelInfoGetConstantInput_tensor: constant_input,
        SetIntraOpNumThreads: set_threads,
        CreateSessionFromArray: create_session,
        ReleaseSession: release::<usize, _>,
        ReleaseSessionOptions: release::<Options, _>,
        ReleaseEnv: release::<u64, _>,
        KernelInfoGetAttribute_int64: attribute_int,
        KernelInfoGetAttribute_float: attribute_float,
        KernelInfoGetAttributeArray_int64: attribute_ints,
        KernelInfo_GetInputCount: node_input_count::<OrtKernelInfo>,
        KernelInfo_GetInputTypeInfo: input_type_info,
        CastTypeInfoToTensorInfo: cast_type_info,
        ReleaseTypeInfo: release::<Info, _>,
        ShapeInferContext_GetInputCount: node_input_count::<OrtShapeInferContext>,
        ShapeInferContext_GetInputTypeShape: input_type_shape,
        ShapeInferContext_GetAttribute: find_attribute,
        ReadOpAttr: read_attribute,
        ShapeInferContext_SetOutputTypeShape: set_output,
        CreateTensorTypeAndShapeInfo: create_info,
        SetTensorElementType: set_element_type,
        SetDimensions: set_dimensions,
        SetSymbolicDimensions: set_names,
        GetTensorElementType: element_type,
        GetDimensionsCount: rank,
        GetDimensions: dimensions,
        GetSymbolicDimensions: names,
        ReleaseTensorTypeAndShapeInfo: release::<Info, _>,
        KernelContext_GetInputCount: call_input_count,
        KernelContext_GetInput: call_input,
        KernelContext_GetOutput: call_output,
        GetTensorTypeAndShape: tensor_info,
        GetTensorMutableData: tensor_data,
        KernelContext_ParallelFor: parallel_for,
        CreateCpuMemoryInfo: create_memory_info,
        ReleaseMemoryInfo: release::<u64, _>,
        KernelContext_GetAllocator: get_allocator,
        ReleaseAllocator: release::<Lender, _>,
        AllocatorAlloc: allocate,
        AllocatorFree: free,
        KernelInfo_GetLogger: get_logger,
        Logger_LogMessage: log,
        KernelInfoGetAllocator: get_device_allocator,
        AllocatorGetInfo: allocator_memory,
        KernelContext_GetGPUComputeStream: get_stream,
        KernelContext_GetScratchBuffer: scratch,
        ..stub::api()
    }
}

unsafe extern "system" fn release<T, R>(object: *mut R) {
    unsafe { take::<T, R>(object) }
}

unsafe extern "system" fn create_status(code: OrtErrorCode, message: *const c_char) -> OrtStatusPtr {
    OrtStatusPtr(give((code, unsafe { CStr::from_ptr(message) }.to_owned())))
}

unsafe extern "system" fn get_error_message(status: *const OrtStatus) -> *const c_char {
    unsafe { (*status.cast::<Status>()).1.as_ptr() }
}
