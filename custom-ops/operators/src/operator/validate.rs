//! Validation steps that are the same for all operators.

use super::{Attributes, Operator};
use crate::error::Error;
use crate::shape::{Dims, OutputDim};
use crate::tensor::DType;

pub(super) fn output_shape(
    operator: &Operator,
    attributes: &Attributes,
    inputs: &[Option<&[usize]>],
) -> Result<Dims, Error> {
    let known: Vec<Option<Vec<Option<usize>>>> =
        inputs.iter().map(|dims| dims.map(|dims| dims.iter().map(|&d| Some(d)).collect())).collect();
    let known: Vec<Option<&[Option<usize>]>> = known.iter().map(Option::as_deref).collect();
    let dims = operator.infer(attributes, &known)?;
    let found = |(input, axis)| inputs.get(input).copied().flatten().map_or(0, |dims: &[usize]| dims[axis]);
    let size = |dim: &OutputDim| match *dim {
        OutputDim::Size(n) => n,
        OutputDim::SameAs { input, axis } => found((input, axis)),
        OutputDim::Max([a, b]) => found(a).max(found(b)),
        OutputDim::Unknown => 0,
    };
    let dims: Dims = dims.iter().map(size).collect();
    elements(operator.name, operator.output.name, &dims).map(|_| dims)
}

/// The number of elements; an error if they do not fit the address space.
fn elements(operator: &'static str, tensor: &'static str, dims: &[usize]) -> Result<usize, Error> {
    let count = dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).filter(|&n| n <= isize::MAX as usize / 8);
    count.ok_or_else(|| Error::Shape {
        operator,
        input: tensor,
        expected: "a size that fits in memory".to_owned(),
        found: format!("{dims:?}"),
    })
}

pub(super) fn validate(
    operator: &Operator,
    attributes: &Attributes,
    inputs: &[Option<(&[usize], DType)>],
) -> Result<(DType, Dims), Error> {
    let shapes: Vec<Option<&[usize]>> = inputs.iter().map(|t| t.map(|(shape, _)| shape)).collect();
    let dims = output_shape(operator, attributes, &shapes)?;
    let mut t = None;
    for (operand, tensor) in operator.inputs.iter().zip(inputs) {
        let &Some((shape, found)) = tensor else { continue };
        let expected =
            operand.ty.fixed().unwrap_or_else(|| *t.get_or_insert(if found.is_float() { found } else { DType::F32 }));
        if expected != found {
            return Err(Error::Type { operator: operator.name, input: operand.name, expected, found });
        }
        elements(operator.name, operand.name, shape)?;
    }
    Ok((t.unwrap_or(DType::F32), dims))
}

/// Checks that every required input is present and that there are no extra ones.
pub(super) fn check_count<S>(operator: &Operator, inputs: &[Option<S>]) -> Result<(), Error> {
    let required = operator.required_inputs();
    let present = inputs.iter().flatten().count();
    if inputs.len() > operator.inputs.len() || inputs.iter().take(required).flatten().count() < required {
        let expected = match operator.inputs.len() {
            most if most == required => format!("{required}"),
            most => format!("{required} to {most}"),
        };
        return Err(Error::InputCount { operator: operator.name, expected, found: present });
    }
    Ok(())
}
