//! Element types as ONNX numbers them.

use moh_operators::DType;
use ort_sys::ONNXTensorElementDataType;

/// ONNX's number of an element type.
pub(crate) fn onnx_type(dtype: DType) -> ONNXTensorElementDataType {
    match dtype {
        DType::F32 => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        DType::F16 => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
        DType::BF16 => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16,
    }
}

/// ONNX's number of an element type: what hosts write may be newer than the enumeration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ElementNumber(pub(crate) i32);

impl ElementNumber {
    /// Where the host writes.
    pub(crate) fn place(&mut self) -> *mut ONNXTensorElementDataType {
        (&raw mut self.0).cast()
    }

    /// The type, if operators have it.
    pub(crate) fn dtype(self) -> Option<DType> {
        DType::ALL.into_iter().find(|&dtype| onnx_type(dtype) as i32 == self.0)
    }
}
