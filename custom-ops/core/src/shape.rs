//! Which attributes and shapes the operators accept, and what comes out. The only validator.

pub mod aggregated_attention;
pub mod routed_attention;
pub mod routed_linear;
pub mod routed_mlp;
pub mod top_k_router;

use crate::error::Error;
use crate::schema::{Attributes, ElementType, Operator};
use crate::tensor::{DType, Tensor};

/// A concrete shape.
pub type Dims = Vec<usize>;

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
    let dims = (operator.infer)(attributes, &known)?;
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

pub(crate) fn validate(
    operator: &Operator,
    attributes: &Attributes,
    inputs: &[Option<Tensor<'_>>],
) -> Result<(DType, Dims), Error> {
    let described: Vec<_> = inputs.iter().map(|t| t.map(|t| (t.shape, t.data.dtype()))).collect();
    let validated = validate_described(operator, attributes, &described)?;
    for (operand, tensor) in operator.inputs.iter().zip(inputs) {
        let Some(tensor) = tensor else { continue };
        let (expected, found) = (tensor.shape.iter().product(), tensor.data.len());
        if expected != found {
            return Err(Error::Length { operator: operator.name, tensor: operand.name, expected, found });
        }
    }
    Ok(validated)
}

/// [`validate`] for tensors of which only shape and element type are known here.
pub(crate) fn validate_described(
    operator: &Operator,
    attributes: &Attributes,
    inputs: &[Option<(&[usize], DType)>],
) -> Result<(DType, Dims), Error> {
    let shapes: Vec<Option<&[usize]>> = inputs.iter().map(|t| t.map(|(shape, _)| shape)).collect();
    check_count(operator, &shapes)?;
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

/// An attribute that counts something.
pub(crate) fn count(attributes: &Attributes, name: &'static str) -> Result<usize, Error> {
    let found = attributes.int(name);
    usize::try_from(found).ok().filter(|n| (1..=1 << 20).contains(n)).ok_or_else(|| Error::Attribute {
        operator: attributes.operator().name,
        attribute: name,
        expected: "a number from 1 to 1048576".to_owned(),
        found: found.to_string(),
    })
}

/// An attribute that is one of the first `n` whole numbers.
pub(crate) fn choice(attributes: &Attributes, name: &'static str, n: i64) -> Result<i64, Error> {
    let found = attributes.int(name);
    if (0..n).contains(&found) {
        return Ok(found);
    }
    Err(Error::Attribute {
        operator: attributes.operator().name,
        attribute: name,
        expected: if n == 2 { "0 or 1".to_owned() } else { format!("0 to {}", n - 1) },
        found: found.to_string(),
    })
}
