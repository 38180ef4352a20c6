//! Shapes, fully or partly known, and validation helpers shared by all operators.

use crate::error::Error;

/// A concrete shape.
pub type Dims = Vec<usize>;

/// A shape with unknown dimensions as `None`.
pub type PartialShape<'a> = &'a [Option<usize>];

/// A dimension of the output, as far as the known input shapes determine it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputDim {
    /// Equal to dimension `axis` of input `input`, which may be symbolic.
    SameAs {
        /// Index of the input.
        input: usize,
        /// Its axis.
        axis: usize,
    },
    /// The larger of two dimensions, (input, axis) each.
    Max([(usize, usize); 2]),
    /// A known size.
    Size(usize),
    /// Not known yet.
    Unknown,
}

/// A shape for error messages, with `?` for unknown dimensions.
pub(crate) fn show(dims: &[Option<usize>]) -> String {
    let dims: Vec<String> = dims.iter().map(|d| d.map_or("?".to_owned(), |d| d.to_string())).collect();
    format!("({})", dims.join(", "))
}

/// Checks that a buffer has as many elements as its shape.
///
/// # Errors
/// [`Error::Length`] if it has not.
pub fn check_length(operator: &'static str, tensor: &'static str, shape: &[usize], found: usize) -> Result<(), Error> {
    let expected = shape.iter().product();
    if expected == found { Ok(()) } else { Err(Error::Length { operator, tensor, expected, found }) }
}

/// A dimension on which several inputs must agree. The first known size is kept; later ones are compared with it.
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

/// Divides a width by the number of heads; `None` unless it is a positive multiple of it.
pub(crate) fn per_head(width: Option<usize>, heads: usize) -> Option<Option<usize>> {
    match width {
        Some(width) if !width.is_multiple_of(heads) || width == 0 => None,
        width => Some(width.map(|width| width / heads)),
    }
}
