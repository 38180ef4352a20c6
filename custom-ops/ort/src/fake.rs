//! A host for tests: the functions of the C API that the library uses, with their contracts checked.
//!
//! Objects are counted by thread: a test that ends with [`live`] at 0 has released all that it was given.

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]

use half::{bf16, f16};
use moh_kernels::schema::Value;
use moh_kernels::{DType, Data};
use ort_sys::*;
use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicIsize, Ordering};

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
}

/// Objects of the host that the library, on this thread, has yet to release.
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

/// Code and message of a status, which is released; `None` for success.
pub(crate) fn outcome(status: OrtStatusPtr) -> Option<(OrtErrorCode, String)> {
    let (code, message) = unsafe { status.0.cast::<Status>().as_ref() }?;
    let outcome = (*code, message.to_str().unwrap().to_owned());
    unsafe { take::<Status, _>(status.0) };
    Some(outcome)
}

/// A type and shape; a dimension is its size, or -1 and a name.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Info {
    pub(crate) ty: i32,
    pub(crate) sizes: Vec<i64>,
    pub(crate) names: Vec<CString>,
}

impl Info {
    pub(crate) fn new(dtype: DType, dims: &[(i64, &str)]) -> Info {
        let names = dims.iter().map(|(_, name)| CString::new(*name).unwrap()).collect();
        Info { ty: crate::op::onnx_type(dtype) as i32, sizes: dims.iter().map(|d| d.0).collect(), names }
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
    /// What shape inference said.
    pub(crate) output: Option<Info>,
    /// Inputs that are constants, by their number.
    pub(crate) constants: Vec<(usize, *const Tensor)>,
}

/// A tensor whose data start at `offset` in a buffer that is aligned to 64 bytes.
pub(crate) struct Tensor {
    pub(crate) info: Info,
    buffer: Vec<[u8; 64]>,
    offset: usize,
}

impl Tensor {
    pub(crate) fn new(dims: &[usize], data: Data<'_>, offset: usize) -> Tensor {
        let bytes: Vec<u8> = match data {
            Data::F32(x) => x.iter().flat_map(|x| x.to_ne_bytes()).collect(),
            Data::F16(x) => x.iter().flat_map(|x| x.to_ne_bytes()).collect(),
            Data::BF16(x) => x.iter().flat_map(|x| x.to_ne_bytes()).collect(),
            Data::Packed(_) => unreachable!("hosts know no packed tensors"),
        };
        let mut tensor = Tensor::filled(Info::sized(data.dtype(), dims), bytes.len(), offset);
        tensor.buffer.as_flattened_mut()[offset..][..bytes.len()].copy_from_slice(&bytes);
        tensor
    }

    fn filled(info: Info, bytes: usize, offset: usize) -> Tensor {
        // 0xFF.. is NaN in every type: an element that is not written shows.
        Tensor { info, buffer: vec![[0xFF; 64]; (bytes + offset).div_ceil(64)], offset }
    }

    /// The first elements as f64; the buffer may be longer.
    pub(crate) fn values(&self) -> Vec<f64> {
        let count = self.info.sizes.iter().product::<i64>() as usize;
        let bytes = &self.buffer.as_flattened()[self.offset..];
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
    /// Blocks of memory that the allocator gave out and did not get back.
    pub(crate) blocks: AtomicIsize,
    /// Whether the threads fail after their work.
    pub(crate) broken_threads: bool,
    /// Whether the provider runs on the default stream.
    pub(crate) default_stream: bool,
}

impl Call {
    pub(crate) fn new(output_type: DType, inputs: Vec<Option<Tensor>>) -> Call {
        Call {
            inputs,
            output_type,
            output: None,
            blocks: AtomicIsize::new(0),
            broken_threads: false,
            default_stream: false,
        }
    }
}

/// An operator domain: its name and the tables added to it.
pub(crate) struct Domain {
    pub(crate) name: CString,
    pub(crate) ops: Vec<*const OrtCustomOp>,
    /// Sessions made with it.
    pub(crate) sessions: usize,
}

/// Session options.
#[derive(Default)]
pub(crate) struct Options {
    /// The domains added to them.
    pub(crate) domains: Vec<*mut Domain>,
    /// Config entries.
    pub(crate) entries: Vec<(CString, CString)>,
}

/// The host's functions; what is not listed fails as unimplemented.
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

unsafe extern "system" fn create_domain(name: *const c_char, out: *mut *mut OrtCustomOpDomain) -> OrtStatusPtr {
    let domain = Domain { name: unsafe { CStr::from_ptr(name) }.to_owned(), ops: Vec::new(), sessions: 0 };
    unsafe { out.write(Box::into_raw(Box::new(domain)).cast()) };
    ok()
}

unsafe extern "system" fn add_op(domain: *mut OrtCustomOpDomain, op: *const OrtCustomOp) -> OrtStatusPtr {
    unsafe { (*domain.cast::<Domain>()).ops.push(op) };
    ok()
}

unsafe extern "system" fn add_domain(options: *mut OrtSessionOptions, domain: *mut OrtCustomOpDomain) -> OrtStatusPtr {
    unsafe { (*options.cast::<Options>()).domains.push(domain.cast()) };
    ok()
}

unsafe extern "system" fn create_env(_: OrtLoggingLevel, name: *const c_char, out: *mut *mut OrtEnv) -> OrtStatusPtr {
    unsafe { out.write(give(CStr::from_ptr(name).to_bytes().len() as u64)) };
    ok()
}

unsafe fn find_entry<'a>(options: *const OrtSessionOptions, key: *const c_char) -> Option<&'a CString> {
    let (options, key) = unsafe { (&*options.cast::<Options>(), CStr::from_ptr(key)) };
    options.entries.iter().find(|(k, _)| k.as_c_str() == key).map(|(_, value)| value)
}

unsafe extern "system" fn has_entry(
    options: *const OrtSessionOptions,
    key: *const c_char,
    out: *mut i32,
) -> OrtStatusPtr {
    unsafe { out.write(i32::from(find_entry(options, key).is_some())) };
    ok()
}

unsafe extern "system" fn get_entry(
    options: *const OrtSessionOptions,
    key: *const c_char,
    value: *mut c_char,
    size: *mut usize,
) -> OrtStatusPtr {
    let Some(found) = (unsafe { find_entry(options, key) }) else { return fail("no such entry") };
    let bytes = found.as_bytes_with_nul();
    unsafe {
        match value.is_null() {
            true => size.write(bytes.len()),
            false if size.read() < bytes.len() => return fail("the buffer is too small"),
            false => value.copy_from_nonoverlapping(bytes.as_ptr().cast(), bytes.len()),
        }
    }
    ok()
}

unsafe extern "system" fn constant_input(
    info: *const OrtKernelInfo,
    index: usize,
    is_constant: *mut i32,
    out: *mut *const OrtValue,
) -> OrtStatusPtr {
    let found = unsafe { node(info) }.constants.iter().find(|(i, _)| *i == index);
    unsafe {
        is_constant.write(i32::from(found.is_some()));
        out.write(found.map_or(std::ptr::null(), |(_, tensor)| tensor.cast()));
    }
    ok()
}

unsafe extern "system" fn create_options(out: *mut *mut OrtSessionOptions) -> OrtStatusPtr {
    unsafe { out.write(give(Options::default())) };
    ok()
}

unsafe extern "system" fn set_threads(_: *mut OrtSessionOptions, threads: i32) -> OrtStatusPtr {
    if threads == 1 { ok() } else { fail("more threads than the caller's") }
}

unsafe extern "system" fn create_session(
    _: *const OrtEnv,
    model: *const c_void,
    bytes: usize,
    options: *const OrtSessionOptions,
    out: *mut *mut OrtSession,
) -> OrtStatusPtr {
    assert!(!model.is_null() && bytes > 0);
    for &domain in unsafe { &(*options.cast::<Options>()).domains } {
        unsafe { (*domain).sessions += 1 };
    }
    unsafe { out.write(give(bytes)) };
    ok()
}

unsafe fn node<'a, R>(node: *const R) -> &'a Node {
    unsafe { &*node.cast() }
}

unsafe fn named(of: &Node, name: *const c_char) -> Option<&Value> {
    let name = unsafe { CStr::from_ptr(name) }.to_str().unwrap();
    of.attributes.iter().find(|(n, _)| *n == name).map(|(_, value)| value)
}

unsafe extern "system" fn attribute_int(
    info: *const OrtKernelInfo,
    name: *const c_char,
    out: *mut i64,
) -> OrtStatusPtr {
    match unsafe { named(node(info), name) } {
        Some(Value::Int(value)) => unsafe { out.write(*value) },
        _ => return fail("no such integer"),
    }
    ok()
}

unsafe extern "system" fn attribute_float(
    info: *const OrtKernelInfo,
    name: *const c_char,
    out: *mut f32,
) -> OrtStatusPtr {
    match unsafe { named(node(info), name) } {
        Some(Value::Float(value)) => unsafe { out.write(*value) },
        _ => return fail("no such float"),
    }
    ok()
}

unsafe extern "system" fn attribute_ints(
    info: *const OrtKernelInfo,
    name: *const c_char,
    out: *mut i64,
    len: *mut usize,
) -> OrtStatusPtr {
    let ints = match unsafe { named(node(info), name) } {
        Some(Value::Ints(ints)) => ints.as_slice(),
        Some(_) => &[],
        None => return fail("no such list"),
    };
    unsafe {
        if !out.is_null() {
            assert!(*len >= ints.len());
            out.copy_from_nonoverlapping(ints.as_ptr(), ints.len());
        }
        len.write(ints.len());
    }
    ok()
}

unsafe extern "system" fn node_input_count<R>(of: *const R, out: *mut usize) -> OrtStatusPtr {
    unsafe { out.write(node(of).inputs.len()) };
    ok()
}

unsafe extern "system" fn input_type_info(
    info: *const OrtKernelInfo,
    index: usize,
    out: *mut *mut OrtTypeInfo,
) -> OrtStatusPtr {
    match unsafe { &node(info).inputs[index] } {
        Some(info) => unsafe { out.write(give(info.clone())) },
        None => return fail("the input does not have a type"),
    }
    ok()
}

unsafe extern "system" fn cast_type_info(
    info: *const OrtTypeInfo,
    out: *mut *const OrtTensorTypeAndShapeInfo,
) -> OrtStatusPtr {
    unsafe { out.write(info.cast()) };
    ok()
}

unsafe extern "system" fn input_type_shape(
    context: *const OrtShapeInferContext,
    index: usize,
    out: *mut *mut OrtTensorTypeAndShapeInfo,
) -> OrtStatusPtr {
    let info = unsafe { node(context) }.inputs[index].as_ref().unwrap();
    unsafe { out.write(std::ptr::from_ref(info).cast_mut().cast()) };
    ok()
}

unsafe extern "system" fn find_attribute(
    context: *const OrtShapeInferContext,
    name: *const c_char,
    out: *mut *const OrtOpAttr,
) -> OrtStatusPtr {
    match unsafe { named(node(context), name) } {
        Some(value) => unsafe { out.write(std::ptr::from_ref(value).cast()) },
        None => return fail("Attribute does not exist."),
    }
    ok()
}

unsafe extern "system" fn read_attribute(
    attribute: *const OrtOpAttr,
    ty: OrtOpAttrType,
    data: *mut c_void,
    len: usize,
    out: *mut usize,
) -> OrtStatusPtr {
    unsafe { out.write(0) };
    match (unsafe { &*attribute.cast::<Value>() }, ty) {
        (Value::Int(value), OrtOpAttrType::ORT_OP_ATTR_INT) if len >= 8 => unsafe { data.cast::<i64>().write(*value) },
        (Value::Float(value), OrtOpAttrType::ORT_OP_ATTR_FLOAT) if len >= 4 => unsafe {
            data.cast::<f32>().write(*value)
        },
        (Value::Ints(values), OrtOpAttrType::ORT_OP_ATTR_INTS) => {
            let bytes = size_of_val(values.as_slice());
            unsafe { out.write(bytes) };
            if len < bytes {
                return fail("too little room");
            }
            if bytes > 0 {
                unsafe { data.cast::<i64>().copy_from_nonoverlapping(values.as_ptr(), values.len()) };
            }
        }
        (_, OrtOpAttrType::ORT_OP_ATTR_INTS) => {}
        _ => return fail("Attribute has no such value."),
    }
    ok()
}

unsafe extern "system" fn set_output(
    context: *const OrtShapeInferContext,
    index: usize,
    info: *const OrtTensorTypeAndShapeInfo,
) -> OrtStatusPtr {
    assert_eq!(index, 0);
    let info = unsafe { &*info.cast::<Info>() };
    if info.sizes.len() != info.names.len() {
        return fail("symbolic and integer dims mismatch!");
    }
    unsafe { (*context.cast_mut().cast::<Node>()).output = Some(info.clone()) };
    ok()
}

unsafe extern "system" fn create_info(out: *mut *mut OrtTensorTypeAndShapeInfo) -> OrtStatusPtr {
    unsafe { out.write(give(Info { ty: 0, sizes: Vec::new(), names: Vec::new() })) };
    ok()
}

unsafe fn info<'a>(info: *mut OrtTensorTypeAndShapeInfo) -> &'a mut Info {
    unsafe { &mut *info.cast() }
}

unsafe extern "system" fn set_element_type(
    of: *mut OrtTensorTypeAndShapeInfo,
    ty: ONNXTensorElementDataType,
) -> OrtStatusPtr {
    unsafe { info(of) }.ty = ty as i32;
    ok()
}

unsafe extern "system" fn set_dimensions(
    of: *mut OrtTensorTypeAndShapeInfo,
    sizes: *const i64,
    count: usize,
) -> OrtStatusPtr {
    unsafe { info(of) }.sizes = unsafe { std::slice::from_raw_parts(sizes, count) }.to_vec();
    ok()
}

unsafe extern "system" fn set_names(
    of: *mut OrtTensorTypeAndShapeInfo,
    names: *mut *const c_char,
    count: usize,
) -> OrtStatusPtr {
    let names = unsafe { std::slice::from_raw_parts(names, count) };
    unsafe { info(of) }.names = names.iter().map(|&name| unsafe { CStr::from_ptr(name) }.to_owned()).collect();
    ok()
}

unsafe extern "system" fn element_type(
    of: *const OrtTensorTypeAndShapeInfo,
    out: *mut ONNXTensorElementDataType,
) -> OrtStatusPtr {
    unsafe { out.cast::<i32>().write(info(of.cast_mut()).ty) };
    ok()
}

unsafe extern "system" fn rank(of: *const OrtTensorTypeAndShapeInfo, out: *mut usize) -> OrtStatusPtr {
    unsafe { out.write(info(of.cast_mut()).sizes.len()) };
    ok()
}

unsafe extern "system" fn dimensions(of: *const OrtTensorTypeAndShapeInfo, out: *mut i64, room: usize) -> OrtStatusPtr {
    let sizes = &unsafe { info(of.cast_mut()) }.sizes;
    unsafe { out.copy_from_nonoverlapping(sizes.as_ptr(), room.min(sizes.len())) };
    ok()
}

unsafe extern "system" fn names(
    of: *const OrtTensorTypeAndShapeInfo,
    out: *mut *const c_char,
    room: usize,
) -> OrtStatusPtr {
    for (i, name) in unsafe { info(of.cast_mut()) }.names.iter().take(room).enumerate() {
        unsafe { out.add(i).write(name.as_ptr()) };
    }
    ok()
}

unsafe fn call<'a>(context: *const OrtKernelContext) -> &'a mut Call {
    unsafe { &mut *context.cast_mut().cast() }
}

unsafe extern "system" fn call_input_count(context: *const OrtKernelContext, out: *mut usize) -> OrtStatusPtr {
    unsafe { out.write(call(context).inputs.len()) };
    ok()
}

unsafe extern "system" fn call_input(
    context: *const OrtKernelContext,
    index: usize,
    out: *mut *const OrtValue,
) -> OrtStatusPtr {
    let input = unsafe { call(context) }.inputs[index].as_ref();
    unsafe { out.write(input.map_or(std::ptr::null(), |tensor| std::ptr::from_ref(tensor).cast())) };
    ok()
}

unsafe extern "system" fn call_output(
    context: *mut OrtKernelContext,
    index: usize,
    sizes: *const i64,
    count: usize,
    out: *mut *mut OrtValue,
) -> OrtStatusPtr {
    assert_eq!(index, 0);
    let call = unsafe { call(context) };
    let dims: Vec<usize> =
        unsafe { std::slice::from_raw_parts(sizes, count) }.iter().map(|&d| d.try_into().unwrap()).collect();
    let bytes = 4 * dims.iter().product::<usize>();
    let output = call.output.insert(Tensor::filled(Info::sized(call.output_type, &dims), bytes, 0));
    unsafe { out.write(std::ptr::from_mut(output).cast()) };
    ok()
}

unsafe extern "system" fn tensor_info(
    value: *const OrtValue,
    out: *mut *mut OrtTensorTypeAndShapeInfo,
) -> OrtStatusPtr {
    unsafe { out.write(give((*value.cast::<Tensor>()).info.clone())) };
    ok()
}

unsafe extern "system" fn tensor_data(value: *mut OrtValue, out: *mut *mut c_void) -> OrtStatusPtr {
    let tensor = unsafe { &mut *value.cast::<Tensor>() };
    unsafe { out.write(tensor.buffer.as_mut_ptr().cast::<u8>().wrapping_add(tensor.offset).cast()) };
    ok()
}

/// Half of the tasks run on another thread.
unsafe extern "system" fn parallel_for(
    context: *const OrtKernelContext,
    task: unsafe extern "C" fn(*mut c_void, usize),
    total: usize,
    _: usize,
    data: *mut c_void,
) -> OrtStatusPtr {
    let data = data.expose_provenance();
    let run = |i| unsafe { task(std::ptr::with_exposed_provenance_mut(data), i) };
    std::thread::scope(|scope| {
        scope.spawn(|| (0..total / 2).for_each(run));
        (total / 2..total).for_each(run);
    });
    match unsafe { call(context) }.broken_threads {
        true => fail("no threads"),
        false => ok(),
    }
}

unsafe extern "system" fn create_memory_info(
    _: OrtAllocatorType,
    _: OrtMemType,
    out: *mut *mut OrtMemoryInfo,
) -> OrtStatusPtr {
    // Not of size zero, so that a second release is noticed.
    unsafe { out.write(give(0u64)) };
    ok()
}

/// What was said in the log.
pub(crate) static LOG: Mutex<Vec<String>> = Mutex::new(Vec::new());

unsafe extern "system" fn get_logger(_: *const OrtKernelInfo, out: *mut *const OrtLogger) -> OrtStatusPtr {
    unsafe { out.write((&raw const LOG).cast()) };
    ok()
}

unsafe extern "system" fn log(
    _: *const OrtLogger,
    _: OrtLoggingLevel,
    message: *const c_char,
    _: *const c_char,
    _: i32,
    _: *const c_char,
) -> OrtStatusPtr {
    LOG.lock().unwrap().push(unsafe { CStr::from_ptr(message) }.to_str().unwrap().to_owned());
    ok()
}

/// The provider's memory info, and its stream: addresses to know them by.
static DEVICE_MEMORY: u64 = 0;
static STREAM: u64 = 0;

unsafe extern "system" fn get_device_allocator(
    _: *const OrtKernelInfo,
    _: OrtMemType,
    out: *mut *mut OrtAllocator,
) -> OrtStatusPtr {
    unsafe { out.write(give(Lender(None))) };
    ok()
}

unsafe extern "system" fn allocator_memory(_: *const OrtAllocator, out: *mut *const OrtMemoryInfo) -> OrtStatusPtr {
    unsafe { out.write((&raw const DEVICE_MEMORY).cast()) };
    ok()
}

unsafe extern "system" fn get_stream(context: *const OrtKernelContext, out: *mut *mut c_void) -> OrtStatusPtr {
    let stream = if unsafe { call(context) }.default_stream { std::ptr::null() } else { &raw const STREAM };
    unsafe { out.write(stream.cast_mut().cast()) };
    ok()
}

unsafe extern "system" fn scratch(
    context: *const OrtKernelContext,
    memory: *const OrtMemoryInfo,
    bytes: usize,
    out: *mut *mut c_void,
) -> OrtStatusPtr {
    assert!(memory == (&raw const DEVICE_MEMORY).cast() && bytes > 0);
    assert!(!unsafe { call(context) }.default_stream, "onnxruntime crashes without a stream");
    let mut lender = Lender(None);
    unsafe { allocate((&raw mut lender).cast(), bytes, out) }
}

/// An allocator: where it counts its blocks; the device's are counted as objects.
struct Lender(Option<*const AtomicIsize>);

unsafe fn count_block(of: *mut OrtAllocator, change: isize) {
    match unsafe { &*of.cast::<Lender>() }.0 {
        Some(blocks) => _ = unsafe { &*blocks }.fetch_add(change, Ordering::Relaxed),
        None => LIVE.set(LIVE.get() + change),
    }
}

unsafe extern "system" fn get_allocator(
    context: *const OrtKernelContext,
    _: *const OrtMemoryInfo,
    out: *mut *mut OrtAllocator,
) -> OrtStatusPtr {
    unsafe { out.write(give(Lender(Some(&raw const call(context).blocks)))) };
    ok()
}

unsafe extern "system" fn allocate(of: *mut OrtAllocator, size: usize, out: *mut *mut c_void) -> OrtStatusPtr {
    if size > isize::MAX as usize / 2 {
        return fail("out of memory");
    }
    let mut block = vec![Line([0xFF; 256]); size.div_ceil(256)];
    unsafe {
        count_block(of, 1);
        out.write(block.as_mut_ptr().cast());
    }
    BLOCKS.lock().unwrap().push(block);
    ok()
}

unsafe extern "system" fn free(of: *mut OrtAllocator, memory: *mut c_void) -> OrtStatusPtr {
    let mut blocks = BLOCKS.lock().unwrap();
    let index = blocks.iter().position(|block| block.as_ptr().cast() == memory.cast_const()).unwrap();
    blocks.swap_remove(index);
    unsafe { count_block(of, -1) };
    ok()
}

/// Memory as providers align it.
#[derive(Clone, Copy)]
#[repr(align(256))]
#[allow(dead_code)]
struct Line([u8; 256]);

/// The blocks that are out; a release of anything else panics.
static BLOCKS: Mutex<Vec<Vec<Line>>> = Mutex::new(Vec::new());
