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
use tile::{Ahead, Tiles};

/// Inner length of a block: a panel of packed weights of this height stays in the first-level cache, and the rows' elements
/// in the second-level one.
const DEPTH: usize = 128;
/// Most rows for which packing the weights costs more than it saves: where they lie along the inner index, and across it.
const MAX_STREAMED: [usize; 2] = [stream::ROWS, 4];

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

    /// Where the elements of inner indices `k` and columns `n` lie, as far as they lie side by side.
    fn lines(&self, k: Range<usize>, n: Range<usize>) -> Ahead {
        let size = size_of::<T>();
        let (start, rows, columns) = match *self {
            Matrix::Rows { data, stride } => (data.wrapping_add(n.start * stride + k.start), n.len(), k.len()),
            Matrix::Columns { data, stride, block, block_stride } => {
                let at = n.start / block * block_stride + k.start * stride + n.start % block;
                (data.wrapping_add(at), k.len(), n.len().min(block - n.start % block))
            }
        };
        Ahead::new(start.cast(), self.stride() * size, rows, columns * size)
    }
}

/// A row of the left matrix, from inner index 0 on, and of the result, from the first wanted column on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row<T> {
    pub(crate) input: *const T,
    pub(crate) output: *mut f32,
}

/// Some of the rows, and the columns of the weight that they are multiplied with.
pub(crate) struct Part<'a> {
    /// In the list of rows.
    pub(crate) rows: &'a [u32],
    pub(crate) n: Range<usize>,
    /// Where in the rows' outputs the first of these columns is.
    pub(crate) column: usize,
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
    /// Which copy is that of a row, for products on tiles.
    places: Vec<u32>,
    copied: Vec<u32>,
    /// The rows' elements that are copied next.
    later: Ahead,
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
        let panel = sections.add(DEPTH.min(k), tile::vectors::<I>() * I::LANES)?;
        let blocks = rows.checked_mul(pitch(DEPTH.min(k)));
        let few = match A::DTYPE {
            DType::F32 => Some(0),
            _ => rows.min(MAX_STREAMED[0].max(MAX_STREAMED[1])).checked_mul(pitch(k)),
        };
        let (Some(blocks), Some(few)) = (blocks, few) else {
            return Err(Error::OutOfMemory { bytes: usize::MAX });
        };
        let copies = sections.add(blocks.max(few), 1)?;
        Ok(Gemm {
            floats: sections.allocate(host)?,
            panel,
            copies,
            limits: [rows, k],
            lines: Vec::new(),
            places: Vec::new(),
            copied: Vec::new(),
            later: Ahead::default(),
        })
    }

    /// Adds the products of `parts` of the rows with columns of `weight`, over inner indices `k`, to the rows' outputs; or
    /// writes them, if they are the `first`. The result is the number of multiply-accumulate operations. `next` is where the
    /// inner indices of the next call begin, if it has the same weight and columns.
    ///
    /// # Safety
    /// The rows' inputs are valid for reading elements `k`, their outputs for writing and (if not `first`) reading
    /// [`padded`] columns of each part from its `column` on, and do not overlap; parts of the same row do not overlap
    /// either, padded. The weight has all elements named.
    pub(crate) unsafe fn multiply<I: Isa, A: Element, B: Element>(
        &mut self,
        isa: I,
        rows: &[Row<A>],
        parts: &[Part<'_>],
        weight: &Matrix<B>,
        k: Range<usize>,
        next: Option<usize>,
        first: bool,
    ) -> u64 {
        assert!(rows.len() <= self.limits[0] && k.len() <= self.limits[1], "{} rows of length {}", rows.len(), k.len());
        let limit = MAX_STREAMED[usize::from(matches!(weight, Matrix::Columns { .. }))];
        let streamed = |part: &&Part<'_>| part.rows.len() <= limit;
        let mut macs = 0;
        for part in parts.iter().filter(streamed) {
            // SAFETY: the caller's contract; the memory suffices for this limit.
            macs += unsafe { self.stream(isa, rows, part, weight, k.clone(), first) };
        }
        let tiled: Vec<&Part<'_>> = parts.iter().filter(|part| !streamed(part)).collect();
        let Some(&head) = tiled.first() else { return macs };
        self.place(rows.len(), &tiled);
        let depth = depth(k.len());
        for start in k.clone().step_by(depth.max(1)) {
            let inner = start..(start + depth).min(k.end);
            // SAFETY: the caller's contract; the memory suffices for copies of this length.
            unsafe { self.copy(isa, rows, inner.clone()) };
            let later = if inner.end < k.end { Some(inner.end) } else { next };
            self.later = later.map_or(Ahead::default(), |k| elements(rows, k, inner.len()));
            for (i, &part) in tiled.iter().enumerate() {
                let then = match tiled.get(i + 1) {
                    Some(&part) => Some((start, part)),
                    None => later.map(|k| (k, head)),
                };
                let then = then.map(|(k, part)| (k..k + inner.len(), part.n.clone()));
                // SAFETY: the caller's contract.
                macs += unsafe { self.tiles(isa, rows, part, weight, inner.clone(), then, first && start == k.start) };
            }
        }
        macs
    }

    /// A part of few rows.
    ///
    /// # Safety
    /// As [`Gemm::multiply`].
    unsafe fn stream<I: Isa, A: Element, B: Element>(
        &mut self,
        isa: I,
        rows: &[Row<A>],
        part: &Part<'_>,
        weight: &Matrix<B>,
        inner: Range<usize>,
        first: bool,
    ) -> u64 {
        let k = inner.len();
        // SAFETY: the caller's contract; a piece lies within `n`.
        unsafe {
            if A::DTYPE == DType::F32 {
                self.lines.clear();
                let row = |&row: &u32| rows[row as usize];
                let line = |row: Row<A>| Row { input: row.input.add(inner.start).cast(), output: row.output };
                self.lines.extend(part.rows.iter().map(row).map(line));
            } else {
                self.copied.clear();
                self.copied.extend_from_slice(part.rows);
                self.copy(isa, rows, inner.clone());
                self.lines.clear();
                for (place, &row) in part.rows.iter().enumerate() {
                    let input = self.floats.at(self.copies + place * pitch(k));
                    self.lines.push(Row { input, output: rows[row as usize].output });
                }
            }
            let lines = self.lines.as_slice();
            let mut at = part.n.start;
            while at < part.n.end {
                let (b, columns) = weight.piece(inner.start, at..part.n.end);
                let (stride, column) = (weight.stride(), part.column + at - part.n.start);
                match weight {
                    Matrix::Rows { .. } => isa.vectorize(Dots { lines, k, b, stride, columns, column, first }),
                    Matrix::Columns { .. } => isa.vectorize(Axpy { lines, k, b, stride, columns, column, first }),
                }
                at += columns;
            }
        }
        (part.rows.len() * k * part.n.len()) as u64
    }

    /// Gives a place among the copies to the rows of `parts`.
    fn place(&mut self, rows: usize, parts: &[&Part<'_>]) {
        const NONE: u32 = u32::MAX;
        self.places.clear();
        self.places.resize(rows, NONE);
        self.copied.clear();
        for &row in parts.iter().flat_map(|part| part.rows) {
            let place = &mut self.places[row as usize];
            if *place == NONE {
                *place = self.copied.len() as u32;
                self.copied.push(row);
            }
        }
    }

    /// Copies elements `inner` of the rows that have a place.
    ///
    /// # Safety
    /// As [`Gemm::multiply`]; the memory suffices.
    unsafe fn copy<I: Isa, A: Element>(&mut self, isa: I, rows: &[Row<A>], inner: Range<usize>) {
        let (output, start, k) = (self.floats.at(self.copies), inner.start, inner.len());
        isa.vectorize(CopyInputs { rows, copied: &self.copied, start, k, output, pitch: pitch(k) });
    }

    /// A part of many rows, of which the inner indices `inner` have been copied. `then` are the inner indices and columns of
    /// the weight that are wanted next.
    ///
    /// # Safety
    /// As [`Gemm::multiply`].
    unsafe fn tiles<I: Isa, A: Element, B: Element>(
        &mut self,
        isa: I,
        rows: &[Row<A>],
        part: &Part<'_>,
        weight: &Matrix<B>,
        inner: Range<usize>,
        then: Option<(Range<usize>, Range<usize>)>,
        first: bool,
    ) -> u64 {
        let (k, n) = (inner.len(), &part.n);
        self.lines.clear();
        for &row in part.rows {
            let input = self.floats.at(self.copies + self.places[row as usize] as usize * pitch(k));
            self.lines.push(Row { input, output: rows[row as usize].output });
        }
        let (lines, b) = (self.lines.as_slice(), self.floats.at(self.panel));
        let mut at = n.start;
        for vectors in panels(n.len().div_ceil(I::LANES), tile::vectors::<I>()) {
            let end = (at + vectors * I::LANES).min(n.end);
            let column = part.column + at - n.start;
            // SAFETY: the caller's contract; the panel holds `k` rows of the most vectors.
            unsafe { pack(isa, weight, inner.start, k, at..end, b, vectors * I::LANES) };
            let width = |n: &Range<usize>| n.start..n.end.min(n.start + vectors * I::LANES);
            let ahead = match &then {
                _ if end < n.end => weight.lines(inner.clone(), width(&(end..n.end))),
                Some((k, n)) => weight.lines(k.clone(), width(n)),
                None => Ahead::default(),
            };
            self.later = isa.vectorize(Tiles { lines, k, b, vectors, column, first, ahead, later: self.later });
            at = end;
        }
        (lines.len() * k * n.len().next_multiple_of(I::LANES)) as u64
    }
}

/// Elements `start .. start + k` of rows that are equally far apart.
fn elements<A>(rows: &[Row<A>], start: usize, k: usize) -> Ahead {
    let distance = |pair: &[Row<A>]| (pair[1].input as usize).wrapping_sub(pair[0].input as usize);
    let stride = rows.first_chunk::<2>().map_or(0, |pair| distance(pair));
    match rows.windows(2).all(|pair| distance(pair) == stride) {
        true => Ahead::new(rows[0].input.wrapping_add(start).cast(), stride, rows.len(), k * size_of::<A>()),
        false => Ahead::default(),
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
