//! Packed weights, which a host may keep in place of constant tensors.

use crate::gemm::{self, Matrix, Panels};
use crate::isa::Isa;
use moh_operators::{DType, Element, Error, Tensor};

/// An input of a call.
#[derive(Debug, Clone, Copy)]
pub enum Input<'a> {
    /// A tensor.
    Tensor(Tensor<'a>),
    /// A weight packed by [`crate::pack`].
    Packed(&'a Packed),
    /// Of [`moh_operators::Operator::in_place`]: the tensor's elements are in the memory of the output, which has its shape. They
    /// stay as they are where the output is the same.
    InPlace(&'a [usize], DType),
}

impl<'a> From<Tensor<'a>> for Input<'a> {
    fn from(tensor: Tensor<'a>) -> Input<'a> {
        Input::Tensor(tensor)
    }
}

impl<'a> Input<'a> {
    /// Dimensions of the tensor (before packing), outermost first.
    pub fn shape(&self) -> &'a [usize] {
        match self {
            Input::Tensor(tensor) => tensor.shape,
            Input::Packed(packed) => &packed.shape,
            Input::InPlace(shape, _) => shape,
        }
    }

    /// Element type of the tensor (before packing).
    pub fn dtype(&self) -> DType {
        match self {
            Input::Tensor(tensor) => tensor.data.dtype(),
            Input::Packed(packed) => packed.dtype,
            Input::InPlace(_, dtype) => *dtype,
        }
    }
}

/// A weight in the layout of the product's inner loop: float32 panels for one vector length.
///
/// Made by [`crate::pack`], passed to kernels as [`Input::Packed`]. Takes 4 bytes per element, plus padding of each
/// head's columns to whole vectors.
pub struct Packed {
    dtype: DType,
    shape: Vec<usize>,
    panels: Panels,
    lines: Vec<Line>,
}

/// A cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

impl std::fmt::Debug for Packed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Packed({:?} of {}, {} bytes)", self.shape, self.dtype, self.bytes())
    }
}

impl Packed {
    /// # Safety
    /// `matrix` has the rows and columns of `panels`.
    pub(crate) unsafe fn new<I: Isa, T: Element>(
        isa: I,
        matrix: &Matrix<T>,
        panels: Panels,
        shape: &[usize],
    ) -> Result<Packed, Error> {
        let bytes = shape.iter().fold(size_of::<f32>(), |bytes, &dim| bytes.saturating_mul(dim));
        let out_of_memory = || Error::OutOfMemory { bytes };
        let count = gemm::floats(&panels).ok_or_else(out_of_memory)?.div_ceil(16);
        let mut lines = Vec::new();
        lines.try_reserve_exact(count).map_err(|_| out_of_memory())?;
        lines.resize(count, Line([0.0; 16]));
        let mut packed = Packed { dtype: T::DTYPE, shape: shape.to_vec(), panels, lines };
        // SAFETY: the caller's contract; the buffer has the size of the panels.
        unsafe { gemm::pack_all(isa, matrix, &panels, packed.floats_mut()) };
        Ok(packed)
    }

    /// The weight's element type before it was packed.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The weight's dimensions before it was packed.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Memory in use, in bytes.
    pub fn bytes(&self) -> usize {
        self.lines.len() * size_of::<Line>()
    }

    fn floats_mut(&mut self) -> &mut [f32] {
        let len = self.lines.len() * 16;
        // SAFETY: a line is 16 floats without padding, and lines of a vector follow each other.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), len) }
    }

    /// The packed floats, if they were packed as `panels`.
    ///
    /// # Errors
    /// [`Error::Packed`] if it was packed for another use or another instruction set.
    pub(crate) fn panels(&self, operator: &'static str, input: &'static str, panels: &Panels) -> Result<&[f32], Error> {
        if self.panels != *panels {
            return Err(Error::Packed { operator, input });
        }
        // SAFETY: as in `floats_mut`.
        Ok(unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.lines.len() * 16) })
    }
}
