//! ONNX's numbers of element types.

use moh_operators::DType;
use ort_sys::ONNXTensorElementDataType;

/// ONNX's number of a [`DType`].
pub(crate) fn onnx_type(dtype: DType) -> ONNXTensorElementDataType {
    match dtype {
        DType::F32 => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        DType::F16 => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
        DType::BF16 => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16,
        DType::U8 => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8,
        DType::I64 => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64,
    }
}

/// An element type number written by a host, which may be newer than the enumeration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ElementNumber(pub(crate) i32);

impl ElementNumber {
    /// Pointer for the host to write to.
    pub(crate) fn place(&mut self) -> *mut ONNXTensorElementDataType {
        (&raw mut self.0).cast()
    }

    /// The corresponding [`DType`], if operators support it.
    pub(crate) fn dtype(self) -> Option<DType> {
        let integers = [DType::U8, DType::I64];
        DType::ALL.into_iter().chain(integers).find(|&dtype| onnx_type(dtype) as i32 == self.0)
    }
}
