//! A worker, who multiplies rows with columns of a weight.

use super::pack::{PackRows, PickRows, pack_block};
use super::store::StoreRows;
use super::{Parts, STEP, Sums, Tiles, WIDTH, depth};
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
    /// A block of the weight, and its tiles along the inner dimension that are multiplied.
    columns: *const f32,
    steps: Range<usize>,
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
            let tiles = Tiles { rows: [first, second], columns: self.columns, steps: self.steps.clone(), ahead };
            let start = if self.picked.is_some() { 0 } else { rows.start };
            let sums = Sums {
                start: self.sums.wrapping_add(start * WIDTH),
                rows: rows.len(),
                picked: self.picked.map(|picked| &picked[rows]),
                add: self.add,
            };
            // SAFETY: the constructor's contract.
            unsafe { P::multiply::<I, T>(isa, self.multiplier, &tiles, self.on_the_way, &sums) }
            ahead.start = ahead.start.wrapping_add(self.steps.len() * ahead.rows * ahead.stride);
        }
    }
}

/// Rows of a product.
pub(crate) enum Left<'a, T> {
    /// Tiles that [`PackRows`] has made of all the inner indices of the weight, which are those of the product; `block` floats are between blocks of them.
    Tiles { start: *const f32, block: usize },
    /// Some rows of such tiles.
    Picked { start: *const f32, block: usize, rows: &'a [u32] },
    /// A pointer to inner index 0 of each row.
    Rows(&'a [*const T]),
}

/// A weight.
pub(crate) enum Right<'a, T> {
    Matrix(&'a Matrix<T>),
    /// What [`super::pack_all`] has made of a weight of `inner` inner indices.
    Blocks {
        start: *const f32,
        inner: usize,
    },
}

impl<T> Right<'_, T> {
    /// Sums before those of these columns: blocks of a weight that is packed begin where they do.
    pub(crate) fn lead(&self, columns: &Range<usize>) -> usize {
        match self {
            Right::Matrix(_) => 0,
            Right::Blocks { .. } => columns.start % WIDTH,
        }
    }
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
    /// If columns of the weight lie in blocks, of one of them.
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
    /// Tiles of the rows of [`Left::Rows`] and [`Left::Picked`].
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

    /// Writes what becomes of the sums of the first rows, plus the bias, to the rows of the output: of so many columns, behind those that lead.
    ///
    /// # Safety
    /// There are so many sums; the bias and what `epilogue(row)` has are valid for reading, `output(row)` for writing `columns` elements.
    pub(crate) unsafe fn store<I: Isa, T: Element>(
        &self,
        isa: I,
        rows: usize,
        (lead, columns): (usize, usize),
        bias: Option<*const T>,
        epilogue: impl Fn(usize) -> OfRow<T>,
        output: impl Fn(usize) -> *mut T,
    ) {
        let (sums, block) = (self.sums, self.rows * WIDTH);
        let stored = StoreRows { sums, block, bias, epilogue, output, rows, lead, columns };
        self.see(isa.vectorize(stored) || exact(T::FLOAT) == 1);
    }

    /// Whether what was multiplied and stored was finite, or exact in bf16 terms anyway.
    pub(crate) fn is_finite(&self) -> bool {
        self.finite.get()
    }

    fn see(&self, is_finite: bool) {
        self.finite.set(self.finite.get() && is_finite);
    }

    /// Computes a product; its columns' sums are the first ones, behind [`Right::lead`] others. Returns the number of multiply-accumulate operations.
    ///
    /// # Safety
    /// The weight has these inner indices and columns, and so have the rows; bf16 has one term. This memory is for as many
    /// rows and columns, and no row's sums are picked twice. Vectors have [`crate::isa::MAX_LANES`] lanes.
    pub(crate) unsafe fn multiply<I: Isa, T: Element>(&self, isa: I, product: &Product<'_, T>) -> u64 {
        let Product { ref left, rows, weight, ref inner, ref columns, picked, add } = *product;
        // Inner indices of the weight that are cut into blocks, and where blocks of inner indices and columns begin.
        let (whole, origin, first_column) = match *weight {
            Right::Matrix(_) => (inner.len(), inner.start, columns.start),
            Right::Blocks { inner, .. } => (inner, 0, columns.start - weight.lead(columns)),
        };
        let (tiles, blocks) = (rows.div_ceil(TILE), (columns.end - first_column).div_ceil(WIDTH));
        let (depth, all_blocks) = (depth::<P>(whole), super::blocks::<P>(whole));
        let steps = (inner.start - origin) / P::INNER..(inner.end - origin).div_ceil(P::INNER);
        // The steps from the first on that are in one block.
        let in_block = |first: usize| first..steps.end.min((first / depth + 1) * depth);
        let inner_of = |steps: &Range<usize>| {
            inner.end.min(origin + steps.start * P::INNER)..inner.end.min(origin + steps.end * P::INNER)
        };
        let columns_of =
            |block: usize| first_column + block * WIDTH..columns.end.min(first_column + (block + 1) * WIDTH);
        let mut first = steps.start;
        while first < steps.end {
            let now = in_block(first);
            let inner_now = inner_of(&now);
            let start = match *left {
                // SAFETY: there are tiles for every block of inner indices.
                Left::Tiles { start, block } => unsafe { start.add(first / depth * block) },
                Left::Picked { start, block, rows } => {
                    isa.vectorize(PickRows {
                        // SAFETY: as above.
                        tiles: unsafe { start.add(first / depth * block) },
                        picked: rows,
                        steps: now.len(),
                        output: self.left,
                        parts: PhantomData::<P>,
                    });
                    self.left.cast_const()
                }
                Left::Rows(rows) => {
                    for (i, rows) in rows.chunks(TILE).enumerate() {
                        self.see(isa.vectorize(PackRows {
                            rows: rows.len(),
                            input: |row: usize| rows[row].wrapping_add(inner_now.start),
                            width: inner_now.len(),
                            lead: inner.start.saturating_sub(inner_now.start),
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
                let steps_ahead = tiles.div_ceil(2) * now.len();
                let (right, right_steps, ahead) = match *weight {
                    Right::Matrix(weight) => {
                        let columns = columns_of(block);
                        // SAFETY: the caller's contract; the memory has room for a block.
                        self.see(unsafe {
                            pack_block::<I, T, P>(isa, weight, inner_now.clone(), columns, self.dense, self.right)
                        });
                        let next = match is_last {
                            false => (inner_now.clone(), columns_of(block + 1)),
                            true => (inner_of(&in_block(now.end)), columns_of(0)),
                        };
                        (self.right.cast_const(), 0..now.len(), ahead(weight, next, steps_ahead))
                    }
                    Right::Blocks { start, .. } => {
                        // Of a block, with the steps that are in it.
                        let at = |block: usize, steps: &Range<usize>| {
                            let i = (first_column / WIDTH + block) * all_blocks + steps.start / depth;
                            (start.wrapping_add(i * P::COLUMNS), steps.start % depth..steps.start % depth + steps.len())
                        };
                        let (right, steps) = at(block, &now);
                        let next = match is_last {
                            false => at(block + 1, &now),
                            true => at(0, &in_block(now.end)),
                        };
                        (right, steps, packed_ahead::<P>(next, steps_ahead))
                    }
                };
                isa.vectorize(Block {
                    multiplier: &self.multiplier,
                    tiles: start,
                    rows,
                    columns: right,
                    steps: right_steps,
                    ahead,
                    on_the_way: self.on_the_way,
                    sums: self.sums(block, 0),
                    picked,
                    add: picked.is_some() || add || first > steps.start,
                    of: PhantomData::<(T, P)>,
                });
            }
            first = now.end;
        }
        (tiles * TILE * columns.len() * steps.len() * P::INNER) as u64
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

/// The memory of some steps of a packed block, to be read ahead in `steps` steps.
fn packed_ahead<P: Parts>((block, of): (*const f32, Range<usize>), steps: usize) -> Lines {
    const LINE: usize = 64;
    let start = block.wrapping_add(of.start * P::COUNT * TILE * WIDTH).cast();
    let lines = (of.len() * P::COUNT * STEP).div_ceil(LINE);
    Lines { start, stride: LINE, bytes: LINE, rows: lines.div_ceil(steps) }
}
