//! Descriptions of tensors for TMA.

use crate::driver::{Checked, RawPtr};
use crate::params::TensorMap;
use cudarc::driver::sys::{
    self, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion,
    CUtensorMapSwizzle,
};
use moh_operators::{DType, Error};

/// A tensor of rank 4 of f16 or bf16 elements, and the part of it that one copy takes. Dimensions from the innermost.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Boxed {
    /// Aligned to 16 bytes.
    pub(crate) ptr: RawPtr,
    pub(crate) dtype: DType,
    /// Elements; what is copied from beyond is zeros.
    pub(crate) sizes: [usize; 4],
    /// From element to element of the dimensions but the innermost, in elements.
    pub(crate) strides: [usize; 3],
    /// Elements of a box; rows of 32, 64 or 128 bytes, which are swizzled over their width.
    pub(crate) boxes: [usize; 4],
}

impl Boxed {
    /// The description, in which `what` names the tensor where the driver refuses it.
    pub(crate) fn encode(&self, what: &str) -> Result<TensorMap, Error> {
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
        // SAFETY: all arrays are of rank 4; the map is 128 bytes, aligned to 64; nothing is read from the tensor.
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
