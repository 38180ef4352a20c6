//! Elements in JSON: numbers in row-major order, nested or not.

use super::datatype;
use crate::problem::Problem;
use half::{bf16, f16};
use moh_runtime::{Data, ElementType, Tensor, TensorData};
use serde::{Serialize, Serializer};
use serde_json::Value;

/// The tensor `input` of this type and shape, from the numbers in `data`.
///
/// # Errors
/// A [`Problem`] for data that is not of the type, or does not fill the shape.
pub(super) fn tensor(input: &str, ty: ElementType, shape: &[i64], data: &Value) -> Result<Tensor, Problem> {
    let (shape, count) = datatype::elements(input, shape)?;
    let mut flat = Vec::new();
    flatten(data, &mut flat);
    if flat.len() != count {
        let message = format!("input {input}: expected {count} numbers for shape {shape:?}, found {}", flat.len());
        return Err(Problem::invalid(message));
    }
    let bad = |value: &Value| {
        let value = value.to_string().chars().take(40).collect::<String>();
        Problem::invalid(format!("input {input}: {value} is no {}", datatype::name(ty)))
    };
    macro_rules! each {
        ($variant:ident, $read:expr) => {
            TensorData::$variant(
                flat.iter()
                    .copied()
                    .map(|value| $read(value).ok_or_else(|| bad(value)))
                    .collect::<Result<Vec<_>, _>>()?,
            )
        };
    }
    let data = match ty {
        ElementType::F32 => each!(F32, |v: &Value| v.as_f64().map(|x| x as f32)),
        ElementType::F16 => each!(F16, |v: &Value| v.as_f64().map(f16::from_f64)),
        ElementType::BF16 => each!(BF16, |v: &Value| v.as_f64().map(bf16::from_f64)),
        ElementType::F64 => each!(F64, Value::as_f64),
        ElementType::I64 => each!(I64, Value::as_i64),
        ElementType::I32 => each!(I32, |v: &Value| v.as_i64().and_then(|x| i32::try_from(x).ok())),
        ElementType::U8 => each!(U8, |v: &Value| v.as_u64().and_then(|x| u8::try_from(x).ok())),
        ElementType::Bool => each!(Bool, |v: &Value| v.as_bool().or(match v.as_u64() {
            Some(0) => Some(false),
            Some(1) => Some(true),
            _ => None,
        })),
    };
    Tensor::from_data(shape, data).map_err(|e| Problem::invalid(format!("input {input}: {e}")))
}

/// Arrays within arrays are as deep as the parser permits.
fn flatten<'v>(value: &'v Value, into: &mut Vec<&'v Value>) {
    match value {
        Value::Array(values) => values.iter().for_each(|value| flatten(value, into)),
        value => into.push(value),
    }
}

/// The elements as a list of numbers, the shortest that are these again, as 0.1 and not 0.10000000149011612. What is no number is null.
#[derive(Debug)]
pub(super) struct Numbers(pub(super) Tensor);

impl Serialize for Numbers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.data() {
            Data::F32(x) => serializer.collect_seq(x),
            Data::F16(x) => serializer.collect_seq(x.iter().map(|x| x.to_f32())),
            Data::BF16(x) => serializer.collect_seq(x.iter().map(|x| x.to_f32())),
            Data::F64(x) => serializer.collect_seq(x),
            Data::I64(x) => serializer.collect_seq(x),
            Data::I32(x) => serializer.collect_seq(x),
            Data::U8(x) => serializer.collect_seq(x),
            Data::Bool(x) => serializer.collect_seq(x),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers_fill_the_shape_nested_or_not() {
        for data in [json!([1, 2.5, 3, 4]), json!([[1, 2.5], [3, 4]])] {
            let found = tensor("x", ElementType::F32, &[2, 2], &data).unwrap();
            assert_eq!(found.as_slice::<f32>().unwrap(), [1.0, 2.5, 3.0, 4.0]);
        }
        assert!(tensor("x", ElementType::F32, &[3], &json!([1, 2])).is_err());
        assert!(tensor("x", ElementType::F32, &[1], &json!([[[]]])).is_err());
    }

    #[test]
    fn what_is_not_of_the_type_is_named() {
        let problem = |ty, data| tensor("x", ty, &[1], &data).unwrap_err().message;
        assert_eq!(problem(ElementType::I64, json!([1.5])), "input x: 1.5 is no INT64");
        assert_eq!(problem(ElementType::I32, json!([3_000_000_000u32])), "input x: 3000000000 is no INT32");
        assert_eq!(problem(ElementType::U8, json!([-1])), "input x: -1 is no UINT8");
        assert_eq!(problem(ElementType::Bool, json!([2])), "input x: 2 is no BOOL");
        assert_eq!(problem(ElementType::F32, json!(["1"])), "input x: \"1\" is no FP32");
        assert_eq!(problem(ElementType::F32, json!({})), "input x: {} is no FP32");
    }

    #[test]
    fn what_is_no_number_is_null() {
        let text = |tensor| serde_json::to_string(&Numbers(tensor)).unwrap();
        assert_eq!(text(Tensor::new([2], vec![0.1f32, f32::NAN]).unwrap()), "[0.1,null]");
        assert_eq!(text(Tensor::new([1], vec![f16::from_f32(0.5)]).unwrap()), "[0.5]");
        assert_eq!(text(Tensor::new([1], vec![true]).unwrap()), "[true]");
    }
}
