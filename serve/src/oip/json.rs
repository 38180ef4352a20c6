//! Elements in JSON: numbers in row-major order, nested or not.

use super::datatype;
use crate::problem::Problem;
use half::{bf16, f16};
use moh_runtime::{Data, ElementType, Tensor, TensorData};
use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Serialize, Serializer};
use serde_json::value::RawValue;

/// The tensor `input` of this type and shape, from the numbers in `data`.
///
/// # Errors
/// A [`Problem`] for data that is not of the type, or does not fill the shape.
pub(super) fn tensor(input: &str, ty: ElementType, shape: &[i64], data: &RawValue) -> Result<Tensor, Problem> {
    let (shape, count) = datatype::elements(input, shape)?;
    let int = |value: Scalar| if let Scalar::Int(x) = value { Some(x) } else { None };
    let float = |value: Scalar| match value {
        Scalar::Int(x) => Some(x as f64),
        Scalar::Float(x) => Some(x),
        Scalar::Bool(_) => None,
    };
    let bool = |value: Scalar| match value {
        Scalar::Bool(x) => Some(x),
        Scalar::Int(x @ 0..=1) => Some(x == 1),
        _ => None,
    };
    macro_rules! read {
        ($variant:ident, $one:expr) => {
            TensorData::$variant(read(input, ty, count, data, $one)?)
        };
    }
    let data = match ty {
        // Beyond its range a number would be infinite.
        ElementType::F32 => read!(F32, |value| float(value).map(|x| x as f32).filter(|x| x.is_finite())),
        ElementType::F16 => read!(F16, |value| float(value).map(f16::from_f64).filter(|x| x.is_finite())),
        ElementType::BF16 => read!(BF16, |value| float(value).map(bf16::from_f64).filter(|x| x.is_finite())),
        ElementType::F64 => read!(F64, float),
        ElementType::I64 => read!(I64, |value| int(value)?.try_into().ok()),
        ElementType::I32 => read!(I32, |value| int(value)?.try_into().ok()),
        ElementType::U8 => read!(U8, |value| int(value)?.try_into().ok()),
        ElementType::Bool => read!(Bool, bool),
    };
    Tensor::from_data(shape, data).map_err(|e| Problem::invalid(format!("input {input}: {e}")))
}

/// Exactly `count` elements of `data`, as `one` takes each. They take no more memory than a few times their text.
fn read<T>(
    input: &str,
    ty: ElementType,
    count: usize,
    data: &RawValue,
    one: impl Fn(Scalar) -> Option<T>,
) -> Result<Vec<T>, Problem> {
    let name = datatype::name(ty);
    // A number and a comma.
    let most = count.min(data.get().len() / 2 + 1);
    let mut flat = Flat { found: Vec::with_capacity(most), count, one, name, problem: None };
    let read = flat.deserialize(&mut serde_json::Deserializer::from_str(data.get()));
    let found = flat.found.len();
    let problem = match (flat.problem, read) {
        (Some(problem), _) => problem,
        (None, Err(e)) => e.to_string(),
        (None, Ok(())) if found != count => format!("expected {count} numbers for its shape, found {found}"),
        (None, Ok(())) => return Ok(flat.found),
    };
    Err(Problem::invalid(format!("input {input}: {problem}")))
}

/// An element as JSON has it.
#[derive(Debug, Clone, Copy)]
enum Scalar {
    Bool(bool),
    Int(i128),
    Float(f64),
}

/// Reads elements one after the other. Arrays within arrays are as deep as the parser permits.
struct Flat<T, F> {
    found: Vec<T>,
    count: usize,
    one: F,
    name: &'static str,
    /// What is wrong, where it is not the JSON.
    problem: Option<String>,
}

impl<T, F: Fn(Scalar) -> Option<T>> Flat<T, F> {
    fn add<E: serde::de::Error>(&mut self, value: Scalar) -> Result<(), E> {
        if self.found.len() == self.count {
            return self.fail(format!("expected {} numbers for its shape, found more", self.count));
        }
        match (self.one)(value) {
            Some(element) => self.found.push(element),
            None => return self.refuse(value),
        }
        Ok(())
    }

    fn refuse<E: serde::de::Error>(&mut self, value: Scalar) -> Result<(), E> {
        let value = match value {
            Scalar::Bool(x) => x.to_string(),
            Scalar::Int(x) => x.to_string(),
            Scalar::Float(x) => format!("{x:?}"),
        };
        self.fail(format!("{value} is not a valid {}", self.name))
    }

    fn fail<E: serde::de::Error>(&mut self, problem: String) -> Result<(), E> {
        self.problem = Some(problem);
        Err(E::custom("not the tensor's elements"))
    }
}

impl<'de, T, F: Fn(Scalar) -> Option<T>> DeserializeSeed<'de> for &mut Flat<T, F> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, T, F: Fn(Scalar) -> Option<T>> Visitor<'de> for &mut Flat<T, F> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "numbers")
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<(), E> {
        self.add(Scalar::Bool(value))
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<(), E> {
        self.add(Scalar::Int(value.into()))
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<(), E> {
        self.add(Scalar::Int(value.into()))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<(), E> {
        self.add(Scalar::Float(value))
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<(), E> {
        let value: String = value.chars().take(40).collect();
        self.fail(format!("{value:?} is not a valid {}", self.name))
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<(), E> {
        self.fail(format!("null is not a valid {}", self.name))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        while elements.next_element_seed(&mut *self)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, _: A) -> Result<(), A::Error> {
        self.fail(format!("an object is not a valid {}", self.name))
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
    use serde_json::{json, value::to_raw_value};

    fn tensor(input: &str, ty: ElementType, shape: &[i64], data: &serde_json::Value) -> Result<Tensor, Problem> {
        super::tensor(input, ty, shape, &to_raw_value(data).unwrap())
    }

    #[test]
    fn numbers_fill_the_shape_nested_or_not() {
        for data in [json!([1, 2.5, 3, 4]), json!([[1, 2.5], [3, 4]])] {
            let found = tensor("x", ElementType::F32, &[2, 2], &data).unwrap();
            assert_eq!(found.as_slice::<f32>().unwrap(), [1.0, 2.5, 3.0, 4.0]);
        }
        let problem = |shape: &[i64], data| tensor("x", ElementType::F32, shape, &data).unwrap_err().message;
        assert_eq!(problem(&[3], json!([1, 2])), "input x: expected 3 numbers for its shape, found 2");
        assert_eq!(problem(&[1], json!([1, 2])), "input x: expected 1 numbers for its shape, found more");
        assert_eq!(problem(&[1], json!([[[]]])), "input x: expected 1 numbers for its shape, found 0");
        assert_eq!(
            problem(&[1 << 40], json!([])),
            format!("input x: expected {} numbers for its shape, found 0", 1u64 << 40)
        );
        let deep = RawValue::from_string("[".repeat(1000) + &"]".repeat(1000)).unwrap();
        assert!(super::tensor("x", ElementType::F32, &[1], &deep).unwrap_err().message.contains("recursion limit"));
    }

    #[test]
    fn what_is_not_of_the_type_is_named() {
        let problem = |ty, data| tensor("x", ty, &[1], &data).unwrap_err().message;
        for (ty, name, large) in
            [(ElementType::F32, "FP32", 1e39), (ElementType::F16, "FP16", 7e4), (ElementType::BF16, "BF16", 1e39)]
        {
            let found = problem(ty, json!([large]));
            assert!(found.ends_with(&format!("is not a valid {name}")), "{found}");
        }
        assert_eq!(problem(ElementType::I64, json!([1.5])), "input x: 1.5 is not a valid INT64");
        assert_eq!(problem(ElementType::I32, json!([3_000_000_000u32])), "input x: 3000000000 is not a valid INT32");
        assert_eq!(problem(ElementType::U8, json!([-1])), "input x: -1 is not a valid UINT8");
        assert_eq!(problem(ElementType::Bool, json!([2])), "input x: 2 is not a valid BOOL");
        assert_eq!(problem(ElementType::F32, json!(["1"])), "input x: \"1\" is not a valid FP32");
        assert_eq!(problem(ElementType::F32, json!([null])), "input x: null is not a valid FP32");
        assert_eq!(problem(ElementType::F32, json!([true])), "input x: true is not a valid FP32");
        assert_eq!(problem(ElementType::F32, json!({})), "input x: an object is not a valid FP32");
    }

    #[test]
    fn what_is_no_number_is_null() {
        let text = |tensor| serde_json::to_string(&Numbers(tensor)).unwrap();
        assert_eq!(text(Tensor::new([2], vec![0.1f32, f32::NAN]).unwrap()), "[0.1,null]");
        assert_eq!(text(Tensor::new([1], vec![f16::from_f32(0.5)]).unwrap()), "[0.5]");
        assert_eq!(text(Tensor::new([1], vec![true]).unwrap()), "[true]");
    }
}
