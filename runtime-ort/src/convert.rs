//! Tensors in another element type, where no value changes.

use crate::element::{Data, ElementType, TensorData};
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use half::{bf16, f16};

impl Tensor {
    /// The tensor in another type: any number as a type that holds its value exactly, booleans as 0 and 1 and back, but no
    /// floating-point number as an integer. `name` names the tensor in errors.
    ///
    /// # Errors
    /// [`Error::ElementType`] for a pair of types that no value fits, [`Error::Lossy`] for a value that does not.
    pub fn convert(self, name: &str, to: ElementType) -> Result<Tensor> {
        let from = self.element_type();
        if from == to {
            return Ok(self);
        }
        let converted = match self.data() {
            Data::F32(x) => float(x, f64::from, to),
            Data::F16(x) => float(x, |x| x.to_f64(), to),
            Data::BF16(x) => float(x, |x| x.to_f64(), to),
            Data::F64(x) => float(x, |x| x, to),
            Data::I64(x) => integer(x, |x| x, to),
            Data::I32(x) => integer(x, i64::from, to),
            Data::U8(x) => integer(x, i64::from, to),
            Data::Bool(x) => integer(x, i64::from, to),
        };
        match converted {
            Ok(data) => Tensor::from_data(self.shape().to_vec(), data),
            Err(Misfit::Type) => {
                Err(Error::ElementType { tensor: name.to_owned(), expected: to.to_string(), found: from.to_string() })
            }
            Err(Misfit::Value { index, value }) => Err(Error::Lossy { tensor: name.to_owned(), value, index, to }),
        }
    }
}

impl Tensor {
    /// A tensor of the floating-point type `to`, each number rounded to it. `name` names the tensor in errors.
    ///
    /// # Errors
    /// [`Error::ElementType`] for a type of integers or booleans, [`Error::Length`] where the numbers do not fill the shape.
    pub fn rounded(name: &str, shape: impl Into<Vec<usize>>, numbers: Vec<f32>, to: ElementType) -> Result<Tensor> {
        let data = match to {
            ElementType::F32 => TensorData::F32(numbers),
            ElementType::F16 => TensorData::F16(numbers.into_iter().map(f16::from_f32).collect()),
            ElementType::BF16 => TensorData::BF16(numbers.into_iter().map(bf16::from_f32).collect()),
            ElementType::F64 => TensorData::F64(numbers.into_iter().map(f64::from).collect()),
            ElementType::I64 | ElementType::I32 | ElementType::U8 | ElementType::Bool => {
                let expected = "a floating-point type".to_owned();
                return Err(Error::ElementType { tensor: name.to_owned(), expected, found: to.to_string() });
            }
        };
        Tensor::from_data(shape.into(), data)
    }
}

enum Misfit {
    Type,
    Value { index: usize, value: String },
}

fn float<T: Copy>(x: &[T], widen: fn(T) -> f64, to: ElementType) -> std::result::Result<TensorData, Misfit> {
    match to {
        ElementType::F64 => each(x, widen, Some).map(TensorData::F64),
        ElementType::F32 => each(x, widen, |x| exact(x as f32, f64::from, x)).map(TensorData::F32),
        ElementType::F16 => each(x, widen, |x| exact(f16::from_f64(x), f16::to_f64, x)).map(TensorData::F16),
        ElementType::BF16 => each(x, widen, |x| exact(bf16::from_f64(x), bf16::to_f64, x)).map(TensorData::BF16),
        ElementType::I64 | ElementType::I32 | ElementType::U8 | ElementType::Bool => Err(Misfit::Type),
    }
}

fn integer<T: Copy>(x: &[T], widen: fn(T) -> i64, to: ElementType) -> std::result::Result<TensorData, Misfit> {
    /// The integer as a float that is an integer again: i64 where the float is beyond what f64 holds exactly.
    fn whole<F>(x: i64, narrow: fn(f64) -> F, widen: fn(F) -> f64) -> Option<F>
    where
        F: Copy,
    {
        let wide = x as f64;
        let narrowed = narrow(wide);
        (wide as i128 == i128::from(x) && widen(narrowed) == wide).then_some(narrowed)
    }
    match to {
        ElementType::I64 => each(x, widen, Some).map(TensorData::I64),
        ElementType::I32 => each(x, widen, |x| i32::try_from(x).ok()).map(TensorData::I32),
        ElementType::U8 => each(x, widen, |x| u8::try_from(x).ok()).map(TensorData::U8),
        ElementType::Bool => each(x, widen, |x| (x == 0 || x == 1).then_some(x == 1)).map(TensorData::Bool),
        ElementType::F64 => each(x, widen, |x| whole(x, |x| x, |x| x)).map(TensorData::F64),
        ElementType::F32 => each(x, widen, |x| whole(x, |x| x as f32, f64::from)).map(TensorData::F32),
        ElementType::F16 => each(x, widen, |x| whole(x, f16::from_f64, f16::to_f64)).map(TensorData::F16),
        ElementType::BF16 => each(x, widen, |x| whole(x, bf16::from_f64, bf16::to_f64)).map(TensorData::BF16),
    }
}

/// `narrow` if it is `wide` again in f64; any NaN stays a NaN.
fn exact<F: Copy>(narrow: F, widen: fn(F) -> f64, wide: f64) -> Option<F> {
    let again = widen(narrow);
    (again == wide || again.is_nan() && wide.is_nan()).then_some(narrow)
}

fn each<T: Copy, W: Copy + ToString, U>(
    x: &[T],
    widen: fn(T) -> W,
    narrow: impl Fn(W) -> Option<U>,
) -> std::result::Result<Vec<U>, Misfit> {
    let one = |(index, &x): (usize, &T)| {
        let wide = widen(x);
        narrow(wide).ok_or_else(|| Misfit::Value { index, value: wide.to_string() })
    };
    x.iter().enumerate().map(one).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::element::Element;

    fn converted<T: Element>(data: Vec<T>, to: ElementType) -> std::result::Result<TensorData, String> {
        let tensor = Tensor::new([data.len()], data).unwrap();
        tensor.convert("x", to).map(|tensor| tensor.into_parts().1).map_err(|e| e.to_string())
    }

    #[test]
    fn values_that_fit_are_kept() {
        assert_eq!(converted(vec![1i32, -7], ElementType::I64), Ok(TensorData::I64(vec![1, -7])));
        assert_eq!(converted(vec![1i64, 0], ElementType::Bool), Ok(TensorData::Bool(vec![true, false])));
        assert_eq!(converted(vec![true, false], ElementType::I64), Ok(TensorData::I64(vec![1, 0])));
        assert_eq!(converted(vec![255u8], ElementType::F32), Ok(TensorData::F32(vec![255.0])));
        assert_eq!(converted(vec![1.5f64], ElementType::F32), Ok(TensorData::F32(vec![1.5])));
        let half = vec![f16::from_f32(0.1), f16::INFINITY];
        assert_eq!(
            converted(half, ElementType::F32),
            Ok(TensorData::F32(vec![f16::from_f32(0.1).to_f32(), f32::INFINITY]))
        );
        assert!(matches!(converted(vec![f32::NAN], ElementType::F16), Ok(TensorData::F16(x)) if x[0].is_nan()));
    }

    #[test]
    fn floats_are_rounded_and_never_become_integers() {
        let rounded = |to| Tensor::rounded("x", [2], vec![0.1, 1e6], to);
        let half = rounded(ElementType::F16).unwrap();
        assert_eq!(half.as_slice::<f16>().unwrap(), [f16::from_f32(0.1), f16::INFINITY]);
        assert_eq!(rounded(ElementType::F64).unwrap().as_slice::<f64>().unwrap(), [f64::from(0.1f32), 1e6]);
        assert!(rounded(ElementType::I64).unwrap_err().to_string().starts_with("x: expected element type"));
        assert!(matches!(Tensor::rounded("x", [3], vec![0.0], ElementType::F32), Err(Error::Length { .. })));
    }

    #[test]
    fn values_that_do_not_fit_are_named() {
        let message = |result: std::result::Result<TensorData, String>| result.unwrap_err();
        assert_eq!(
            message(converted(vec![0.5f32, 0.1], ElementType::F16)),
            "x: 0.10000000149011612 (element 1) is not a float16"
        );
        assert_eq!(message(converted(vec![300i64], ElementType::U8)), "x: 300 (element 0) is not a uint8");
        assert_eq!(
            message(converted(vec![(1i64 << 24) + 1], ElementType::F32)),
            "x: 16777217 (element 0) is not a float32"
        );
        assert_eq!(
            message(converted(vec![i64::MAX], ElementType::F64)),
            format!("x: {} (element 0) is not a float64", i64::MAX)
        );
        assert_eq!(message(converted(vec![2i32], ElementType::Bool)), "x: 2 (element 0) is not a bool");
        assert_eq!(message(converted(vec![70000f32], ElementType::F16)), "x: 70000 (element 0) is not a float16");
        assert_eq!(message(converted(vec![1.0f32], ElementType::I64)), "x: expected element type int64, found float32");
    }
}
