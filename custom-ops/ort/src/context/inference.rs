//! A node during shape inference.

use super::attribute::value;
use super::tensor::sizes;
use crate::api::{Api, call};
use crate::element::ElementNumber;
use crate::failure::Failure;
use crate::objects::{TensorInfo, made};
use moh_operators::{AttributeDef, AttributeKind, Value};
use ort_sys::{ONNXTensorElementDataType, OrtOpAttr, OrtOpAttrType, OrtShapeInferContext};
use std::ffi::{CStr, CString, c_char};
use std::marker::PhantomData;
use std::ptr;

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

    /// As [`super::KernelInfo::attribute`].
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
