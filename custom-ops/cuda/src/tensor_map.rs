//! TMA descriptors of tensors.

use crate::driver::{Checked, RawPtr};
use crate::params::TensorMap;
use crate::stream::Stream;
use cudarc::driver::sys::{
    self, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion,
    CUtensorMapSwizzle,
};
use moh_operators::{DType, Error};

/// A rank-4 tensor of f16 or bf16, and the box that one TMA copy reads. Dimensions are ordered from the innermost.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Boxed {
    /// Address, aligned to 16 bytes.
    pub(crate) ptr: RawPtr,
    pub(crate) dtype: DType,
    /// Sizes in elements. Elements out of bounds are copied as zeros.
    pub(crate) sizes: [usize; 4],
    /// Strides in elements of all dimensions except the innermost.
    pub(crate) strides: [usize; 3],
    /// Size of a box in elements. Its rows have 32, 64 or 128 bytes and are swizzled over their whole width.
    pub(crate) boxes: [usize; 4],
}

impl Boxed {
    /// Encodes the descriptor for a kernel on this stream; `what` names the tensor in an error. Empty if the stream launches
    /// nothing.
    pub(crate) fn encode(&self, what: &str, stream: &Stream<'_>) -> Result<TensorMap, Error> {
        if !stream.launches() {
            return Ok(TensorMap([0; 16]));
        }
        let data_type = match self.dtype {
            DType::F16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            _ => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        };
        let sizes = self.sizes.map(|size| size as u64);
        let strides = self.strides.map(|stride| 2 * stride as u64);
        let boxes = self.boxes.map(|size| size as u32);
        let swizzle = match boxes[0] {
            0..=16 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
            17..=32 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            _ => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        };
        let mut map = TensorMap([0; 16]);
        // SAFETY: all arrays have rank 4; the map has 128 bytes, aligned to 64; the tensor is not read.
        let encoded = unsafe {
            sys::cuTensorMapEncodeTiled(
                (&raw mut map).cast(),
                data_type,
                4,
                self.ptr as *mut _,
                sizes.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                [1u32; 4].as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        encoded.about(format_args!("{what}: cuTensorMapEncodeTiled")).map(|()| map)
    }
}
