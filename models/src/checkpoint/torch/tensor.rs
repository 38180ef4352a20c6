//! A tensor of a torch.save file, or a numpy array: a view of a storage, checked before a byte of it is touched.

use std::borrow::Cow;
use std::ops::Range;

use super::pickle::{Array, Node, Pickle, Storage, Tensor, Value};
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

/// The element type of an array.
///
/// # Errors
/// What its type is instead, for people.
pub(super) fn array_type(pickle: &Pickle<'_>, array: &Array<'_>) -> Result<WeightType, String> {
    let Some(Node::ElementType(element)) = pickle.node(array.element_type) else {
        return Err("a numpy array of objects".to_owned());
    };
    let refused = |order: &str| Err(format!("a numpy array of type {:?}", format!("{order}{}", element.code)));
    if element.big_endian {
        return refused(">");
    }
    Ok(match element.code {
        "b1" => WeightType::Bool,
        "u1" => WeightType::U8,
        "i1" => WeightType::I8,
        "u2" => WeightType::U16,
        "i2" => WeightType::I16,
        "f2" => WeightType::F16,
        "u4" => WeightType::U32,
        "i4" => WeightType::I32,
        "f4" => WeightType::F32,
        "u8" => WeightType::U64,
        "i8" => WeightType::I64,
        "f8" => WeightType::F64,
        _ => return refused(""),
    })
}

/// The bytes of an array: part of the file, or decoded from text; `None` for what is neither. `left` is what copies may still take.
pub(super) fn array_bytes<'a>(
    pickle: &Pickle<'a>,
    array: &Array<'a>,
    left: &mut usize,
) -> Option<Result<Cow<'a, [u8]>, TensorFault>> {
    let text = match (array.data, pickle.node(array.data)) {
        (Value::Bytes(bytes), _) => return Some(Ok(Cow::Borrowed(bytes))),
        (_, Some(Node::Latin1(text))) => *text,
        _ => return None,
    };
    let Some(rest) = left.checked_sub(text.len()) else {
        return Some(Err(TensorFault::Copy { bytes: text.len(), left: *left }));
    };
    *left = rest;
    let bytes: Result<Vec<u8>, _> = text.chars().map(u8::try_from).collect();
    bytes.ok().map(|bytes| Ok(Cow::Owned(bytes)))
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

    /// Checks an array's shape against its bytes, of which there are `found`.
    pub(super) fn of_array(
        pickle: &Pickle<'_>,
        array: &Array<'_>,
        dtype: WeightType,
        found: usize,
    ) -> Result<View, TensorFault> {
        let shape = pickle.sizes(array.shape).ok_or(TensorFault::Layout)?;
        let elements = shape.iter().try_fold(1usize, |n, &size| n.checked_mul(size));
        let expected = elements.and_then(|n| n.checked_mul(dtype.bytes()));
        let (Some(elements), true) = (elements, expected == Some(found)) else {
            return Err(TensorFault::ArrayLength { shape, expected, found });
        };
        let mut strides = vec![1; shape.len()];
        let axes: Vec<usize> =
            if array.fortran { (0..shape.len()).collect() } else { (0..shape.len()).rev().collect() };
        for pair in axes.windows(2) {
            strides[pair[1]] = usize::saturating_mul(strides[pair[0]], shape[pair[0]]);
        }
        Ok(View { shape, strides, offset: 0, elements })
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
