//! What a model takes and gives, and whether it is given what it takes.

use crate::element::ElementType;
use crate::error::{Error, Result};
use crate::names::{self, INPUT_IDS};
use crate::value::Value;
use std::collections::{BTreeMap, HashMap};
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

/// The values of `given` in the order of `expected`. Of inputs that choose rows, `rows` says how many there are.
///
/// # Errors
/// [`Error::Inputs`] listing every input that is missing, unknown, given twice, of another type or shape, or a row that is not there,
/// and tokens of a language model that are none, or more than its attention mask has.
pub(crate) fn in_order(
    path: &Path,
    expected: &[TensorInfo],
    rows: &BTreeMap<String, u64>,
    given: Vec<(String, Value)>,
) -> Result<Vec<Value>> {
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
                let problem = mismatch(info, value, &mut symbols);
                problems.extend(problem.or_else(|| rows.get(&info.name).and_then(|&rows| beyond(info, value, rows))));
                ordered.push(value.clone());
            }
            None => problems.push(format!("missing input {}", info.name)),
        }
    }
    problems.extend(expected.iter().flat_map(|info| sums(info, &symbols)));
    problems.extend(new_tokens(expected, &by_name));
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

/// What is wrong with dimensions whose name is a sum of others, such as `past+sequence`.
fn sums<'a>(info: &'a TensorInfo, symbols: &HashMap<&str, (usize, &str)>) -> impl Iterator<Item = String> + 'a {
    let wrong = |symbol: &str| {
        let (found, first) = *symbols.get(symbol).filter(|(_, first)| *first == info.name)?;
        let parts = symbol.split('+').map(|part| symbols.get(part.trim()));
        let (parts, count) = (parts.clone().collect::<Option<Vec<_>>>()?, parts.count());
        let sum = parts.iter().fold(0_usize, |sum, (size, _)| sum.saturating_add(*size));
        let inputs: Vec<&str> = parts.iter().map(|(_, first)| *first).collect();
        let inputs = inputs.join(" and ");
        (count > 1 && sum != found)
            .then(|| format!("input {first}: expected {sum} for {symbol}, as in {inputs}, found {found}"))
    };
    let symbols = info.dims.iter().filter_map(|dim| if let Dim::Symbol(symbol) = dim { Some(symbol) } else { None });
    symbols.filter_map(|symbol| wrong(symbol)).collect::<Vec<String>>().into_iter()
}

/// The dimension of cached and new tokens in the mask of a model whose cache is updated in place. Where caches are concatenated, it is a sum.
const MASKED: &str = "total";

/// What is wrong with the number of new tokens of a language model with a cache: there must be one, and each must be in the mask.
fn new_tokens(expected: &[TensorInfo], given: &HashMap<&str, &Value>) -> Option<String> {
    let has_cache = expected.iter().any(|info| info.name.starts_with(names::PAST));
    let &sequence = given.get(INPUT_IDS).filter(|_| has_cache)?.shape().get(1)?;
    if sequence == 0 {
        return Some(format!("input {INPUT_IDS}: expected at least 1 on axis 1 (sequence), found 0"));
    }
    let masked = |dim: &Dim| matches!(dim, Dim::Symbol(symbol) if symbol == MASKED);
    let (mask, axis) = expected.iter().find_map(|info| Some((info, info.dims.iter().position(masked)?)))?;
    let &total = given.get(mask.name.as_str())?.shape().get(axis)?;
    let problem = || {
        let name = &mask.name;
        format!(
            "input {name}: expected at least {sequence} on axis {axis} ({MASKED}), as in {INPUT_IDS}, found {total}"
        )
    };
    (total < sequence).then(problem)
}

/// The first number that is none of so many rows. ONNX counts negative ones from the end; here they are mistakes, as in PyTorch's embeddings.
fn beyond(info: &TensorInfo, value: &Value, rows: u64) -> Option<String> {
    let is_there = |row: i64| u64::try_from(row).is_ok_and(|row| row < rows);
    let found = match value.element_type() {
        ElementType::I64 => value.as_slice::<i64>().ok()?.iter().copied().find(|&row| !is_there(row)),
        ElementType::I32 => value.as_slice::<i32>().ok()?.iter().map(|&row| row.into()).find(|&row| !is_there(row)),
        _ => None,
    };
    let expected = |row: i64| match row < 0 {
        true => format!("numbers from 0 to {}", rows.saturating_sub(1)),
        false => format!("numbers below {rows}"),
    };
    found.map(|row| format!("input {}: expected {}, found {row}", info.name, expected(row)))
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
        match in_order(Path::new("m.onnx"), &expected, &BTreeMap::new(), given) {
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

    /// Of (batch, sequence) tokens among 7, and a mask of what is cached and they.
    fn tokens(ids: Vec<i64>, mask: usize) -> String {
        let names = [("ids", ["b", "s"]), ("mask", ["b", "p + s"]), ("past", ["b", "p"])];
        let expected = names.map(|(name, dims)| TensorInfo { element_type: ElementType::I64, ..info(name, &dims) });
        let ids = Tensor::new([1, ids.len()], ids).unwrap().into();
        let given =
            [("ids", ids), ("mask", value(ElementType::I64, &[1, mask])), ("past", value(ElementType::I64, &[1, 2]))];
        let given = given.map(|(name, value)| (name.to_owned(), value)).into();
        let rows = BTreeMap::from([("ids".to_owned(), 7)]);
        in_order(Path::new("m.onnx"), &expected, &rows, given).err().map_or(String::new(), |error| error.to_string())
    }

    #[test]
    fn rows_must_be_there_and_sums_agree() {
        assert_eq!(tokens(vec![0, 6, 3], 5), "");
        assert!(
            tokens(vec![0, 7, 9], 5).starts_with("m.onnx: input ids: expected numbers below 7, found 7\nthe model")
        );
        assert!(tokens(vec![-1], 3).contains("input ids: expected numbers from 0 to 6, found -1\n"));
        assert!(tokens(vec![i64::MIN], 3).contains("found -9223372036854775808\n"));
        assert!(tokens(vec![1, 1], 3).contains("input mask: expected 4 for p + s, as in past and ids, found 3\n"));
    }
    /// Of a cache of 8 tokens that is updated in place, or that is concatenated.
    fn cached(masked: &str, sequence: usize, mask: usize) -> String {
        let expected = [
            info("input_ids", &["batch", "sequence"]),
            info("attention_mask", &["batch", masked]),
            info("past_key_values.0.key", &["batch", "2", "past", "4"]),
        ];
        let shapes = [vec![1, sequence], vec![1, mask], vec![1, 2, 8, 4]];
        let given = expected.iter().zip(shapes);
        let given = given.map(|(info, shape)| (info.name.clone(), value(ElementType::F32, &shape))).collect();
        let found = in_order(Path::new("m.onnx"), &expected, &BTreeMap::new(), given);
        found.err().map_or(String::new(), |error| error.to_string())
    }

    #[test]
    fn new_tokens_must_be_there_and_in_the_mask() {
        let none = "m.onnx: input input_ids: expected at least 1 on axis 1 (sequence), found 0\nthe model";
        assert!(cached("total", 0, 8).starts_with(none));
        assert!(cached("past+sequence", 0, 8).starts_with(none));
        let few =
            "m.onnx: input attention_mask: expected at least 3 on axis 1 (total), as in input_ids, found 2\nthe model";
        assert!(cached("total", 3, 2).starts_with(few));
        // The mask may be shorter or longer than the cache has room for.
        for mask in [3, 7, 8, 20] {
            assert_eq!(cached("total", 3, mask), "", "{mask}");
        }
        assert_eq!(cached("past+sequence", 3, 11), "");
    }
}
