//! Descriptions of tensors for TMA.

use super::driver::{Driver, RawPtr};
use super::params::TensorMap;
use crate::error::Error;
use crate::tensor::DType;

/// A tensor of rank 4 of f16 or bf16 elements, and the part of it that one copy takes. Dimensions from the innermost.
#[derive(Debug, Clone, Copy)]
pub(super) struct Boxed {
    /// Aligned to 16 bytes.
    pub(super) ptr: RawPtr,
    pub(super) dtype: DType,
    /// Elements; what is copied from beyond is zeros.
    pub(super) sizes: [usize; 4],
    /// From element to element of the dimensions but the innermost, in elements.
    pub(super) strides: [usize; 3],
    /// Elements of a box; rows of 32, 64 or 128 bytes, which are swizzled over their width.
    pub(super) boxes: [usize; 4],
}

impl Boxed {
    /// The description, in which `what` names the tensor where the driver refuses it.
    pub(super) fn encode(&self, driver: &Driver, what: &str) -> Result<TensorMap, Error> {
        const FLOAT16: u32 = 6;
        const BFLOAT16: u32 = 9;
        const PROMOTION_128_BYTES: u32 = 2;
        let data_type = if self.dtype == DType::F16 { FLOAT16 } else { BFLOAT16 };
        let sizes = self.sizes.map(|size| size as u64);
        let strides = self.strides.map(|stride| 2 * stride as u64);
        let boxes = self.boxes.map(|size| size as u32);
        // Modes 1, 2, 3 swizzle 32, 64, 128 bytes.
        let swizzle = (boxes[0] / 16).ilog2() + 1;
        let mut map = TensorMap([0; 16]);
        // SAFETY: all arrays are of rank 4; the map is 128 bytes, aligned to 64; nothing is read from the tensor.
        unsafe {
            driver.tensor_map_encode_tiled(
                (&raw mut map).cast(),
                data_type,
                4,
                self.ptr as *mut _,
                sizes.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                [1u32; 4].as_ptr(),
                0,
                swizzle,
                PROMOTION_128_BYTES,
                0,
            )
        }
        .map_err(|error| error.about(what))?;
        Ok(map)
    }
}
