//! The host's view of a node: when its kernel is created, when it runs, and during shape inference.

use crate::api::{Api, Status, call};
use crate::element::ElementNumber;
use crate::failure::Failure;
use crate::objects::{Allocator, CpuMemory, TensorInfo, made};
use moh_operators::{AttributeDef, AttributeKind, Value};
use ort_sys::{
    ONNXTensorElementDataType, OrtKernelContext, OrtKernelInfo, OrtLogger, OrtLoggingLevel, OrtOpAttr, OrtOpAttrType,
    OrtShapeInferContext, OrtTensorTypeAndShapeInfo, OrtTypeInfo, OrtValue,
};
use std::ffi::{CStr, CString, c_char, c_void};
use std::marker::PhantomData;
use std::ptr;

/// Maximum dimensions read from an input: more than any operator accepts, so that the operator reports a wrong rank.
pub(crate) const MAX_RANK: usize = 8;

/// A node whose kernel is being created.
pub(crate) struct KernelInfo<'a> {
    api: Api,
    raw: *const OrtKernelInfo,
    lifetime: PhantomData<&'a OrtKernelInfo>,
}

impl KernelInfo<'_> {
    /// # Safety
    /// `raw` belongs to the host and is alive.
    pub(crate) unsafe fn new(api: Api, raw: *const OrtKernelInfo) -> Self {
        KernelInfo { api, raw, lifetime: PhantomData }
    }

    /// An attribute's value in the type that the node has; `None` if it is missing.
    pub(crate) fn attribute(&self, def: &AttributeDef) -> Option<Value> {
        let name = CString::new(def.name).ok()?;
        value(def.kind, |kind| {
            let (mut int, mut float) = (0i64, 0f32);
            // SAFETY: the node is alive, the name is NUL-terminated, and the host writes one number to a local
            // variable.
            unsafe {
                match kind {
                    AttributeKind::Int => {
                        call!(self.api, KernelInfoGetAttribute_int64(self.raw, name.as_ptr(), &raw mut int))?;
                        Ok(Value::Int(int))
                    }
                    AttributeKind::Float => {
                        call!(self.api, KernelInfoGetAttribute_float(self.raw, name.as_ptr(), &raw mut float))?;
                        Ok(Value::Float(float))
                    }
                    AttributeKind::Ints => self.ints(&name).map(Value::Ints),
                }
            }
        })
    }

    /// Reads a list of integers.
    fn ints(&self, name: &CStr) -> Result<Vec<i64>, Status> {
        let mut len = 0;
        // SAFETY: the node is alive, the name is NUL-terminated. With a null pointer the host writes the length to a
        // local variable, then as many numbers as the vector has room for.
        unsafe {
            let get = (*self.api.as_ptr()).KernelInfoGetAttributeArray_int64;
            Status::check(self.api, get(self.raw, name.as_ptr(), ptr::null_mut(), &raw mut len))?;
            let mut ints = vec![0; len];
            Status::check(self.api, get(self.raw, name.as_ptr(), ints.as_mut_ptr(), &raw mut len))?;
            Ok(ints)
        }
    }

    /// Writes a warning to the session's log; `false` if there is no log.
    pub(crate) fn warn(&self, message: &str) -> bool {
        let Ok(message) = CString::new(message) else { return false };
        let mut logger: *const OrtLogger = ptr::null();
        let (level, file, function) = (OrtLoggingLevel::ORT_LOGGING_LEVEL_WARNING, c"moh_ops", c"CreateKernel");
        // SAFETY: the node is alive, and so is its session's logger; the strings are NUL-terminated, and the host
        // copies them.
        unsafe {
            call!(self.api, KernelInfo_GetLogger(self.raw, &raw mut logger)).is_ok()
                && !logger.is_null()
                && call!(
                    self.api,
                    Logger_LogMessage(logger, level, message.as_ptr(), file.as_ptr().cast(), 0, function.as_ptr())
                )
                .is_ok()
        }
    }

    /// The allocator of the node's provider.
    #[cfg(feature = "cuda")]
    pub(crate) fn allocator(&self) -> Result<Allocator, Failure> {
        let mut raw = ptr::null_mut();
        // SAFETY: the node is alive; the host writes a new object to a local variable.
        unsafe {
            call!(self.api, KernelInfoGetAllocator(self.raw, ort_sys::OrtMemType::OrtMemTypeDefault, &raw mut raw))?;
            Ok(Allocator::from_raw(self.api, made(raw, "allocator")?))
        }
    }

    /// The sizes of every input as far as they are known: -1 for a symbol; `None` for an absent input. An empty list
    /// is a scalar or a tensor of unknown rank.
    pub(crate) fn input_sizes(&self) -> Result<Vec<Option<Vec<i64>>>, Failure> {
        (0..self.input_count()?).map(|index| self.sizes_of(index)).collect()
    }

    /// The number of the node's inputs, including absent optional ones.
    pub(crate) fn input_count(&self) -> Result<usize, Failure> {
        let mut count = 0;
        // SAFETY: the node is alive; the host writes a number to a local variable.
        unsafe { call!(self.api, KernelInfo_GetInputCount(self.raw, &raw mut count))? };
        Ok(count)
    }

    /// A constant input; `None` if the input is not constant. Its data live until the node's session has been created.
    pub(crate) fn constant(&self, index: usize) -> Result<Option<TensorPtr>, Failure> {
        let (mut constant, mut value) = (0, ptr::null());
        // SAFETY: the node is alive, and its session owns the objects that the host writes to local variables.
        unsafe {
            call!(self.api, KernelInfoGetConstantInput_tensor(self.raw, index, &raw mut constant, &raw mut value))?;
            (constant != 0 && !value.is_null()).then(|| tensor(self.api, value.cast_mut())).transpose()
        }
    }

    fn sizes_of(&self, index: usize) -> Result<Option<Vec<i64>>, Failure> {
        let mut ty: *mut OrtTypeInfo = ptr::null_mut();
        // SAFETY: the node is alive; the host writes a new object to a local variable. An absent input has no type.
        let Ok(()) = (unsafe { call!(self.api, KernelInfo_GetInputTypeInfo(self.raw, index, &raw mut ty)) }) else {
            return Ok(None);
        };
        let ty = made(ty, "type of an input")?;
        let mut tensor = ptr::null();
        // SAFETY: the type is alive until its release below, and owns the object that the host writes to the local
        // variable.
        unsafe {
            let cast = call!(self.api, CastTypeInfoToTensorInfo(ty.as_ptr(), &raw mut tensor));
            let sizes = cast.map_err(Failure::from).and_then(|()| match tensor.is_null() {
                true => Ok(None),
                false => sizes(self.api, tensor).map(Some),
            });
            ((*self.api.as_ptr()).ReleaseTypeInfo)(ty.as_ptr());
            sizes
        }
    }
}

/// A node whose output shape is being inferred.
pub(crate) struct ShapeContext<'a> {
    api: Api,
    raw: *mut OrtShapeInferContext,
    lifetime: PhantomData<&'a OrtShapeInferContext>,
}

/// A dimension in shape inference: its size, or -1 and a symbol's name (empty if unknown).
#[derive(Clone, Copy)]
pub(crate) struct Dimension<'a> {
    pub(crate) size: i64,
    pub(crate) name: &'a CStr,
}

/// An input in shape inference. Without dimensions it is a scalar or has unknown rank.
pub(crate) struct InferredInput<'a> {
    pub(crate) element_type: ElementNumber,
    pub(crate) dimensions: Vec<Dimension<'a>>,
}

impl ShapeContext<'_> {
    /// # Safety
    /// `raw` belongs to the host and is alive.
    pub(crate) unsafe fn new(api: Api, raw: *mut OrtShapeInferContext) -> Self {
        ShapeContext { api, raw, lifetime: PhantomData }
    }

    /// As [`KernelInfo::attribute`].
    pub(crate) fn attribute(&self, def: &AttributeDef) -> Option<Value> {
        let name = CString::new(def.name).ok()?;
        let mut attribute: *const OrtOpAttr = ptr::null();
        // SAFETY: the context is alive, the name is NUL-terminated; the host writes a pointer to a local variable.
        unsafe { call!(self.api, ShapeInferContext_GetAttribute(self.raw, name.as_ptr(), &raw mut attribute)) }.ok()?;
        // SAFETY: the context owns the attribute; the buffer has `size` bytes, or is null.
        let read = |ty, place, size| unsafe {
            let mut written = 0;
            let status = call!(self.api, ReadOpAttr(attribute, ty, place, size, &raw mut written));
            (status, written)
        };
        value(def.kind, |kind| match kind {
            AttributeKind::Int => {
                let mut int = 0i64;
                read(OrtOpAttrType::ORT_OP_ATTR_INT, (&raw mut int).cast(), size_of::<i64>()).0?;
                Ok(Value::Int(int))
            }
            AttributeKind::Float => {
                let mut float = 0f32;
                read(OrtOpAttrType::ORT_OP_ATTR_FLOAT, (&raw mut float).cast(), size_of::<f32>()).0?;
                Ok(Value::Float(float))
            }
            AttributeKind::Ints => {
                // With a null buffer the host returns the required size; 0 for an empty list.
                let (mut status, bytes) = read(OrtOpAttrType::ORT_OP_ATTR_INTS, ptr::null_mut(), 0);
                let mut ints = vec![0i64; bytes / size_of::<i64>()];
                if bytes > 0 {
                    (status, _) = read(OrtOpAttrType::ORT_OP_ATTR_INTS, ints.as_mut_ptr().cast(), bytes);
                }
                status?;
                Ok(Value::Ints(ints))
            }
        })
    }

    /// Every input's type and dimensions.
    pub(crate) fn inputs(&self) -> Result<Vec<InferredInput<'_>>, Failure> {
        let mut count = 0;
        // SAFETY: the context is alive; the host writes a number to a local variable.
        unsafe { call!(self.api, ShapeInferContext_GetInputCount(self.raw, &raw mut count))? };
        (0..count).map(|index| self.input(index)).collect()
    }

    fn input(&self, index: usize) -> Result<InferredInput<'_>, Failure> {
        let (mut info, mut element_type) = (ptr::null_mut(), ElementNumber(0));
        // SAFETY: the context is alive and owns the shape that the host writes to the local variable.
        let sizes = unsafe {
            call!(self.api, ShapeInferContext_GetInputTypeShape(self.raw, index, &raw mut info))?;
            let info = made(info, "shape of an input")?.as_ptr();
            call!(self.api, GetTensorElementType(info, element_type.place()))?;
            sizes(self.api, info)?
        };
        let mut names: Vec<*const c_char> = vec![ptr::null(); sizes.len()];
        // SAFETY: the vector has the passed length; the names belong to the context.
        unsafe { call!(self.api, GetSymbolicDimensions(info, names.as_mut_ptr(), names.len()))? };
        let name = |name: *const c_char| match name.is_null() {
            true => c"",
            // SAFETY: a NUL-terminated string that lives as long as the context, whose lifetime bounds the reference.
            false => unsafe { CStr::from_ptr(name) },
        };
        let dimensions =
            sizes.into_iter().zip(names).map(|(size, text)| Dimension { size, name: name(text) }).collect();
        Ok(InferredInput { element_type, dimensions })
    }

    /// Sets the output's type and shape. Newer hosts use the type as well.
    pub(crate) fn set_output(
        &self,
        ty: ONNXTensorElementDataType,
        dimensions: &[Dimension<'_>],
    ) -> Result<(), Failure> {
        let sizes: Vec<i64> = dimensions.iter().map(|d| d.size).collect();
        let mut names: Vec<*const c_char> = dimensions.iter().map(|d| d.name.as_ptr()).collect();
        let info = TensorInfo::new(self.api, ty, &sizes, &mut names)?;
        // SAFETY: context and shape are alive; the host copies the shape.
        Ok(unsafe { call!(self.api, ShapeInferContext_SetOutputTypeShape(self.raw, 0, info.as_ptr())) }?)
    }
}

/// A node that is being run.
pub(crate) struct KernelContext<'a> {
    api: Api,
    raw: *mut OrtKernelContext,
    lifetime: PhantomData<&'a OrtKernelContext>,
}

// SAFETY: threads share a context only through a `SessionHost`, which uses the session's allocator and threads; any
// thread that works for a running node may do so.
unsafe impl Sync for KernelContext<'_> {}

/// An input or output of a running node.
pub(crate) struct TensorPtr {
    pub(crate) element_type: ElementNumber,
    /// The number of dimensions, which may exceed [`MAX_RANK`].
    pub(crate) rank: usize,
    /// The first sizes, followed by zeros.
    pub(crate) dims: [usize; MAX_RANK],
    /// Pointer to as many elements as the product of the sizes, at any alignment; may be null if there are none.
    pub(crate) data: *mut c_void,
}

impl TensorPtr {
    /// The sizes, of a tensor with at most [`MAX_RANK`] dimensions.
    pub(crate) fn dims(&self) -> &[usize] {
        &self.dims[..self.rank.min(MAX_RANK)]
    }
}

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

/// Reads a tensor value's type, shape and data pointer.
///
/// # Safety
/// `value` is a live tensor of the host.
unsafe fn tensor(api: Api, value: *mut OrtValue) -> Result<TensorPtr, Failure> {
    let (mut info, mut data) = (ptr::null_mut(), ptr::null_mut());
    let (mut element_type, mut rank) = (ElementNumber(0), 0);
    let mut sizes = [0i64; MAX_RANK];
    // SAFETY: the value is alive; `info` is owned from its creation on. The host writes at most as many sizes as there
    // is room for.
    unsafe {
        call!(api, GetTensorTypeAndShape(value, &raw mut info))?;
        let info = TensorInfo::from_raw(api, made(info, "type of an input")?);
        call!(api, GetTensorElementType(info.as_ptr(), element_type.place()))?;
        call!(api, GetDimensionsCount(info.as_ptr(), &raw mut rank))?;
        call!(api, GetDimensions(info.as_ptr(), sizes.as_mut_ptr(), rank.min(MAX_RANK)))?;
        call!(api, GetTensorMutableData(value, &raw mut data))?;
    }
    let mut dims = [0; MAX_RANK];
    for (dim, size) in dims.iter_mut().zip(&sizes) {
        *dim = usize::try_from(*size).map_err(|_| Failure::Host(format!("an input has a dimension of {size}")))?;
    }
    Ok(TensorPtr { element_type, rank, dims, data })
}

/// The sizes of a shape, -1 for unknown dimensions.
///
/// # Safety
/// `info` is alive.
unsafe fn sizes(api: Api, info: *const OrtTensorTypeAndShapeInfo) -> Result<Vec<i64>, Failure> {
    let mut rank = 0;
    // SAFETY: the shape is alive; the vector has the passed length.
    unsafe {
        call!(api, GetDimensionsCount(info, &raw mut rank))?;
        let mut sizes = vec![-1; rank];
        call!(api, GetDimensions(info, sizes.as_mut_ptr(), rank))?;
        Ok(sizes)
    }
}

/// Reads an attribute in its expected type, or else in another one, so that an error can name the value found. Hosts
/// return an empty list for an attribute of another type, so an empty list is only accepted if the attribute is not a
/// number.
fn value(kind: AttributeKind, read: impl Fn(AttributeKind) -> Result<Value, Status>) -> Option<Value> {
    let own = read(kind).ok();
    if own.as_ref().is_some_and(|value| *value != Value::Ints(Vec::new())) {
        return own;
    }
    let other = |other: &AttributeKind| read(*other).ok();
    [AttributeKind::Int, AttributeKind::Float].iter().find_map(other).or(own)
}
