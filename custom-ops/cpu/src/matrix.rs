//! Products of rows with a weight on a matrix unit.
//!
//! Numbers are split into [`Parts`]: [`Terms`] of bf16, as many as their type needs, or [`Digits`] of base 256. A worker splits blocks of 32
//! columns of the weight and some inner indices, which stay in the first-level cache while all rows are multiplied with them, 32 at a
//! time; the sums stay in the second-level cache.

mod digits;
mod store;
mod terms;

use crate::epilogue::OfRow;
use crate::gemm::Matrix;
use crate::host::{Host, Unwritten};
use crate::isa::unit::{Lines, ROW_BYTES, TILE, TILE_BYTES};
use crate::isa::{Isa, Job, MAX_LANES, MatrixUnit, Multiplier};
use crate::terms::{part, terms as exact};
pub(crate) use digits::Digits;
use moh_operators::{Element, Error, Float};
use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;
use store::StoreRows;
pub(crate) use terms::Terms;

/// Columns of a block of the product.
pub(crate) const WIDTH: usize = 2 * TILE;
/// Tiles of all parts along the inner dimension of a block of the weight, at most: they take half of a first-level cache. (Measured with 256 rows
/// and three bf16 terms, nanoseconds a tile product: 8.3, 7.5, 7.4, 8.9, 8.2, 7.8 for 2, 3, 4, 6, 8, 12 of each; 6.2 without reading and writing
/// sums. With digits: 11.9, 11.1, 11.2 for 2, 4, 8. With one term and 384 inner indices: 12.0, 10.4, 10.3 for 4, 8, 12; with 1152: 13.4, 11.2,
/// 12.7 for 4, 8, 12.)
const TILES: usize = 12;
/// Rows that a worker multiplies at a time: their terms are read again for every block of columns.
pub(crate) const ROWS: usize = 512;
/// Floats of a tile.
const TILE_FLOATS: usize = TILE_BYTES / size_of::<f32>();
/// Bytes between rows of a block of the weight, or of sums; and between its parts of [`INNER`] inner indices.
const STRIDE: usize = 2 * ROW_BYTES;
const STEP: usize = TILE * STRIDE;
/// Numbers of a word at most.
pub(crate) const MOST: usize = 4;
/// Floats of a worker's sums, which stay in the second-level cache; and columns of a span at most.
const SUMS: usize = 256 << 10;
const SPAN: usize = 2048;

/// Columns of a span, a multiple of [`WIDTH`], for cutting `columns` columns into work items, `others` of which have the same columns and
/// other rows: `rows`, at most. An item takes as long as its blocks of columns and `fixed` more.
pub(crate) fn span(columns: usize, rows: usize, others: usize, workers: usize, fixed: f32) -> usize {
    let blocks = columns.div_ceil(WIDTH).max(1);
    let most = ((SUMS / rows.next_multiple_of(2 * TILE).max(1)).clamp(WIDTH, SPAN) / WIDTH).min(blocks);
    // Until the last worker ends; workers are not equally fast, so the last item may begin late.
    let time = |span: usize| {
        let rounds = (others * blocks.div_ceil(span)).div_ceil(workers.max(1));
        let late = if workers > 1 { span as f32 / 4.0 } else { 0.0 };
        rounds as f32 * (span as f32 + fixed) + late
    };
    let best = (1..=most).rev().min_by(|&a, &b| time(a).total_cmp(&time(b)));
    best.unwrap_or(1) * WIDTH
}

/// How numbers are split for a matrix unit.
pub(crate) trait Parts: Sized {
    /// Parts of a number.
    const COUNT: usize;
    /// Inner indices of a tile.
    const INNER: usize;
    /// Tiles along the inner dimension of a block of the weight, at most.
    const DEPTH: usize = TILES / Self::COUNT;
    /// Floats of a tile of rows in one block of inner indices.
    const ROWS: usize;
    /// Floats of a block of the weight.
    const COLUMNS: usize;
    /// Floats of the sums of two tiles of rows, on their way.
    const SUMS: usize;

    /// See [`PackRows`].
    fn pack_rows<I: Isa, T: Element, F: Fn(usize) -> *const T>(isa: I, rows: &PackRows<T, F, Self>) -> bool;
    /// See [`PackColumns`].
    fn pack_columns<I: Isa, T: Element>(isa: I, columns: &PackColumns<T, Self>) -> bool;

    /// Numbers of a block of a float32 weight, in a vector of columns from `column` on: as many as a word has, of inner index `word` of a step
    /// and of those [`TILE`] after the other. In units of [`Parts::unit`].
    ///
    /// # Safety
    /// [`PackColumns`] has made the block; it has the step and the columns. Vectors have [`MAX_LANES`] lanes.
    unsafe fn numbers<I: Isa>(isa: I, block: *const f32, step: usize, word: usize, column: usize) -> [I::V; MOST];
    /// What a block's numbers are multiples of, in the same columns.
    ///
    /// # Safety
    /// As of [`Parts::numbers`].
    unsafe fn unit<I: Isa>(isa: I, block: *const f32, column: usize) -> I::V;

    /// Multiplies one or two tiles of rows with a block of the weight.
    ///
    /// # Safety
    /// The tiles are those that [`PackRows`] and [`PackColumns`] have made of `T`; `on_the_way` has room for [`Parts::SUMS`] floats, and
    /// there are sums for all rows.
    unsafe fn multiply<I: Isa, T: Element>(
        isa: I,
        multiplier: &Multiplier,
        tiles: &Tiles,
        on_the_way: *mut f32,
        sums: &Sums<'_>,
    );
}

/// Evaluates `body` with the type `P` of the parts that numbers of `T` are split into at a precision.
macro_rules! with_parts {
    ($T:ty, $precision:expr, |$P:ident| $body:expr) => {{
        use crate::matrix::{Digits, Terms};
        match (<$T>::FLOAT, crate::terms::terms_at($precision, <$T>::FLOAT)) {
            (_, 1) => {
                type $P = Terms<1>;
                $body
            }
            (moh_operators::Float::F32, 2) => {
                type $P = Digits<2>;
                $body
            }
            (_, 2) => {
                type $P = Terms<2>;
                $body
            }
            _ => {
                type $P = Digits<3>;
                $body
            }
        }
    }};
}
pub(crate) use with_parts;

/// Tiles for all of a block of inner indices.
pub(crate) struct Tiles {
    /// Of the rows; the second may be the first again.
    rows: [*const f32; 2],
    /// Of the weight.
    columns: *const f32,
    /// Tiles along the inner dimension.
    steps: usize,
    ahead: Lines,
}

impl Tiles {
    fn are_two(&self) -> bool {
        self.rows[0] != self.rows[1]
    }
}

/// Where a product of two tiles of rows goes.
pub(crate) struct Sums<'a> {
    /// [`WIDTH`] floats for every row of the tiles, those that pad them included, or for every one that can be picked.
    start: *mut f32,
    rows: usize,
    picked: Option<&'a [u32]>,
    add: bool,
}

/// Tiles along the inner dimension of blocks of `inner` inner indices: blocks are of equal depth.
pub(crate) fn depth<P: Parts>(inner: usize) -> usize {
    let steps = inner.div_ceil(P::INNER);
    steps.div_ceil(steps.div_ceil(P::DEPTH).max(1)).max(1)
}

/// Blocks that `inner` inner indices are cut into.
pub(crate) fn blocks<P: Parts>(inner: usize) -> usize {
    inner.div_ceil(P::INNER).div_ceil(depth::<P>(inner))
}

/// Splits up to [`TILE`] rows of `width` elements into [`Parts::ROWS`] floats for every block of inner indices, `block` floats apart. What is left
/// of the tiles is 0. Returns whether all numbers were finite that had to be.
///
/// Contract of the constructor: vectors have [`crate::isa::MAX_LANES`] lanes; bf16 has one term; `input(row)` is valid for reading `width` elements,
/// `output` for writing.
pub(crate) struct PackRows<T, F: Fn(usize) -> *const T, P> {
    pub(crate) rows: usize,
    pub(crate) input: F,
    pub(crate) width: usize,
    pub(crate) block: usize,
    pub(crate) output: *mut f32,
    pub(crate) parts: PhantomData<P>,
}

impl<T: Element, F: Fn(usize) -> *const T, P: Parts> Job for PackRows<T, F, P> {
    type Output = bool;

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> bool {
        P::pack_rows(isa, &self)
    }
}

/// Splits up to [`WIDTH`] columns of a weight into [`Parts::COLUMNS`] floats: rows of [`WIDTH`] columns, of (parts, [`Parts::DEPTH`], [`TILE`]). What
/// is left of the last step and of the columns is 0. Returns what [`PackRows`] does.
///
/// Contract of the constructor: as of [`PackRows`]; `input` is valid for reading `inner` rows of `columns` elements, `stride` apart.
pub(crate) struct PackColumns<T, P> {
    input: *const T,
    stride: usize,
    inner: usize,
    columns: usize,
    /// Whether inner indices that are multiplied together are neighbours; else they are [`TILE`] apart.
    neighbours: bool,
    output: *mut f32,
    parts: PhantomData<P>,
}

impl<T: Element, P> PackColumns<T, P> {
    /// Row `inner` of the columns from `column` on, of at most as many as a vector has lanes.
    #[inline(always)]
    fn at<I: Isa>(&self, isa: I, inner: usize, column: usize) -> I::V {
        let n = self.columns.saturating_sub(column).min(MAX_LANES);
        match inner < self.inner {
            // SAFETY: the constructor's contract.
            true => unsafe { part(isa, self.input.wrapping_add(inner * self.stride + column), n) },
            false => isa.splat(0.0),
        }
    }
}

impl<T: Element, P: Parts> Job for PackColumns<T, P> {
    type Output = bool;

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> bool {
        P::pack_columns(isa, &self)
    }
}

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
        let all_blocks = self::blocks::<P>(inner.len());
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

/// Splits a block of the weight. Returns whether all numbers were finite that had to be.
///
/// # Safety
/// The weight has these inner indices and columns, at most DEPTH * INNER and WIDTH; `output` is valid for writing [`Parts::COLUMNS`] floats,
/// `dense` for as many floats as numbers. Vectors have [`crate::isa::MAX_LANES`] lanes.
unsafe fn pack_block<I: Isa, T: Element, P: Parts>(
    isa: I,
    weight: &Matrix<T>,
    inner: Range<usize>,
    columns: Range<usize>,
    dense: *mut f32,
    output: *mut f32,
) -> bool {
    let (count, width) = (inner.len(), columns.len());
    let neighbours = T::FLOAT == Float::BF16;
    match *weight {
        Matrix::Columns { stride, .. } => isa.vectorize(PackColumns {
            input: weight.at(inner.start, &columns),
            stride,
            inner: count,
            columns: width,
            neighbours,
            output,
            parts: PhantomData::<P>,
        }),
        Matrix::Rows { .. } => {
            // SAFETY: the caller's contract; there is room for DEPTH * INNER rows of WIDTH floats.
            unsafe { weight.pack(isa, inner, columns, dense, WIDTH) };
            isa.vectorize(PackColumns {
                input: dense.cast_const(),
                stride: WIDTH,
                inner: count,
                columns: width,
                neighbours,
                output,
                parts: PhantomData::<P>,
            })
        }
    }
}

/// Floats of all blocks of a matrix of (inner indices, columns); `None` if they overflow the address space.
pub(crate) fn floats<P: Parts>([inner, columns]: [usize; 2]) -> Option<usize> {
    columns.div_ceil(WIDTH).checked_mul(blocks::<P>(inner))?.checked_mul(P::COLUMNS)
}

/// Splits a matrix of (inner indices, columns): for [`WIDTH`] columns after the other, its blocks one after the other. Returns false if it has numbers that are
/// not finite and have to be.
///
/// # Safety
/// The weight has these inner indices and columns, of one block; `output` is valid for writing [`floats`]. Vectors have
/// [`crate::isa::MAX_LANES`] lanes.
pub(crate) unsafe fn pack_all<I: Isa, T: Element, P: Parts>(
    isa: I,
    weight: &Matrix<T>,
    [inner, columns]: [usize; 2],
    output: *mut f32,
) -> bool {
    let (blocks, depth) = (blocks::<P>(inner), depth::<P>(inner) * P::INNER);
    let mut dense = vec![0.0f32; P::DEPTH * P::INNER * WIDTH];
    let mut finite = true;
    for (i, column) in (0..columns).step_by(WIDTH).enumerate() {
        let columns = column..columns.min(column + WIDTH);
        for (block, start) in (0..inner).step_by(depth).enumerate() {
            let inner = start..inner.min(start + depth);
            // SAFETY: the caller's contract; there is room for every block.
            unsafe {
                let output = output.add((i * blocks + block) * P::COLUMNS);
                finite &= pack_block::<I, T, P>(isa, weight, inner, columns.clone(), dense.as_mut_ptr(), output);
            }
        }
    }
    finite
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

#[cfg(test)]
mod tests {
    use super::{WIDTH, span};

    /// Of `workers` workers, how many items of equal length keep busy on average.
    fn busy(columns: usize, rows: usize, others: usize, workers: usize) -> f32 {
        let items = others * columns.div_ceil(span(columns, rows, others, workers, 0.5));
        items as f32 / items.div_ceil(workers) as f32
    }

    #[test]
    fn few_and_many_workers_are_kept_busy() {
        assert_eq!(span(1024, 256, 1, 1, 0.5), 1024, "as wide as the sums permit");
        assert_eq!(span(1152, 256, 1, 1, 0.5), 576, "of two spans, none is short");
        for (columns, rows, others) in [(4608, 256, 1), (1152, 512, 32), (2048, 16, 1), (384, 256, 1)] {
            assert_eq!(busy(columns, rows, others, 2), 2.0, "{columns} columns");
            for workers in [16, 64, 128] {
                let most = (columns / WIDTH * others).min(workers) as f32;
                let busy = busy(columns, rows, others, workers);
                assert!(busy >= 0.5 * most, "{columns} columns, {others} others: {busy} of {workers}");
            }
        }
    }
}
