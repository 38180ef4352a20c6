//! Partition of a weight's columns into panels, and the weight's layout.

use super::pack::{CopyRows, TransposeRows};
use super::tile;
use crate::isa::Isa;
use moh_operators::Element;
use std::ops::Range;

/// Blocks of columns, each cut into panels of whole vectors and nearly equal width. No panel crosses a block.
///
/// A packed panel is `k` rows of its vectors, with zeros after the block's last column. Panels are contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Panels {
    lanes: usize,
    /// Inner length.
    pub(crate) k: usize,
    blocks: usize,
    /// Columns per block.
    columns: usize,
    /// Vectors per block.
    vectors: usize,
    /// Panels per block.
    count: usize,
}

impl Panels {
    /// Panels of a weight of inner length `k` with `blocks` blocks of `columns` columns.
    pub(crate) fn new<I: Isa>(k: usize, blocks: usize, columns: usize) -> Panels {
        let vectors = columns.div_ceil(I::LANES);
        Panels { lanes: I::LANES, k, blocks, columns, vectors, count: vectors.div_ceil(tile::vectors::<I>()) }
    }

    /// The number of columns of all blocks.
    pub(crate) fn all_columns(&self) -> usize {
        self.blocks * self.columns
    }

    /// The number of panels.
    pub(crate) fn len(&self) -> usize {
        self.blocks * self.count
    }

    /// The panels of block `block`.
    pub(crate) fn of_block(&self, block: usize) -> Range<usize> {
        block * self.count..(block + 1) * self.count
    }

    /// The blocks to which `panels` belong.
    pub(crate) fn blocks(&self, panels: &Range<usize>) -> Range<usize> {
        panels.start / self.count..panels.end.div_ceil(self.count)
    }

    /// The number of vectors before a panel.
    fn first(&self, panel: usize) -> usize {
        let (block, panel) = (panel / self.count, panel % self.count);
        block * self.vectors + self.vectors * panel / self.count
    }

    /// Padded width of a panel, in columns.
    pub(crate) fn width(&self, panel: usize) -> usize {
        (self.first(panel + 1) - self.first(panel)) * self.lanes
    }

    /// Padded width of panels `start .. end`, in columns.
    pub(crate) fn padded(&self, start: usize, end: usize) -> usize {
        (self.first(end) - self.first(start)) * self.lanes
    }

    /// The columns of `panels`, which belong to one block.
    pub(crate) fn columns(&self, panels: &Range<usize>) -> Range<usize> {
        let block = panels.start / self.count;
        let column = |panel: usize| (self.first(panel) - block * self.vectors) * self.lanes;
        let end = column(panels.end).min(self.columns);
        block * self.columns + column(panels.start)..block * self.columns + end
    }

    /// Whether no panel has padding, so that sums can be accumulated in rows of an output.
    pub(crate) fn exact(&self) -> bool {
        self.columns.is_multiple_of(self.lanes)
    }

    /// Floats of all packed panels; `None` if they overflow the address space.
    pub(super) fn floats(&self) -> Option<usize> {
        self.blocks.checked_mul(self.vectors)?.checked_mul(self.lanes)?.checked_mul(self.k)
    }

    /// Offset of row `k` of a packed panel.
    pub(super) fn offset(&self, panel: usize, k: usize) -> usize {
        self.first(panel) * self.lanes * self.k + k * self.width(panel)
    }
}

/// Layout of a weight's elements (k, n) in the caller's tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Matrix<T> {
    /// At `n * stride + k`.
    Rows { data: *const T, stride: usize },
    /// At `n / block * block_stride + k * stride + n % block`.
    Columns { data: *const T, stride: usize, block: usize, block_stride: usize },
}

// SAFETY: the pointer is only read, and only while the borrow of its tensor is alive.
unsafe impl<T: Sync> Sync for Matrix<T> {}

impl<T: Element> Matrix<T> {
    /// Pointer to the first of the columns `n`, all of one block, in row `k`.
    pub(crate) fn at(&self, k: usize, n: &Range<usize>) -> *const T {
        match *self {
            Matrix::Rows { data, stride } => data.wrapping_add(n.start * stride + k),
            Matrix::Columns { data, stride, block, block_stride } => {
                data.wrapping_add(n.start / block * block_stride + k * stride + n.start % block)
            }
        }
    }

    /// Whether `columns` columns lie in one block from any multiple of their number on.
    pub(crate) fn has_whole(&self, columns: usize) -> bool {
        match *self {
            Matrix::Rows { .. } => true,
            Matrix::Columns { block, block_stride, .. } => block_stride == 0 || block.is_multiple_of(columns),
        }
    }

    pub(crate) fn stride(&self) -> usize {
        match *self {
            Matrix::Rows { stride, .. } | Matrix::Columns { stride, .. } => stride,
        }
    }

    /// Packs rows `k` of the columns `n` as a panel of `width` columns.
    ///
    /// # Safety
    /// The matrix has these elements, and the columns belong to one block; `panel` is valid for writing.
    pub(crate) unsafe fn pack<I: Isa>(&self, isa: I, k: Range<usize>, n: Range<usize>, panel: *mut f32, width: usize) {
        let (input, stride, output, pitch) = (self.at(k.start, &n), self.stride(), panel, width);
        match self {
            Matrix::Rows { .. } => {
                isa.vectorize(TransposeRows { input, stride, rows: n.len(), columns: k.len(), output, pitch })
            }
            Matrix::Columns { .. } => {
                isa.vectorize(CopyRows { input, stride, rows: k.len(), columns: n.len(), output, pitch })
            }
        }
    }
}
