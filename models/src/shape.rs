//! Shapes without elements: what the counter computes with.

use crate::error::{Error, Result};

/// A value of which only the shape is known, and for gates how many are not zero for each token.
#[derive(Debug, Clone)]
pub struct Shape {
    pub(crate) dims: Vec<usize>,
    pub(crate) active: Option<usize>,
}

impl Shape {
    /// A value of that shape.
    pub fn new(dims: &[usize]) -> Shape {
        Shape { dims: dims.to_vec(), active: None }
    }

    /// The dimensions.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// The number of elements; the largest number there is where it is larger.
    pub(crate) fn elements(&self) -> usize {
        self.dims.iter().fold(1, |n, &dim| n.saturating_mul(dim))
    }
}

/// An axis counted from the start, of a value of that rank.
pub(crate) fn axis(rank: usize, axis: i64) -> usize {
    if axis < 0 { (rank as i64 + axis) as usize } else { axis as usize }
}

/// ONNX Reshape's target for a known input shape.
///
/// # Errors
/// [`Error::Internal`] for a target of another number of elements.
pub(crate) fn reshaped(dims: &[usize], shape: &[i64]) -> Result<Vec<usize>> {
    let bad = || Error::Internal("a reshape that does not fit its input");
    let mut target = Vec::with_capacity(shape.len());
    for (i, &dim) in shape.iter().enumerate() {
        target.push(match dim {
            0 => *dims.get(i).ok_or_else(bad)?,
            -1 => usize::MAX,
            dim => usize::try_from(dim).map_err(|_| bad())?,
        });
    }
    let elements: usize = dims.iter().product();
    let known: usize = target.iter().filter(|&&d| d != usize::MAX).product();
    for dim in target.iter_mut().filter(|d| **d == usize::MAX) {
        *dim = elements.checked_div(known).unwrap_or(0);
    }
    if target.iter().product::<usize>() != elements {
        return Err(bad());
    }
    Ok(target)
}
