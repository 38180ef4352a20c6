//! Rows of a tensor in another order.

use crate::error::Result;
use moh_runtime::{Data, Element, Tensor, Value};

/// The given rows, each an element of the first dimension.
pub(super) fn gather(value: &Value, rows: &[usize]) -> Result<Value> {
    fn pick<T: Element>(data: &[T], shape: &[usize], rows: &[usize]) -> Result<Value> {
        let each: usize = shape[1..].iter().product();
        let mut picked = Vec::with_capacity(rows.len() * each);
        for row in rows {
            picked.extend_from_slice(&data[row * each..(row + 1) * each]);
        }
        Ok(Tensor::new([&[rows.len()], &shape[1..]].concat(), picked)?.into())
    }
    let shape = value.shape();
    match value.data()? {
        Data::F32(x) => pick(x, shape, rows),
        Data::F16(x) => pick(x, shape, rows),
        Data::BF16(x) => pick(x, shape, rows),
        Data::F64(x) => pick(x, shape, rows),
        Data::I64(x) => pick(x, shape, rows),
        Data::I32(x) => pick(x, shape, rows),
        Data::U8(x) => pick(x, shape, rows),
        Data::Bool(x) => pick(x, shape, rows),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn rows_are_taken_and_repeated() {
        let value = Value::from(Tensor::new([3, 1, 2], vec![0f32, 1.0, 2.0, 3.0, 4.0, 5.0]).unwrap());
        let expected = Tensor::new([4, 1, 2], vec![4f32, 5.0, 0.0, 1.0, 0.0, 1.0, 2.0, 3.0]).unwrap();
        assert_eq!(gather(&value, &[2, 0, 0, 1]).unwrap().to_tensor().unwrap(), expected);
        let empty = Value::from(Tensor::new([1, 2, 0], Vec::<i64>::new()).unwrap());
        assert_eq!(gather(&empty, &[0, 0]).unwrap().shape(), [2, 2, 0]);
    }
}
