//! Whether a request's tensors are what a model takes.

use crate::problem::Problem;
use moh_runtime::{Dim, Tensor, TensorInfo};
use std::collections::HashMap;

/// Sizes of what has none in the model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// Of the first dimension.
    pub(crate) rows: usize,
    /// Of others, such as tokens; `None`: as the body permits.
    pub(crate) length: Option<usize>,
}

/// The tensors in the model's order.
///
/// # Errors
/// A [`Problem`] naming the first input that is missing, unknown, given twice, or of another type or shape.
pub(crate) fn check(
    expected: &[TensorInfo],
    given: Vec<(String, Tensor)>,
    bounds: Bounds,
) -> Result<Vec<Tensor>, Problem> {
    let mut by_name = HashMap::new();
    for (name, tensor) in given {
        if !expected.iter().any(|info| info.name == name) {
            let names: Vec<&str> = expected.iter().map(|info| info.name.as_str()).collect();
            return Err(Problem::invalid(format!("input {name}: the model takes {}", names.join(", "))));
        }
        if let Some((name, _)) = by_name.remove_entry(&name) {
            return Err(Problem::invalid(format!("input {name}: it is given twice")));
        }
        by_name.insert(name, tensor);
    }
    let mut symbols = HashMap::new();
    let mut ordered = Vec::with_capacity(expected.len());
    for info in expected {
        let tensor = by_name.remove(&info.name);
        let tensor = tensor.ok_or_else(|| Problem::invalid(format!("input {}: it is missing: {info}", info.name)))?;
        ordered.push(fitting(info, tensor, bounds, &mut symbols)?);
    }
    Ok(ordered)
}

fn fitting<'a>(
    info: &'a TensorInfo,
    tensor: Tensor,
    bounds: Bounds,
    symbols: &mut HashMap<&'a str, (usize, &'a str)>,
) -> Result<Tensor, Problem> {
    let name = &info.name;
    let bad = |problem: String| Err(Problem::invalid(format!("input {name}: {problem}")));
    if tensor.element_type() != info.element_type {
        return bad(format!("expected element type {}, found {}", info.element_type, tensor.element_type()));
    }
    let tensor = without_last(info, tensor)?;
    let shape = tensor.shape();
    let misshapen = format!("expected shape {}, found {shape:?}", info.shape());
    if shape.len() != info.dims.len() {
        return bad(misshapen);
    }
    for (axis, (dim, &size)) in info.dims.iter().zip(shape).enumerate() {
        match dim {
            Dim::Fixed(expected) if *expected != size => return bad(misshapen),
            Dim::Fixed(_) => continue,
            Dim::Symbol(symbol) => {
                let (agreed, first) = *symbols.entry(symbol).or_insert((size, name));
                if agreed != size && !symbol.is_empty() {
                    return bad(format!("expected {agreed} on axis {axis} ({symbol}), as in {first}, found {shape:?}"));
                }
            }
        }
        let most = if axis == 0 { Some(bounds.rows) } else { bounds.length };
        if most.is_some_and(|most| size > most) {
            let (most, option) = (most.unwrap_or_default(), if axis == 0 { " (--batch)" } else { "" });
            return bad(format!("expected at most {most}{option} on axis {axis}, found {shape:?}"));
        }
        if axis == 0 && size == 0 {
            return bad(format!("it has no rows: {shape:?}"));
        }
    }
    Ok(tensor)
}

/// A number a row as (batch, 1), as clients of Triton send it, in the shape that the model takes.
fn without_last(info: &TensorInfo, tensor: Tensor) -> Result<Tensor, Problem> {
    match *tensor.shape() {
        [rows, 1] if info.dims.len() == 1 => {
            let reshaped = Tensor::from_data(vec![rows], tensor.into_parts().1);
            reshaped.map_err(|e| Problem::invalid(format!("input {}: {e}", info.name)))
        }
        _ => Ok(tensor),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use moh_runtime::ElementType;

    fn expected() -> Vec<TensorInfo> {
        let symbol = |name: &str| Dim::Symbol(name.to_owned());
        let info = |name: &str, ty, dims| TensorInfo { name: name.to_owned(), element_type: ty, dims };
        vec![
            info("x", ElementType::F32, vec![symbol("n"), Dim::Fixed(3), symbol("m")]),
            info("t", ElementType::I64, vec![symbol("n")]),
        ]
    }

    fn x(shape: &[usize]) -> (String, Tensor) {
        ("x".to_owned(), Tensor::zeros(ElementType::F32, shape).unwrap())
    }

    fn t(shape: &[usize]) -> (String, Tensor) {
        ("t".to_owned(), Tensor::zeros(ElementType::I64, shape).unwrap())
    }

    fn checked(given: Vec<(String, Tensor)>) -> Result<Vec<Vec<usize>>, String> {
        let bounds = Bounds { rows: 4, length: Some(9) };
        let found = check(&expected(), given, bounds).map_err(|problem| problem.message)?;
        Ok(found.iter().map(|tensor| tensor.shape().to_vec()).collect())
    }

    #[test]
    fn inputs_come_in_the_models_order_and_shape() {
        assert_eq!(checked(vec![t(&[2]), x(&[2, 3, 5])]), Ok(vec![vec![2, 3, 5], vec![2]]));
        assert_eq!(checked(vec![t(&[2, 1]), x(&[2, 3, 0])]), Ok(vec![vec![2, 3, 0], vec![2]]));
    }

    #[test]
    fn the_first_problem_is_named() {
        let float = ("t".to_owned(), Tensor::zeros(ElementType::F32, [2]).unwrap());
        let other = ("y".to_owned(), Tensor::zeros(ElementType::F32, [2]).unwrap());
        for (given, problem) in [
            (vec![x(&[2, 3, 1])], "input t: it is missing: t int64 (n)"),
            (vec![x(&[2, 3, 1]), other], "input y: the model takes x, t"),
            (vec![x(&[2, 3, 1]), t(&[2]), t(&[2])], "input t: it is given twice"),
            (vec![x(&[2, 3, 1]), float], "input t: expected element type int64, found float32"),
            (vec![x(&[2, 4, 1]), t(&[2])], "input x: expected shape (n, 3, m), found [2, 4, 1]"),
            (vec![x(&[2, 3]), t(&[2])], "input x: expected shape (n, 3, m), found [2, 3]"),
            (vec![x(&[2, 3, 1]), t(&[3])], "input t: expected 2 on axis 0 (n), as in x, found [3]"),
            (vec![x(&[3, 3, 1]), t(&[2])], "input t: expected 3 on axis 0 (n), as in x, found [2]"),
            (vec![x(&[5, 3, 1]), t(&[5])], "input x: expected at most 4 (--batch) on axis 0, found [5, 3, 1]"),
            (vec![x(&[2, 3, 10]), t(&[2])], "input x: expected at most 9 on axis 2, found [2, 3, 10]"),
            (vec![x(&[0, 3, 1]), t(&[0])], "input x: it has no rows: [0, 3, 1]"),
        ] {
            assert_eq!(checked(given), Err(problem.to_owned()));
        }
    }
}
