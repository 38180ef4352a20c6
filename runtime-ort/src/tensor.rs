//! Tensors in ordinary memory: what goes into a model and what comes out.

use crate::element::{Data, Element, ElementType, TensorData};
use crate::error::{Error, Result};

/// A shape and as many elements as it needs.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    shape: Vec<usize>,
    data: TensorData,
}

impl Tensor {
    /// A tensor of `shape` (outermost dimension first; empty for a scalar) over `data` in row-major order.
    ///
    /// # Errors
    /// [`Error::Length`] where the data does not fill the shape.
    pub fn new<T: Element>(shape: impl Into<Vec<usize>>, data: Vec<T>) -> Result<Tensor> {
        Tensor::from_data(shape.into(), T::wrap(data))
    }

    /// As [`Tensor::new`], over data whose type is known only at run time.
    ///
    /// # Errors
    /// [`Error::Length`] where the data does not fill the shape.
    pub fn from_data(shape: Vec<usize>, data: TensorData) -> Result<Tensor> {
        let found = data.as_data().len();
        let expected = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).unwrap_or(usize::MAX);
        if expected != found {
            return Err(Error::Length { shape, expected, found });
        }
        Ok(Tensor { shape, data })
    }

    /// A tensor of zeros.
    ///
    /// # Errors
    /// [`Error::Length`] where the number of elements is beyond what memory can hold.
    pub fn zeros(ty: ElementType, shape: impl Into<Vec<usize>>) -> Result<Tensor> {
        let shape = shape.into();
        let len = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).filter(|&n| n <= isize::MAX as usize / 8);
        match len {
            Some(len) => Ok(Tensor { shape, data: TensorData::zeros(ty, len) }),
            None => Err(Error::Length { shape, expected: usize::MAX, found: 0 }),
        }
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements in row-major order.
    pub fn data(&self) -> Data<'_> {
        self.data.as_data()
    }

    /// The element type.
    pub fn element_type(&self) -> ElementType {
        self.data().element_type()
    }

    /// The elements as a slice of `T`; `None` if they are of another type.
    pub fn as_slice<T: Element>(&self) -> Option<&[T]> {
        T::slice(&self.data())
    }

    /// The elements to be changed, as a slice of `T`; `None` if they are of another type.
    pub(crate) fn as_slice_mut<T: Element>(&mut self) -> Option<&mut [T]> {
        T::slice_mut(&mut self.data)
    }

    /// The shape and the elements.
    pub fn into_parts(self) -> (Vec<usize>, TensorData) {
        (self.shape, self.data)
    }
}
