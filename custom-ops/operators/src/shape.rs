//! Shapes, known in part or whole, and what validation has in common for all operators.

use crate::attributes::Attributes;
use crate::error::Error;
use crate::inputs::ElementType;
use crate::operator::Operator;
use crate::tensor::DType;

/// A concrete shape.
pub type Dims = Vec<usize>;

/// A shape of which some dimensions may not be known: `None`.
pub type PartialShape<'a> = &'a [Option<usize>];

/// A dimension of the output, as far as it follows from what is known of the inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputDim {
    /// Equal to dimension `axis` of input `input`, which may be symbolic.
    SameAs {
        /// Position of the input.
        input: usize,
        /// Its axis.
        axis: usize,
    },
    /// This number.
    Size(usize),
    /// Not known yet.
    Unknown,
}

/// The shape of `input` for messages: `?` where a dimension is unknown.
pub(crate) fn show(dims: &[Option<usize>]) -> String {
    let dims: Vec<String> = dims.iter().map(|d| d.map_or("?".to_owned(), |d| d.to_string())).collect();
    format!("({})", dims.join(", "))
}

pub(crate) fn output_shape(
    operator: &Operator,
    attributes: &Attributes,
    inputs: &[Option<&[usize]>],
) -> Result<Dims, Error> {
    let known: Vec<Option<Vec<Option<usize>>>> =
        inputs.iter().map(|dims| dims.map(|dims| dims.iter().map(|&d| Some(d)).collect())).collect();
    let known: Vec<Option<&[Option<usize>]>> = known.iter().map(Option::as_deref).collect();
    let dims = operator.infer(attributes, &known)?;
    let size = |dim: &OutputDim| match *dim {
        OutputDim::Size(n) => n,
        OutputDim::SameAs { input, axis } => inputs.get(input).copied().flatten().map_or(0, |dims| dims[axis]),
        OutputDim::Unknown => 0,
    };
    let dims: Dims = dims.iter().map(size).collect();
    elements(operator.name, operator.output.name, &dims).map(|_| dims)
}

/// The number of elements, which must be addressable.
fn elements(operator: &'static str, tensor: &'static str, dims: &[usize]) -> Result<usize, Error> {
    let count = dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).filter(|&n| n <= isize::MAX as usize / 8);
    count.ok_or_else(|| Error::Shape {
        operator,
        input: tensor,
        expected: "a size that fits in memory".to_owned(),
        found: format!("{dims:?}"),
    })
}

/// Whether a buffer has as many elements as its shape says.
///
/// # Errors
/// [`Error::Length`] where it has not.
pub fn check_length(operator: &'static str, tensor: &'static str, shape: &[usize], found: usize) -> Result<(), Error> {
    let expected = shape.iter().product();
    if expected == found { Ok(()) } else { Err(Error::Length { operator, tensor, expected, found }) }
}

pub(crate) fn validate(
    operator: &Operator,
    attributes: &Attributes,
    inputs: &[Option<(&[usize], DType)>],
) -> Result<(DType, Dims), Error> {
    let shapes: Vec<Option<&[usize]>> = inputs.iter().map(|t| t.map(|(shape, _)| shape)).collect();
    let dims = output_shape(operator, attributes, &shapes)?;
    let mut t = None;
    for (operand, tensor) in operator.inputs.iter().zip(inputs) {
        let &Some((shape, found)) = tensor else { continue };
        let expected = match operand.ty {
            ElementType::Float32 => DType::F32,
            ElementType::T => *t.get_or_insert(found),
        };
        if expected != found {
            return Err(Error::Type { operator: operator.name, input: operand.name, expected, found });
        }
        elements(operator.name, operand.name, shape)?;
    }
    Ok((t.unwrap_or(DType::F32), dims))
}

/// Whether every required input is there and none is beyond the schema.
pub(crate) fn check_count<S>(operator: &Operator, inputs: &[Option<S>]) -> Result<(), Error> {
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

/// A dimension on which several inputs must agree: the first one known wins.
#[derive(Default, Clone, Copy)]
pub(crate) struct Agreed(pub(crate) Option<usize>);

impl Agreed {
    pub(crate) fn accept(&mut self, dim: Option<usize>) -> bool {
        match (self.0, dim) {
            (Some(a), Some(b)) => a == b,
            (None, b) => {
                self.0 = b;
                true
            }
            (Some(_), None) => true,
        }
    }

    pub(crate) fn show(&self, name: &str) -> String {
        self.0.map_or(name.to_owned(), |n| format!("{name} = {n}"))
    }
}

/// Splits a width into heads.
pub(crate) fn per_head(width: Option<usize>, heads: usize) -> Option<Option<usize>> {
    match width {
        Some(width) if !width.is_multiple_of(heads) || width == 0 => None,
        width => Some(width.map(|width| width / heads)),
    }
}
