//! What a model takes and gives, and whether it is given what it takes.

use crate::element::ElementType;
use crate::error::{Error, Result};
use crate::value::Value;
use std::collections::HashMap;
use std::fmt;
use std::path::Path;

/// A dimension of an input or output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Dim {
    /// Always this size.
    Fixed(usize),
    /// Any size; the same wherever the name is the same. Empty where the model gives no name.
    Symbol(String),
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dim::Fixed(size) => write!(f, "{size}"),
            Dim::Symbol(name) if name.is_empty() => f.write_str("?"),
            Dim::Symbol(name) => f.write_str(name),
        }
    }
}

/// An input or output of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub element_type: ElementType,
    /// Its dimensions, outermost first.
    pub dims: Vec<Dim>,
}

impl TensorInfo {
    /// The dimensions as text, such as `(batch, sequence, 512)`.
    pub fn shape(&self) -> String {
        let dims: Vec<String> = self.dims.iter().map(Dim::to_string).collect();
        format!("({})", dims.join(", "))
    }
}

impl fmt::Display for TensorInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.name, self.element_type, self.shape())
    }
}

/// The values of `given` in the order of `expected`.
///
/// # Errors
/// [`Error::Inputs`] listing every input that is missing, unknown, given twice, or of another type or shape.
pub(crate) fn in_order(path: &Path, expected: &[TensorInfo], given: Vec<(String, Value)>) -> Result<Vec<Value>> {
    let mut problems = Vec::new();
    let mut by_name: HashMap<&str, &Value> = HashMap::new();
    for (name, value) in &given {
        if !expected.iter().any(|info| info.name == *name) {
            problems.push(format!("unexpected input {name}"));
        } else if by_name.insert(name, value).is_some() {
            problems.push(format!("input {name} is given twice"));
        }
    }
    let mut symbols = HashMap::new();
    let mut ordered = Vec::with_capacity(expected.len());
    for info in expected {
        match by_name.get(info.name.as_str()) {
            Some(&value) => {
                problems.extend(mismatch(info, value, &mut symbols));
                ordered.push(value.clone());
            }
            None => problems.push(format!("missing input {}", info.name)),
        }
    }
    if problems.is_empty() {
        return Ok(ordered);
    }
    problems.push("the model takes:".to_owned());
    problems.extend(expected.iter().map(|info| format!("  {info}")));
    Err(Error::Inputs { path: path.to_owned(), problems: problems.join("\n") })
}

/// Why `value` is no such input, given the sizes that earlier inputs gave to symbols.
fn mismatch<'a>(
    info: &'a TensorInfo,
    value: &Value,
    symbols: &mut HashMap<&'a str, (usize, &'a str)>,
) -> Option<String> {
    let name = &info.name;
    if value.element_type() != info.element_type {
        return Some(format!(
            "input {name}: expected element type {}, found {}",
            info.element_type,
            value.element_type()
        ));
    }
    let shape = value.shape();
    if shape.len() != info.dims.len() {
        return Some(format!("input {name}: expected shape {}, found {shape:?}", info.shape()));
    }
    for (axis, (dim, &size)) in info.dims.iter().zip(shape).enumerate() {
        match dim {
            Dim::Fixed(expected) if *expected != size => {
                return Some(format!("input {name}: expected shape {}, found {shape:?}", info.shape()));
            }
            Dim::Symbol(symbol) if !symbol.is_empty() => {
                let (agreed, first) = *symbols.entry(symbol).or_insert((size, name));
                if agreed != size {
                    return Some(format!(
                        "input {name}: expected {agreed} on axis {axis} ({symbol}), as in {first}, found {shape:?}"
                    ));
                }
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::tensor::Tensor;

    fn info(name: &str, dims: &[&str]) -> TensorInfo {
        let dim = |d: &&str| d.parse().map_or(Dim::Symbol((*d).to_owned()), Dim::Fixed);
        TensorInfo { name: name.to_owned(), element_type: ElementType::F32, dims: dims.iter().map(dim).collect() }
    }

    fn value(ty: ElementType, shape: &[usize]) -> Value {
        Tensor::zeros(ty, shape).unwrap().into()
    }

    fn problems(given: &[(&str, Value)]) -> String {
        let expected = [info("a", &["n", "3"]), info("b", &["n"])];
        let given = given.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        match in_order(Path::new("m.onnx"), &expected, given) {
            Ok(values) => format!("{:?}", values.iter().map(|v| v.shape().to_vec()).collect::<Vec<_>>()),
            Err(e) => e.to_string(),
        }
    }

    #[test]
    fn inputs_are_ordered_by_name() {
        let given = [("b", value(ElementType::F32, &[2])), ("a", value(ElementType::F32, &[2, 3]))];
        assert_eq!(problems(&given), "[[2, 3], [2]]");
    }

    #[test]
    fn every_problem_is_named_at_once() {
        let found = problems(&[("a", value(ElementType::I64, &[2, 3])), ("c", value(ElementType::F32, &[]))]);
        let expected = "m.onnx: unexpected input c\n\
                        input a: expected element type float32, found int64\n\
                        missing input b\n\
                        the model takes:\n  a float32 (n, 3)\n  b float32 (n)";
        assert_eq!(found, expected);
    }

    #[test]
    fn shapes_must_fit_and_symbols_agree() {
        let b = value(ElementType::F32, &[2]);
        let wrong = |shape: &[usize]| problems(&[("a", value(ElementType::F32, shape)), ("b", b.clone())]);
        assert!(wrong(&[2]).contains("input a: expected shape (n, 3), found [2]"));
        assert!(wrong(&[2, 4]).contains("input a: expected shape (n, 3), found [2, 4]"));
        assert!(wrong(&[5, 3]).contains("input b: expected 5 on axis 0 (n), as in a, found [2]"));
        let twice = [("a", value(ElementType::F32, &[2, 3])), ("b", b.clone()), ("b", b)];
        assert!(problems(&twice).contains("input b is given twice"));
    }
}
