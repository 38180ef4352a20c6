//! A worker, who multiplies rows with columns of a weight.

use super::pack::{PackRows, pack_block};
use super::store::StoreRows;
use super::{Parts, Sums, Tiles, WIDTH, depth};
use crate::epilogue::OfRow;
use crate::gemm::Matrix;
use crate::host::{Host, Unwritten};
use crate::isa::unit::{Lines, TILE};
use crate::isa::{Isa, Job, MatrixUnit, Multiplier};
use crate::terms::terms as exact;
use moh_operators::{Element, Error};
use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;

/// Multiplies all tiles of rows with a block of the weight.
///
/// Contract of the constructor: that of [`Parts::multiply`] for every two tiles, of which the last may be one; tiles of rows are [`Parts::ROWS`]
/// floats apart, and their sums, if none are picked, [`TILE`] rows.
struct Block<'a, T, P> {
    multiplier: &'a Multiplier,
    /// The first tile of rows.
    tiles: *const f32,
    rows: usize,
    /// Tiles of the weight, and tiles along the inner dimension.
    columns: *const f32,
    steps: usize,
    ahead: Lines,
    on_the_way: *mut f32,
    sums: *mut f32,
    picked: Option<&'a [u32]>,
    add: bool,
    of: PhantomData<(T, P)>,
}

impl<T: Element, P: Parts> Job for Block<'_, T, P> {
    type Output = ();

    // All tiles in one job: to pass one by memory costs time, for its parts are written in smaller pieces than they are read in.
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let tiles = self.rows.div_ceil(TILE);
        let mut ahead = self.ahead;
        for i in (0..tiles).step_by(2) {
            let rows = i * TILE..self.rows.min((i + 2) * TILE);
            let [first, second] = [i, (i + 1).min(tiles - 1)].map(|i| self.tiles.wrapping_add(i * P::ROWS));
            let tiles = Tiles { rows: [first, second], columns: self.columns, steps: self.steps, ahead };
            let start = if self.picked.is_some() { 0 } else { rows.start };
            let sums = Sums {
                start: self.sums.wrapping_add(start * WIDTH),
                rows: rows.len(),
                picked: self.picked.map(|picked| &picked[rows]),
                add: self.add,
            };
            // SAFETY: the constructor's contract.
            unsafe { P::multiply::<I, T>(isa, self.multiplier, &tiles, self.on_the_way, &sums) }
            ahead.start = ahead.start.wrapping_add(self.steps * ahead.rows * ahead.stride);
        }
    }
}

/// Rows of a product.
pub(crate) enum Left<'a, T> {
    /// Tiles that [`PackRows`] has made of all the inner indices of the product; `block` floats are between blocks of them.
    Tiles { start: *const f32, block: usize },
    /// A pointer to inner index 0 of each row.
    Rows(&'a [*const T]),
}

/// A weight.
pub(crate) enum Right<'a, T> {
    Matrix(&'a Matrix<T>),
    /// What [`pack_all`] has made of all the inner indices of the product, and of the weight's columns from the first on.
    Blocks(*const f32),
}

// SAFETY: blocks are only read, and only while the borrow of what they are in is alive.
unsafe impl<T: Sync> Sync for Right<'_, T> {}

/// Rows and a part of the weight.
pub(crate) struct Product<'a, T> {
    pub(crate) left: Left<'a, T>,
    /// At least one.
    pub(crate) rows: usize,
    pub(crate) weight: &'a Right<'a, T>,
    pub(crate) inner: Range<usize>,
    /// If columns of the weight lie in blocks, of one of them. The first is a multiple of [`WIDTH`] if the weight is packed.
    pub(crate) columns: Range<usize>,
    /// The sums that belong to the rows, if they are not the first ones.
    pub(crate) picked: Option<&'a [u32]>,
    /// Whether it is added to the sums; they are undefined otherwise. With `picked` it is.
    pub(crate) add: bool,
}

/// A worker's memory, for numbers in parts `P`.
pub(crate) struct Worker<'h, P> {
    multiplier: Multiplier,
    /// A block of the weight.
    right: *mut f32,
    /// The same block as floats, (DEPTH * INNER, WIDTH), if it has to be transposed.
    dense: *mut f32,
    /// Sums of two tiles of rows, on their way.
    on_the_way: *mut f32,
    /// Per block of columns: (rows, WIDTH).
    sums: *mut f32,
    rows: usize,
    /// Tiles of the rows of [`Left::Rows`].
    left: *mut f32,
    /// Whether all numbers were finite that had to be.
    finite: Cell<bool>,
    parts: PhantomData<P>,
    _floats: Unwritten<'h>,
}

impl<'h, P: Parts> Worker<'h, P> {
    /// Memory for up to `rows` rows, of which `split` are split by the worker, and `columns` columns.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(crate) fn new(
        unit: MatrixUnit,
        [rows, split]: [usize; 2],
        columns: usize,
        host: &'h dyn Host,
    ) -> Result<Worker<'h, P>, Error> {
        let (rows, columns) = (rows.next_multiple_of(2 * TILE), columns.next_multiple_of(WIDTH));
        let left = split.div_ceil(TILE).saturating_mul(P::ROWS);
        let sums = rows.saturating_mul(columns);
        let lens = [P::COLUMNS, P::DEPTH * P::INNER * WIDTH, P::SUMS, sums, left];
        let floats = Unwritten::new::<f32>(host, lens.into_iter().fold(0, usize::saturating_add))?;
        let mut next = floats.as_mut_ptr::<f32>();
        let [right, dense, on_the_way, sums, left] = lens.map(|len| {
            let section = next;
            next = section.wrapping_add(len);
            section
        });
        Ok(Worker {
            multiplier: unit.start(),
            right,
            dense,
            on_the_way,
            sums,
            rows,
            left,
            finite: Cell::new(true),
            parts: PhantomData,
            _floats: floats,
        })
    }

    /// The sums of a row in a block of columns.
    fn sums(&self, block: usize, row: usize) -> *mut f32 {
        // SAFETY: there are rows of sums for every block of columns.
        unsafe { self.sums.add((block * self.rows + row) * WIDTH) }
    }

    /// Makes the sums of `rows` rows and `columns` columns 0.
    pub(crate) fn clear(&self, rows: usize, columns: usize) {
        for block in 0..columns.div_ceil(WIDTH) {
            // SAFETY: there are so many rows of sums in the block.
            unsafe { self.sums(block, 0).write_bytes(0, rows * WIDTH) }
        }
    }

    /// Writes what becomes of the sums of the first rows and columns, plus the bias, to the rows of the output.
    ///
    /// # Safety
    /// There are so many sums; the bias and what `epilogue(row)` has are valid for reading, `output(row)` for writing `columns` elements.
    pub(crate) unsafe fn store<I: Isa, T: Element>(
        &self,
        isa: I,
        [rows, columns]: [usize; 2],
        bias: Option<*const T>,
        epilogue: impl Fn(usize) -> OfRow<T>,
        output: impl Fn(usize) -> *mut T,
    ) {
        let stored = StoreRows { sums: self.sums, block: self.rows * WIDTH, bias, epilogue, output, rows, columns };
        self.see(isa.vectorize(stored) || exact(T::FLOAT) == 1);
    }

    /// Whether what was multiplied and stored was finite, or exact in bf16 terms anyway.
    pub(crate) fn is_finite(&self) -> bool {
        self.finite.get()
    }

    fn see(&self, is_finite: bool) {
        self.finite.set(self.finite.get() && is_finite);
    }

    /// Computes a product; its columns' sums are the first ones. Returns the number of multiply-accumulate operations.
    ///
    /// # Safety
    /// The weight has these inner indices and columns, and so have the rows; bf16 has one term. This memory is for as many
    /// rows and columns, and no row's sums are picked twice. Vectors have [`crate::isa::MAX_LANES`] lanes.
    pub(crate) unsafe fn multiply<I: Isa, T: Element>(&self, isa: I, product: &Product<'_, T>) -> u64 {
        let Product { ref left, rows, weight, ref inner, ref columns, picked, add } = *product;
        let (tiles, blocks) = (rows.div_ceil(TILE), columns.len().div_ceil(WIDTH));
        let (steps, depth) = (inner.len().div_ceil(P::INNER), depth::<P>(inner.len()));
        let all_blocks = super::blocks::<P>(inner.len());
        let inner_of = |first: usize| {
            (inner.start + first * P::INNER).min(inner.end)..inner.end.min(inner.start + (first + depth) * P::INNER)
        };
        let columns_of =
            |block: usize| columns.start + block * WIDTH..columns.end.min(columns.start + (block + 1) * WIDTH);
        for first in (0..steps).step_by(depth) {
            let (inner_now, steps_now) = (inner_of(first), depth.min(steps - first));
            let start = match *left {
                // SAFETY: there are tiles for every block of inner indices.
                Left::Tiles { start, block } => unsafe { start.add(first / depth * block) },
                Left::Rows(rows) => {
                    for (i, rows) in rows.chunks(TILE).enumerate() {
                        self.see(isa.vectorize(PackRows {
                            rows: rows.len(),
                            input: |row: usize| rows[row].wrapping_add(inner_now.start),
                            width: inner_now.len(),
                            block: 0,
                            // SAFETY: there is room for all rows.
                            output: unsafe { self.left.add(i * P::ROWS) },
                            parts: PhantomData::<P>,
                        }));
                    }
                    self.left.cast_const()
                }
            };
            for block in 0..blocks {
                let is_last = block + 1 == blocks;
                let steps_ahead = tiles.div_ceil(2) * steps_now;
                let (right, ahead) = match weight {
                    Right::Matrix(weight) => {
                        let columns = columns_of(block);
                        // SAFETY: the caller's contract; the memory has room for a block.
                        self.see(unsafe {
                            pack_block::<I, T, P>(isa, weight, inner_now.clone(), columns, self.dense, self.right)
                        });
                        let next = match is_last {
                            false => (inner_now.clone(), columns_of(block + 1)),
                            true => (inner_of(first + depth), columns_of(0)),
                        };
                        (self.right.cast_const(), ahead(weight, next, steps_ahead))
                    }
                    Right::Blocks(start) => {
                        let at = |block: usize, first: usize| {
                            let i = (columns.start / WIDTH + block) * all_blocks + first / depth;
                            start.wrapping_add(i * P::COLUMNS)
                        };
                        let next = match is_last {
                            false => Some(at(block + 1, first)),
                            true => (first + depth < steps).then(|| at(0, first + depth)),
                        };
                        (at(block, first), next.map_or(Lines::NONE, |next| packed_ahead::<P>(next, steps_ahead)))
                    }
                };
                isa.vectorize(Block {
                    multiplier: &self.multiplier,
                    tiles: start,
                    rows,
                    columns: right,
                    steps: steps_now,
                    ahead,
                    on_the_way: self.on_the_way,
                    sums: self.sums(block, 0),
                    picked,
                    add: picked.is_some() || add || first > 0,
                    of: PhantomData::<(T, P)>,
                });
            }
        }
        (tiles * TILE * columns.len() * steps * P::INNER) as u64
    }
}

/// The memory of a block of the weight, to be read ahead in `steps` steps.
fn ahead<T: Element>(weight: &Matrix<T>, (inner, columns): (Range<usize>, Range<usize>), steps: usize) -> Lines {
    if inner.is_empty() {
        return Lines::NONE;
    }
    let (rows, len) = match weight {
        Matrix::Columns { .. } => (inner.len(), columns.len()),
        Matrix::Rows { .. } => (columns.len(), inner.len()),
    };
    Lines {
        start: weight.at(inner.start, &columns).cast(),
        stride: weight.stride() * size_of::<T>(),
        bytes: len * size_of::<T>(),
        rows: rows.div_ceil(steps),
    }
}

/// The memory of a packed block, to be read ahead in `steps` steps.
fn packed_ahead<P: Parts>(start: *const f32, steps: usize) -> Lines {
    const LINE: usize = 64;
    let lines = (P::COLUMNS * size_of::<f32>()).div_ceil(LINE);
    Lines { start: start.cast(), stride: LINE, bytes: LINE, rows: lines.div_ceil(steps) }
}
