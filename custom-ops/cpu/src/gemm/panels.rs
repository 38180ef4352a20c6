//! How a weight's columns are cut into panels, and where its elements are.

use super::pack::{CopyRows, TransposeRows};
use super::tile;
use crate::isa::Isa;
use moh_operators::Element;
use std::ops::Range;

/// Blocks of columns that no panel crosses, each cut into panels of whole vectors and nearly equal width.
///
/// Packed, a panel is `k` rows of its vectors, zeros behind the block's last column; panels follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Panels {
    lanes: usize,
    /// Inner length.
    pub(crate) k: usize,
    blocks: usize,
    /// Of a block.
    columns: usize,
    /// Of a block.
    vectors: usize,
    /// Panels of a block.
    count: usize,
}

impl Panels {
    /// Of a weight of inner length `k` and `blocks` blocks of `columns` columns.
    pub(crate) fn new<I: Isa>(k: usize, blocks: usize, columns: usize) -> Panels {
        let vectors = columns.div_ceil(I::LANES);
        Panels { lanes: I::LANES, k, blocks, columns, vectors, count: vectors.div_ceil(tile::vectors::<I>()) }
    }

    /// Columns of all blocks.
    pub(crate) fn all_columns(&self) -> usize {
        self.blocks * self.columns
    }

    /// The number of panels.
    pub(crate) fn len(&self) -> usize {
        self.blocks * self.count
    }

    /// The panels of a block.
    pub(crate) fn of_block(&self, block: usize) -> Range<usize> {
        block * self.count..(block + 1) * self.count
    }

    /// The blocks of some panels.
    pub(crate) fn blocks(&self, panels: &Range<usize>) -> Range<usize> {
        panels.start / self.count..panels.end.div_ceil(self.count)
    }

    /// Vectors before a panel, over all blocks.
    fn first(&self, panel: usize) -> usize {
        let (block, panel) = (panel / self.count, panel % self.count);
        block * self.vectors + self.vectors * panel / self.count
    }

    /// Columns of a panel, padded.
    pub(crate) fn width(&self, panel: usize) -> usize {
        (self.first(panel + 1) - self.first(panel)) * self.lanes
    }

    /// Columns from panel `start` to panel `end`, padded.
    pub(crate) fn padded(&self, start: usize, end: usize) -> usize {
        (self.first(end) - self.first(start)) * self.lanes
    }

    /// Columns of panels of the same block, counted over all blocks.
    pub(crate) fn columns(&self, panels: &Range<usize>) -> Range<usize> {
        let block = panels.start / self.count;
        let column = |panel: usize| (self.first(panel) - block * self.vectors) * self.lanes;
        let end = column(panels.end).min(self.columns);
        block * self.columns + column(panels.start)..block * self.columns + end
    }

    /// Whether no vector is longer than its columns: then sums may be the rows of an output themselves.
    pub(crate) fn exact(&self) -> bool {
        self.columns.is_multiple_of(self.lanes)
    }

    /// The number of floats of all panels, packed; `None` where no address space has so many.
    pub(super) fn floats(&self) -> Option<usize> {
        self.blocks.checked_mul(self.vectors)?.checked_mul(self.lanes)?.checked_mul(self.k)
    }

    /// Where the packed row `k` of a panel is.
    pub(super) fn offset(&self, panel: usize, k: usize) -> usize {
        self.first(panel) * self.lanes * self.k + k * self.width(panel)
    }
}

/// Elements (k, n) of a weight, where the caller has them.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Matrix<T> {
    /// At `n * stride + k`.
    Rows { data: *const T, stride: usize },
    /// At `n / block * block_stride + k * stride + n % block`.
    Columns { data: *const T, stride: usize, block: usize, block_stride: usize },
}

// SAFETY: a pointer that is only read through, by those whose borrow of the tensor it came from is alive.
unsafe impl<T: Sync> Sync for Matrix<T> {}

impl<T: Element> Matrix<T> {
    /// Where the columns `n`, all of the same block, begin in row `k`.
    pub(super) fn at(&self, k: usize, n: &Range<usize>) -> *const T {
        match *self {
            Matrix::Rows { data, stride } => data.wrapping_add(n.start * stride + k),
            Matrix::Columns { data, stride, block, block_stride } => {
                data.wrapping_add(n.start / block * block_stride + k * stride + n.start % block)
            }
        }
    }

    pub(super) fn stride(&self) -> usize {
        match *self {
            Matrix::Rows { stride, .. } | Matrix::Columns { stride, .. } => stride,
        }
    }

    /// Packs rows `k` of the columns `n` of a panel that is `width` columns wide.
    ///
    /// # Safety
    /// The matrix has these elements, and the columns are of the same block; `panel` is valid for writing.
    pub(super) unsafe fn pack<I: Isa>(&self, isa: I, k: Range<usize>, n: Range<usize>, panel: *mut f32, width: usize) {
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
