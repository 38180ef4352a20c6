//! Matrix products for rows picked out of a larger matrix: a blocked product on register tiles for many rows, and for a few
//! rows one that reads each weight once, in place.
//!
//! However rows and columns are cut, an element of the result is the same additions in the same order: it does not depend on
//! the number of threads. What decides between the two ways is the number of rows alone.

mod pack;
mod rows;
mod stream;
mod tile;

use super::isa::{Isa, MAX_LANES};
use super::memory::{Memory, Sections};
use crate::error::Error;
use crate::host::Host;
use crate::tensor::{DType, Element};
use pack::{CopyInputs, CopyRows, TransposeRows};
pub(crate) use rows::{AddScaled, Store};
use std::ops::Range;
use stream::{Axpy, Dots};
use tile::{Tiles, max_vectors};

/// Inner length of a block: a panel of packed weights of this height and a tile's rows stay in the caches.
const DEPTH: usize = 256;
/// Most rows for which packing the weights costs more than it saves: where they lie along the inner index, and across it.
const MAX_STREAMED: [usize; 2] = [tile::ROWS, 4];

/// Whether all products of so many rows stream their weights: each is read once, whatever the number of columns.
pub(crate) fn few(rows: usize) -> bool {
    rows <= MAX_STREAMED[0].min(MAX_STREAMED[1])
}

/// A weight matrix, element (k, n), in place.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Matrix<T> {
    /// At `n * stride + k`.
    Rows { data: *const T, stride: usize },
    /// At `n / block * block_stride + k * stride + n % block`.
    Columns { data: *const T, stride: usize, block: usize, block_stride: usize },
}

impl<T> Matrix<T> {
    /// From (k, n.start) on: where the elements are, and how many columns lie side by side; at most those of `n`.
    ///
    /// # Safety
    /// The element exists.
    unsafe fn piece(&self, k: usize, n: Range<usize>) -> (*const T, usize) {
        // SAFETY: the caller's contract.
        unsafe {
            match *self {
                Matrix::Rows { data, stride } => (data.add(n.start * stride + k), n.len()),
                Matrix::Columns { data, stride, block, block_stride } => {
                    let (index, within) = (n.start / block, n.start % block);
                    (data.add(index * block_stride + k * stride + within), n.len().min(block - within))
                }
            }
        }
    }

    fn stride(&self) -> usize {
        match *self {
            Matrix::Rows { stride, .. } | Matrix::Columns { stride, .. } => stride,
        }
    }
}

/// A row of the left matrix, from inner index 0 on, and of the result, from the first wanted column on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row<T> {
    pub(crate) input: *const T,
    pub(crate) output: *mut f32,
}

/// Columns of a result, rounded up to what [`Gemm::multiply`] writes.
pub(crate) fn padded(columns: usize) -> usize {
    columns.saturating_add(MAX_LANES - 1) / MAX_LANES * MAX_LANES
}

/// A worker's memory for products.
pub(crate) struct Gemm<'h> {
    floats: Memory<'h>,
    panel: usize,
    copies: usize,
    limits: [usize; 2],
    lines: Vec<Row<f32>>,
}

/// Distance of copied rows: an odd number of cache lines, so that they do not compete for the same places in a cache.
pub(crate) fn pitch(k: usize) -> usize {
    ((padded(k) / MAX_LANES) | 1) * MAX_LANES
}

/// Inner length of the blocks that `k` is cut into.
fn depth(k: usize) -> usize {
    k.div_ceil(k.div_ceil(DEPTH).max(1)).next_multiple_of(MAX_LANES).min(k)
}

impl<'h> Gemm<'h> {
    /// For products of at most `rows` rows of inner length `k` at most, of elements of type `A`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(crate) fn new<I: Isa, A: Element>(rows: usize, k: usize, host: &'h dyn Host) -> Result<Gemm<'h>, Error> {
        let mut sections = Sections::default();
        let panel = sections.add(DEPTH.min(k), max_vectors::<I>() * I::LANES)?;
        let copies = match A::DTYPE {
            DType::F32 => 0,
            _ => {
                let blocks = rows.checked_mul(pitch(DEPTH.min(k)));
                let few = rows.min(MAX_STREAMED[0].max(MAX_STREAMED[1])).checked_mul(pitch(k));
                let (Some(blocks), Some(few)) = (blocks, few) else {
                    return Err(Error::OutOfMemory { bytes: usize::MAX });
                };
                sections.add(blocks.max(few), 1)?
            }
        };
        Ok(Gemm { floats: sections.allocate(host)?, panel, copies, limits: [rows, k], lines: Vec::new() })
    }

    /// Adds the product of `rows` and columns `n` of `weight`, of inner length `k`, to the rows' outputs; or writes it, if
    /// it is the `first`. The result is the number of multiply-accumulate operations.
    ///
    /// # Safety
    /// The rows' inputs are valid for reading `k` elements, their outputs for writing and (if not `first`) reading
    /// [`padded`] `n` floats, and do not overlap; the weight has all elements named.
    pub(crate) unsafe fn multiply<I: Isa, A: Element, B: Element>(
        &mut self,
        isa: I,
        rows: &[Row<A>],
        weight: &Matrix<B>,
        k: usize,
        n: Range<usize>,
        first: bool,
    ) -> u64 {
        assert!(rows.len() <= self.limits[0] && k <= self.limits[1], "{} rows of length {k}", rows.len());
        let limit = MAX_STREAMED[usize::from(matches!(weight, Matrix::Columns { .. }))];
        // SAFETY: the caller's contract; the memory suffices for these limits.
        unsafe {
            if rows.len() <= limit {
                self.stream(isa, rows, weight, k, n, first)
            } else {
                self.tiles(isa, rows, weight, k, n, first)
            }
        }
    }

    /// # Safety
    /// As [`Gemm::multiply`].
    unsafe fn stream<I: Isa, A: Element, B: Element>(
        &mut self,
        isa: I,
        rows: &[Row<A>],
        weight: &Matrix<B>,
        k: usize,
        n: Range<usize>,
        first: bool,
    ) -> u64 {
        // SAFETY: the caller's contract; a piece lies within `n`.
        unsafe {
            self.load(isa, rows, 0, k);
            let lines = self.lines.as_slice();
            let mut at = n.start;
            while at < n.end {
                let (b, columns) = weight.piece(0, at..n.end);
                let (stride, column) = (weight.stride(), at - n.start);
                match weight {
                    Matrix::Rows { .. } => isa.vectorize(Dots { lines, k, b, stride, columns, column, first }),
                    Matrix::Columns { .. } => isa.vectorize(Axpy { lines, k, b, stride, columns, column, first }),
                }
                at += columns;
            }
        }
        (rows.len() * k * n.len()) as u64
    }

    /// # Safety
    /// As [`Gemm::multiply`].
    unsafe fn tiles<I: Isa, A: Element, B: Element>(
        &mut self,
        isa: I,
        rows: &[Row<A>],
        weight: &Matrix<B>,
        k: usize,
        n: Range<usize>,
        first: bool,
    ) -> u64 {
        let mut macs = 0;
        for start in (0..k).step_by(depth(k).max(1)) {
            let depth = depth(k).min(k - start);
            // SAFETY: the caller's contract; start + depth <= k.
            unsafe { self.load(isa, rows, start, depth) };
            let mut at = n.start;
            for vectors in panels(n.len().div_ceil(I::LANES), max_vectors::<I>()) {
                let end = (at + vectors * I::LANES).min(n.end);
                let (b, column) = (self.floats.at(self.panel), at - n.start);
                // SAFETY: the caller's contract; the panel holds `depth` rows of the most vectors.
                unsafe { pack(isa, weight, start, depth, at..end, b, vectors * I::LANES) };
                let first = first && start == 0;
                isa.vectorize(Tiles { lines: &self.lines, k: depth, b, vectors, column, first });
                macs += (rows.len() * depth * vectors * I::LANES) as u64;
                at = end;
            }
        }
        macs
    }

    /// Makes `lines`: the rows' elements `start .. start + k` as floats, in place where they are.
    ///
    /// # Safety
    /// As [`Gemm::multiply`].
    unsafe fn load<I: Isa, A: Element>(&mut self, isa: I, rows: &[Row<A>], start: usize, k: usize) {
        self.lines.clear();
        if A::DTYPE == DType::F32 {
            // SAFETY: the caller's contract.
            let input = |row: &Row<A>| unsafe { row.input.add(start) };
            self.lines.extend(rows.iter().map(|row| Row { input: input(row).cast(), output: row.output }));
            return;
        }
        let (output, pitch) = (self.floats.at(self.copies), pitch(k));
        isa.vectorize(CopyInputs { rows, start, k, output, pitch });
        // SAFETY: `new` made room for so many rows of this length, or of a block's.
        let copy = |i: usize| unsafe { output.add(i * pitch).cast_const() };
        self.lines.extend(rows.iter().enumerate().map(|(i, row)| Row { input: copy(i), output: row.output }));
    }
}

/// Cuts `vectors` into panels of at most `most` and of nearly equal width.
fn panels(vectors: usize, most: usize) -> impl Iterator<Item = usize> {
    let count = vectors.div_ceil(most);
    (0..count).map(move |i| vectors * (i + 1) / count - vectors * i / count)
}

/// Copies columns `n` of rows `start .. start + depth` of `weight` to a panel, whose rows are `pitch` floats.
///
/// # Safety
/// The weight has the elements; the panel is valid for writing.
unsafe fn pack<I: Isa, T: Element>(
    isa: I,
    weight: &Matrix<T>,
    start: usize,
    depth: usize,
    n: Range<usize>,
    panel: *mut f32,
    pitch: usize,
) {
    let mut at = n.start;
    while at < n.end {
        // SAFETY: the caller's contract; a piece lies within `n`.
        unsafe {
            let (input, columns) = weight.piece(start, at..n.end);
            let output = panel.add(at - n.start);
            let stride = weight.stride();
            match weight {
                Matrix::Rows { .. } => {
                    isa.vectorize(TransposeRows { input, stride, rows: columns, columns: depth, output, pitch })
                }
                Matrix::Columns { .. } => {
                    isa.vectorize(CopyRows { input, stride, rows: depth, columns, output, pitch })
                }
            }
            at += columns;
        }
    }
}
