//! A node when its kernel is created.

use super::attribute::value;
use super::tensor::{TensorPtr, sizes, tensor};
use crate::api::{Api, Status, call};
use crate::failure::Failure;
#[cfg(feature = "cuda")]
use crate::objects::Allocator;
use crate::objects::made;
use moh_operators::{AttributeDef, AttributeKind, Value};
use ort_sys::{OrtKernelInfo, OrtLogger, OrtLoggingLevel, OrtTypeInfo};
use std::ffi::{CStr, CString};
use std::marker::PhantomData;
use std::ptr;

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
