//! Values: tensors wherever a runtime keeps them.

mod write;

use crate::element::{Data, Element, ElementType};
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use ort::memory::AllocationDevice;
use ort::value::{DynTensor, DynValue, PrimitiveTensorElementType, TensorElementType, ValueType};
use std::sync::{Arc, OnceLock};
use tract_onnx::prelude::{Datum, DatumType, TValue, Tensor as TractTensor};

/// An input or output of a model. Cheap to clone; an output stays where its runtime put it, and goes back in without a copy.
#[derive(Debug, Clone)]
pub struct Value {
    shape: Vec<usize>,
    element_type: ElementType,
    repr: Repr,
}

#[derive(Debug, Clone)]
pub(crate) enum Repr {
    Host(Arc<Tensor>),
    Ort(Arc<OrtValue>),
    Tract(TValue),
}

/// A value of onnxruntime, perhaps on a GPU.
#[derive(Debug)]
pub(crate) struct OrtValue {
    pub(crate) value: DynTensor,
    /// A copy in ordinary memory, made when somebody looks.
    host: OnceLock<DynTensor>,
}

impl OrtValue {
    /// The value where it can be read.
    fn on_host(&self) -> ort::Result<&DynTensor> {
        if self.value.memory_info().is_cpu_accessible() {
            return Ok(&self.value);
        }
        if let Some(host) = self.host.get() {
            return Ok(host);
        }
        let copy = self.value.to(AllocationDevice::CPU, 0)?;
        Ok(self.host.get_or_init(|| copy))
    }
}

impl From<Tensor> for Value {
    fn from(tensor: Tensor) -> Value {
        let (shape, element_type) = (tensor.shape().to_vec(), tensor.element_type());
        Value { shape, element_type, repr: Repr::Host(Arc::new(tensor)) }
    }
}

impl Value {
    /// The dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The element type.
    pub fn element_type(&self) -> ElementType {
        self.element_type
    }

    /// The elements in row-major order, where they are.
    ///
    /// # Errors
    /// [`Error::ElementType`] where the runtime's memory is not readable as the type it claims.
    pub fn data(&self) -> Result<Data<'_>> {
        match &self.repr {
            Repr::Host(tensor) => Ok(tensor.data()),
            Repr::Ort(value) => ort_data(value, self.element_type),
            Repr::Tract(value) => tract_data(value, self.element_type),
        }
    }

    /// The elements as a slice of `T`.
    ///
    /// # Errors
    /// [`Error::ElementType`] where they are of another type.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        let data = self.data()?;
        T::slice(&data).ok_or_else(|| mismatch(T::TYPE, self.element_type.name()))
    }

    /// A copy in ordinary memory.
    ///
    /// # Errors
    /// As [`Value::data`].
    pub fn to_tensor(&self) -> Result<Tensor> {
        match &self.repr {
            Repr::Host(tensor) => Ok(Tensor::clone(tensor)),
            _ => Tensor::from_data(self.shape.clone(), self.data()?.to_owned()),
        }
    }

    pub(crate) fn repr(&self) -> &Repr {
        &self.repr
    }

    /// The value in tract, if it is there.
    pub(crate) fn into_tract(self) -> std::result::Result<TValue, Value> {
        match self.repr {
            Repr::Tract(value) => Ok(value),
            repr => Err(Value { repr, ..self }),
        }
    }

    /// The value in onnxruntime, if it is there and nobody else holds it.
    pub(crate) fn only_ort(&mut self) -> Option<&mut DynTensor> {
        match &mut self.repr {
            Repr::Ort(value) => Arc::get_mut(value).map(|value| &mut value.value),
            _ => None,
        }
    }

    pub(crate) fn from_ort(name: &str, value: DynValue) -> Result<Value> {
        let ValueType::Tensor { ty, shape, .. } = value.dtype() else {
            return Err(Error::ElementType {
                tensor: name.to_owned(),
                expected: "a tensor".to_owned(),
                found: value.dtype().to_string(),
            });
        };
        let element_type = from_ort_type(*ty).ok_or_else(|| unknown(name, ty.to_string()))?;
        let shape = shape.iter().map(|&d| usize::try_from(d).unwrap_or(0)).collect();
        let value = value.downcast().map_err(|e| unknown(name, e.message().to_owned()))?;
        Ok(Value { shape, element_type, repr: Repr::Ort(Arc::new(OrtValue { value, host: OnceLock::new() })) })
    }

    pub(crate) fn from_tract(name: &str, value: TValue) -> Result<Value> {
        let found = value.datum_type();
        let element_type = from_tract_type(found).ok_or_else(|| unknown(name, format!("{found:?}")))?;
        Ok(Value { shape: value.shape().to_vec(), element_type, repr: Repr::Tract(value) })
    }
}

fn mismatch(expected: ElementType, found: &str) -> Error {
    Error::ElementType { tensor: "value".to_owned(), expected: expected.to_string(), found: found.to_owned() }
}

pub(crate) fn unknown(tensor: &str, found: String) -> Error {
    let expected: Vec<&str> = ElementType::ALL.iter().map(|ty| ty.name()).collect();
    Error::ElementType { tensor: tensor.to_owned(), expected: format!("one of {}", expected.join(", ")), found }
}

fn ort_data(value: &OrtValue, ty: ElementType) -> Result<Data<'_>> {
    let value = value.on_host().map_err(|e| mismatch(ty, e.message()))?;
    Ok(match ty {
        ElementType::F32 => Data::F32(ort_slice(value)?),
        ElementType::F16 => Data::F16(ort_slice(value)?),
        ElementType::BF16 => Data::BF16(ort_slice(value)?),
        ElementType::F64 => Data::F64(ort_slice(value)?),
        ElementType::I64 => Data::I64(ort_slice(value)?),
        ElementType::I32 => Data::I32(ort_slice(value)?),
        ElementType::U8 => Data::U8(ort_slice(value)?),
        ElementType::Bool => Data::Bool(ort_slice(value)?),
    })
}

fn ort_slice<T: Element + PrimitiveTensorElementType>(value: &DynTensor) -> Result<&[T]> {
    value.try_extract_tensor::<T>().map(|(_, data)| data).map_err(|e| mismatch(T::TYPE, e.message()))
}

fn tract_data(value: &TractTensor, ty: ElementType) -> Result<Data<'_>> {
    Ok(match ty {
        ElementType::F32 => Data::F32(tract_slice(value)?),
        ElementType::F16 => Data::F16(tract_slice(value)?),
        ElementType::F64 => Data::F64(tract_slice(value)?),
        ElementType::I64 => Data::I64(tract_slice(value)?),
        ElementType::I32 => Data::I32(tract_slice(value)?),
        ElementType::U8 => Data::U8(tract_slice(value)?),
        ElementType::Bool => Data::Bool(tract_slice(value)?),
        ElementType::BF16 => return Err(mismatch(ty, "a tensor of tract, which has no bfloat16")),
    })
}

fn tract_slice<T: Element + Datum>(value: &TractTensor) -> Result<&[T]> {
    let view = value.try_as_plain_ram();
    view.and_then(|view| view.as_slice::<T>()).map_err(|e| mismatch(T::TYPE, &format!("{e:#}")))
}

/// Our type for onnxruntime's.
pub(crate) fn from_ort_type(ty: TensorElementType) -> Option<ElementType> {
    match ty {
        TensorElementType::Float32 => Some(ElementType::F32),
        TensorElementType::Float16 => Some(ElementType::F16),
        TensorElementType::Bfloat16 => Some(ElementType::BF16),
        TensorElementType::Float64 => Some(ElementType::F64),
        TensorElementType::Int64 => Some(ElementType::I64),
        TensorElementType::Int32 => Some(ElementType::I32),
        TensorElementType::Uint8 => Some(ElementType::U8),
        TensorElementType::Bool => Some(ElementType::Bool),
        _ => None,
    }
}

/// onnxruntime's type for ours.
pub(crate) fn to_ort_type(ty: ElementType) -> TensorElementType {
    match ty {
        ElementType::F32 => TensorElementType::Float32,
        ElementType::F16 => TensorElementType::Float16,
        ElementType::BF16 => TensorElementType::Bfloat16,
        ElementType::F64 => TensorElementType::Float64,
        ElementType::I64 => TensorElementType::Int64,
        ElementType::I32 => TensorElementType::Int32,
        ElementType::U8 => TensorElementType::Uint8,
        ElementType::Bool => TensorElementType::Bool,
    }
}

fn from_tract_type(ty: DatumType) -> Option<ElementType> {
    match ty {
        DatumType::F32 => Some(ElementType::F32),
        DatumType::F16 => Some(ElementType::F16),
        DatumType::F64 => Some(ElementType::F64),
        DatumType::I64 => Some(ElementType::I64),
        DatumType::I32 => Some(ElementType::I32),
        DatumType::U8 => Some(ElementType::U8),
        DatumType::Bool => Some(ElementType::Bool),
        _ => None,
    }
}
