//! Elements as little-endian bytes, as files and protocols have them.

use crate::element::{Data, ElementType, TensorData};
use half::{bf16, f16};

impl ElementType {
    /// The elements that little-endian bytes stand for, a boolean in a byte; `None` where the last one is incomplete.
    pub fn read(self, bytes: &[u8]) -> Option<TensorData> {
        fn each<T, const N: usize>(bytes: &[u8], read: fn([u8; N]) -> T) -> Option<Vec<T>> {
            let (chunks, rest) = bytes.as_chunks::<N>();
            rest.is_empty().then(|| chunks.iter().map(|&chunk| read(chunk)).collect())
        }
        Some(match self {
            ElementType::F32 => TensorData::F32(each(bytes, f32::from_le_bytes)?),
            ElementType::F16 => TensorData::F16(each(bytes, f16::from_le_bytes)?),
            ElementType::BF16 => TensorData::BF16(each(bytes, bf16::from_le_bytes)?),
            ElementType::F64 => TensorData::F64(each(bytes, f64::from_le_bytes)?),
            ElementType::I64 => TensorData::I64(each(bytes, i64::from_le_bytes)?),
            ElementType::I32 => TensorData::I32(each(bytes, i32::from_le_bytes)?),
            ElementType::U8 => TensorData::U8(bytes.to_vec()),
            ElementType::Bool => TensorData::Bool(bytes.iter().map(|&byte| byte != 0).collect()),
        })
    }
}

impl Data<'_> {
    /// The elements as little-endian bytes, a boolean as 0 or 1.
    pub fn to_bytes(&self) -> Vec<u8> {
        fn each<T: Copy, const N: usize>(data: &[T], write: fn(T) -> [u8; N]) -> Vec<u8> {
            data.iter().flat_map(|&x| write(x)).collect()
        }
        match self {
            Data::F32(x) => each(x, f32::to_le_bytes),
            Data::F16(x) => each(x, f16::to_le_bytes),
            Data::BF16(x) => each(x, bf16::to_le_bytes),
            Data::F64(x) => each(x, f64::to_le_bytes),
            Data::I64(x) => each(x, i64::to_le_bytes),
            Data::I32(x) => each(x, i32::to_le_bytes),
            Data::U8(x) => x.to_vec(),
            Data::Bool(x) => each(x, |x| [u8::from(x)]),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn bytes_are_elements_again() {
        for &ty in ElementType::ALL {
            let bytes: Vec<u8> = (0..16).map(|i| if ty == ElementType::Bool { i % 2 } else { i }).collect();
            let data = ty.read(&bytes).unwrap();
            assert_eq!((data.as_data().len() * ty.size(), data.as_data().to_bytes()), (16, bytes), "{ty}");
            assert_eq!(ty.read(&[0; 17]).is_none(), ty.size() > 1, "{ty}");
        }
        assert_eq!(ElementType::I32.read(&[1, 2, 0, 0]).unwrap(), TensorData::I32(vec![513]));
    }
}
