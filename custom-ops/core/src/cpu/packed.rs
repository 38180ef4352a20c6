//! Weights packed once: what a host may keep of a constant in place of the tensor.

use super::gemm::{self, Matrix, Panels};
use super::isa::Isa;
use crate::error::Error;
use crate::schema::{Attributes, Operator};
use crate::tensor::{DType, Element, Tensor};

/// A weight as the product's inner loop reads it: panels of float32, for one kind of vector.
///
/// Made by [`super::pack`], handed to kernels as [`crate::Data::Packed`]. It takes 4 bytes an element, and those that fill up each
/// head's columns to whole vectors.
pub struct Packed {
    dtype: DType,
    len: usize,
    panels: Panels,
    lines: Vec<Line>,
}

/// A cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

impl std::fmt::Debug for Packed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Packed({} elements of {}, {} bytes)", self.len, self.dtype, self.bytes())
    }
}

impl Packed {
    /// # Safety
    /// The matrix has the columns and rows that `panels` says.
    pub(super) unsafe fn new<I: Isa, T: Element>(
        isa: I,
        matrix: &Matrix<T>,
        panels: Panels,
        len: usize,
    ) -> Result<Packed, Error> {
        let out_of_memory = || Error::OutOfMemory { bytes: len.saturating_mul(size_of::<f32>()) };
        let count = gemm::floats(&panels).ok_or_else(out_of_memory)?.div_ceil(16);
        let mut lines = Vec::new();
        lines.try_reserve_exact(count).map_err(|_| out_of_memory())?;
        lines.resize(count, Line([0.0; 16]));
        let mut packed = Packed { dtype: T::DTYPE, len, panels, lines };
        // SAFETY: the caller's contract; there are as many floats as the panels have.
        unsafe { gemm::pack_all(isa, matrix, &panels, packed.floats_mut()) };
        Ok(packed)
    }

    /// The weight's element type before it was packed.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The weight's number of elements before it was packed.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The memory that it takes, in bytes.
    pub fn bytes(&self) -> usize {
        self.lines.len() * size_of::<Line>()
    }

    fn floats_mut(&mut self) -> &mut [f32] {
        let len = self.lines.len() * 16;
        // SAFETY: a line is 16 floats without padding, and lines of a vector follow each other.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), len) }
    }

    /// The floats of the panels, which must be these ones.
    ///
    /// # Errors
    /// [`Error::Packed`] where it was packed for another use or another instruction set.
    pub(super) fn panels(&self, operator: &'static Operator, input: usize, panels: &Panels) -> Result<&[f32], Error> {
        if self.panels != *panels {
            return Err(Error::Packed { operator: operator.name, input: operator.inputs[input].name });
        }
        // SAFETY: as in `floats_mut`.
        Ok(unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.lines.len() * 16) })
    }
}

/// For operators whose inputs are all read as they are. See [`super::Kernel`].
pub(super) fn nothing<I: Isa>(_: &Attributes, _: usize, _: Tensor<'_>) -> Result<Option<Packed>, Error> {
    Ok(None)
}
