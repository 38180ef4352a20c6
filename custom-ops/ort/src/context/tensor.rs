//! Tensors of the host, and their sizes.

use crate::api::{Api, call};
use crate::element::ElementNumber;
use crate::failure::Failure;
use crate::objects::{TensorInfo, made};
use ort_sys::{OrtTensorTypeAndShapeInfo, OrtValue};
use std::ffi::c_void;
use std::ptr;

/// Maximum dimensions read from an input: more than any operator accepts, so that the operator reports a wrong rank, but for the rows of a dense
/// layer or a norm, which may have any number of dimensions. More than these are refused.
pub(crate) const MAX_RANK: usize = 16;

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

/// Reads a tensor value's type, shape and data pointer.
///
/// # Safety
/// `value` is a live tensor of the host.
pub(super) unsafe fn tensor(api: Api, value: *mut OrtValue) -> Result<TensorPtr, Failure> {
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
pub(super) unsafe fn sizes(api: Api, info: *const OrtTensorTypeAndShapeInfo) -> Result<Vec<i64>, Failure> {
    let mut rank = 0;
    // SAFETY: the shape is alive; the vector has the passed length.
    unsafe {
        call!(api, GetDimensionsCount(info, &raw mut rank))?;
        let mut sizes = vec![-1; rank];
        call!(api, GetDimensions(info, sizes.as_mut_ptr(), rank))?;
        Ok(sizes)
    }
}
