//! Packed weights, which a host may keep in place of constant tensors, or beside them.

use crate::gemm::{self, Matrix, Panels};
use crate::isa::Isa;
use crate::matrix::{self, Parts};
use crate::memory::Pages;
use crate::settings::{self, Precision};
use moh_operators::{DType, Element, Error, Tensor};

/// What a host packs weights for.
#[derive(Debug, Clone, Copy)]
pub struct Packing {
    /// The precision of its calls, as [`crate::Host::precision`].
    pub precision: Precision,
    /// Whether calls get the tensor as well, [`Input::Both`]. What a matrix unit multiplies does not do for numbers that are not finite, nor with some
    /// units for few rows, so it is packed beside the tensor only.
    pub beside: bool,
    /// Whether every weight is packed that can be, or only where that is known to save time in each call.
    pub all: bool,
}

/// For a host that drops the tensors.
impl Default for Packing {
    fn default() -> Packing {
        Packing { precision: settings::precision(), beside: false, all: true }
    }
}

/// An input of a call.
#[derive(Debug, Clone, Copy)]
pub enum Input<'a> {
    /// A tensor.
    Tensor(Tensor<'a>),
    /// A weight packed by [`crate::pack`].
    Packed(&'a Packed),
    /// A weight, and the same packed.
    Both(Tensor<'a>, &'a Packed),
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
            Input::Tensor(tensor) | Input::Both(tensor, _) => tensor.shape,
            Input::Packed(packed) => &packed.shape,
            Input::InPlace(shape, _) => shape,
        }
    }

    /// Element type of the tensor (before packing).
    pub fn dtype(&self) -> DType {
        match self {
            Input::Tensor(tensor) | Input::Both(tensor, _) => tensor.data.dtype(),
            Input::Packed(packed) => packed.dtype,
            Input::InPlace(_, dtype) => *dtype,
        }
    }
}

/// A weight in the layout of the product's inner loop: float32 panels for one vector length, or the parts that a matrix unit multiplies.
///
/// Made by [`crate::pack`], passed to kernels as [`Input::Packed`] or [`Input::Both`]. Panels take 4 bytes per element, plus padding of each
/// head's columns to whole vectors; parts one byte for every digit or two for bfloat16, plus padding.
pub struct Packed {
    dtype: DType,
    shape: Vec<usize>,
    layout: Layout,
    floats: Pages,
}

/// What is where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    Panels(Panels),
    /// Of blocks of a matrix of so many inner indices and columns: see [`matrix::pack_all`].
    Blocks {
        parts: usize,
        inner_of_tile: usize,
        inner: usize,
        columns: usize,
    },
}

impl Layout {
    fn blocks<P: Parts>([inner, columns]: [usize; 2]) -> Layout {
        Layout::Blocks { parts: P::COUNT, inner_of_tile: P::INNER, inner, columns }
    }
}

impl std::fmt::Debug for Packed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Packed({:?} of {}, {} bytes)", self.shape, self.dtype, self.bytes())
    }
}

fn out_of_memory(shape: &[usize]) -> Error {
    Error::OutOfMemory { bytes: shape.iter().fold(size_of::<f32>(), |bytes, &dim| bytes.saturating_mul(dim)) }
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
        let mut floats = gemm::floats(&panels).and_then(Pages::new).ok_or_else(|| out_of_memory(shape))?;
        // SAFETY: the caller's contract; the buffer has the size of the panels.
        unsafe { gemm::pack_all(isa, matrix, &panels, floats.as_mut_ptr()) };
        Ok(Packed { dtype: T::DTYPE, shape: shape.to_vec(), layout: Layout::Panels(panels), floats })
    }

    /// A matrix of (inner indices, columns) in parts; `None` if it has numbers that are not finite.
    ///
    /// # Safety
    /// `matrix` has these inner indices and columns, as many of which lie in one block as [`matrix::pack_all`] says.
    pub(crate) unsafe fn in_parts<I: Isa, T: Element, P: Parts>(
        isa: I,
        matrix: &Matrix<T>,
        size: [usize; 2],
        shape: &[usize],
    ) -> Result<Option<Packed>, Error> {
        let mut floats = matrix::floats::<P>(size).and_then(Pages::new).ok_or_else(|| out_of_memory(shape))?;
        // SAFETY: the caller's contract; the buffer has the size of all blocks.
        let is_finite = unsafe { matrix::pack_all::<I, T, P>(isa, matrix, size, floats.as_mut_ptr()) };
        let layout = Layout::blocks::<P>(size);
        Ok(is_finite.then(|| Packed { dtype: T::DTYPE, shape: shape.to_vec(), layout, floats }))
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
        self.floats.bytes()
    }

    /// The packed floats, if they were packed as `panels`.
    ///
    /// # Errors
    /// [`Error::Packed`] if it was packed for another use or another instruction set.
    pub(crate) fn panels(&self, operator: &'static str, input: &'static str, panels: &Panels) -> Result<&[f32], Error> {
        let len = gemm::floats(panels).filter(|_| self.layout == Layout::Panels(*panels));
        let len = len.ok_or(Error::Packed { operator, input })?;
        // SAFETY: so many floats were written when it was packed.
        Ok(unsafe { std::slice::from_raw_parts(self.floats.as_ptr(), len) })
    }

    /// Whether they are panels, of whatever matrix.
    pub(crate) fn is_panels(&self) -> bool {
        matches!(self.layout, Layout::Panels(_))
    }

    /// The blocks of a matrix of (inner indices, columns) in parts `P`, if it was packed so.
    pub(crate) fn blocks<P: Parts>(&self, size: [usize; 2]) -> Option<*const f32> {
        (self.layout == Layout::blocks::<P>(size)).then(|| self.floats.as_ptr())
    }
}
