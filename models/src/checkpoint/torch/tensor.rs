//! A tensor of a torch.save file: a view of a storage, checked before a byte of it is touched.

use std::ops::Range;

use super::pickle::{Pickle, Storage, Tensor};
use crate::error::TensorFault;
use crate::weight_type::WeightType;

/// The element type of a storage class.
pub(super) fn element_type(storage: &Storage<'_>) -> Option<WeightType> {
    if !matches!(storage.class.module, "torch" | "torch.storage" | "torch.cuda") {
        return None;
    }
    Some(match storage.class.name {
        "BoolStorage" => WeightType::Bool,
        "ByteStorage" => WeightType::U8,
        "CharStorage" => WeightType::I8,
        "ShortStorage" => WeightType::I16,
        "IntStorage" => WeightType::I32,
        "LongStorage" => WeightType::I64,
        "HalfStorage" => WeightType::F16,
        "BFloat16Storage" => WeightType::BF16,
        "FloatStorage" => WeightType::F32,
        "DoubleStorage" => WeightType::F64,
        _ => return None,
    })
}

/// Where a tensor's elements are in its storage.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct View {
    pub(super) shape: Vec<usize>,
    strides: Vec<usize>,
    offset: usize,
    elements: usize,
}

impl View {
    /// Checks what the pickle says against the storage's bytes, of which there are `found`.
    pub(super) fn check(
        pickle: &Pickle<'_>,
        tensor: &Tensor<'_>,
        dtype: WeightType,
        found: usize,
    ) -> Result<View, TensorFault> {
        let (key, bytes) = (tensor.storage.key.to_owned(), dtype.bytes());
        let declared = usize::try_from(tensor.storage.elements).ok();
        if declared.and_then(|n| n.checked_mul(bytes)) != Some(found) {
            return Err(TensorFault::StorageLength { key, elements: tensor.storage.elements, bytes, found });
        }
        let sizes = (pickle.sizes(tensor.shape), pickle.sizes(tensor.strides), usize::try_from(tensor.offset));
        let (Some(shape), Some(strides), Ok(offset)) = sizes else { return Err(TensorFault::Layout) };
        if shape.len() != strides.len() {
            return Err(TensorFault::Layout);
        }
        if shape.contains(&0) {
            return Ok(View { shape, strides, offset: 0, elements: 0 });
        }
        let elements = shape.iter().try_fold(1usize, |n, &size| n.checked_mul(size));
        let elements = elements.filter(|n| n.checked_mul(bytes).is_some());
        let step = |last: usize, (&size, &stride): (&usize, &usize)| last.checked_add((size - 1).checked_mul(stride)?);
        let last = shape.iter().zip(&strides).try_fold(offset, step);
        let (Some(elements), Some(last)) = (elements, last) else {
            return Err(TensorFault::Overflow { shape, strides });
        };
        let stored = found / bytes;
        if last >= stored {
            return Err(TensorFault::Beyond { key, last, elements: stored });
        }
        Ok(View { shape, strides, offset, elements })
    }

    /// The elements as a range of the storage's, if they lie there in row-major order without gaps.
    pub(super) fn contiguous(&self) -> Option<Range<usize>> {
        if self.elements == 0 {
            return Some(0..0);
        }
        let mut expected = 1;
        for (&size, &stride) in self.shape.iter().zip(&self.strides).rev() {
            if size != 1 && stride != expected {
                return None;
            }
            expected *= size;
        }
        Some(self.offset..self.offset + self.elements)
    }

    /// The elements, of `size` bytes each, in row-major order. `left` is what copies may still take.
    pub(super) fn copy(&self, storage: &[u8], size: usize, left: &mut usize) -> Result<Vec<u8>, TensorFault> {
        let bytes = self.elements * size;
        *left = left.checked_sub(bytes).ok_or(TensorFault::Copy { bytes, left: *left })?;
        let mut copy = Vec::with_capacity(bytes);
        let (mut index, mut at) = (vec![0; self.shape.len()], self.offset);
        for _ in 0..self.elements {
            copy.extend_from_slice(&storage[at * size..(at + 1) * size]);
            // The next index, as an odometer counts.
            for axis in (0..index.len()).rev() {
                index[axis] += 1;
                at += self.strides[axis];
                if index[axis] < self.shape[axis] {
                    break;
                }
                at -= self.strides[axis] * self.shape[axis];
                index[axis] = 0;
            }
        }
        Ok(copy)
    }
}
