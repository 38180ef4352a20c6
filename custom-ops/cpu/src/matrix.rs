//! Products of rows with a weight on a bf16 matrix unit.
//!
//! Numbers are split into as many bf16 terms as their type needs. A worker splits blocks of 32 columns of the weight and some inner
//! indices, which stay in the first-level cache while all rows are multiplied with them, 32 at a time; the sums stay in the
//! second-level cache.

mod pack;
mod store;

use crate::gemm::Matrix;
use crate::host::{Host, Unwritten};
use crate::isa::unit::{Lines, ROW_BYTES, TILE, TILE_BYTES, TileProduct};
use crate::isa::{Isa, MatrixUnit, Multiplier};
use crate::terms::terms as exact;
use moh_operators::{Element, Error, Float};
use pack::PackColumns;
pub(crate) use pack::PackRows;
use std::cell::Cell;
use std::ops::Range;
use store::{AddRows, StoreRows};

/// Columns of a block of the product.
pub(crate) const WIDTH: usize = 2 * TILE;
/// Inner indices of a tile.
pub(crate) const INNER: usize = 2 * TILE;
/// Tiles along the inner dimension of a block of the weight: with three terms it takes half of a first-level cache. (Measured with
/// 256 rows, nanoseconds a tile product: 8.3, 7.5, 7.4, 8.9, 8.2, 7.8 for 2, 3, 4, 6, 8, 12; 6.2 without reading and writing sums.)
pub(crate) const DEPTH: usize = 4;
/// Rows that a worker multiplies at a time: their terms are read again for every block of columns.
pub(crate) const ROWS: usize = 512;
/// Floats of a tile.
const TILE_FLOATS: usize = TILE_BYTES / size_of::<f32>();
/// Bytes between rows of a block of the weight, or of sums; and between its parts of [`INNER`] inner indices.
const STRIDE: usize = 2 * ROW_BYTES;
const STEP: usize = TILE * STRIDE;
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

/// Floats of a tile of rows in one block of inner indices.
pub(crate) const fn tile_floats(terms: usize) -> usize {
    terms * DEPTH * TILE_FLOATS
}

/// Rows of a product.
pub(crate) enum Left<'a, T> {
    /// Tiles that [`PackRows`] has made, for all inner indices of the weight from 0 on; `block` floats are between blocks of inner
    /// indices.
    Tiles { start: *const f32, block: usize },
    /// A pointer to inner index 0 of each row.
    Rows(&'a [*const T]),
}

/// Rows and a part of the weight.
pub(crate) struct Product<'a, T> {
    pub(crate) left: Left<'a, T>,
    /// At least one.
    pub(crate) rows: usize,
    pub(crate) weight: &'a Matrix<T>,
    pub(crate) inner: Range<usize>,
    /// If columns of the weight lie in blocks, of one of them.
    pub(crate) columns: Range<usize>,
    /// The sums that belong to the rows, if they are not the first ones.
    pub(crate) picked: Option<&'a [u32]>,
    /// Whether it is added to the sums; they are undefined otherwise. With `picked` it is.
    pub(crate) add: bool,
}

/// A worker's memory.
pub(crate) struct Worker<'h> {
    multiplier: Multiplier,
    /// (terms, DEPTH, TILE, WIDTH) pairs: a block of the weight.
    right: *mut f32,
    /// The same block as floats, (DEPTH * INNER, WIDTH), if it has to be transposed.
    dense: *mut f32,
    /// Sums of two tiles of rows, on their way to those that were picked.
    picked: *mut f32,
    /// Per block of columns: (rows, WIDTH).
    sums: *mut f32,
    rows: usize,
    /// Tiles of the rows of [`Left::Rows`].
    left: *mut f32,
    /// Whether all numbers were finite that had to be.
    finite: Cell<bool>,
    _floats: Unwritten<'h>,
}

impl<'h> Worker<'h> {
    /// Memory for up to `rows` rows, of which `split` are split by the worker, and `columns` columns.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(crate) fn new<const TERMS: usize>(
        unit: MatrixUnit,
        [rows, split]: [usize; 2],
        columns: usize,
        host: &'h dyn Host,
    ) -> Result<Worker<'h>, Error> {
        let (rows, columns) = (rows.next_multiple_of(2 * TILE), columns.next_multiple_of(WIDTH));
        let right = TERMS * DEPTH * TILE * WIDTH;
        let (dense, picked) = (DEPTH * INNER * WIDTH, 2 * TILE * WIDTH);
        let left = split.div_ceil(TILE).saturating_mul(tile_floats(TERMS));
        let sums = rows.saturating_mul(columns);
        let floats = Unwritten::new::<f32>(host, (right + dense + picked).saturating_add(sums).saturating_add(left))?;
        let start = floats.as_mut_ptr::<f32>();
        // SAFETY: the sections follow each other in memory of their sizes.
        unsafe {
            let (dense, picked, sums) = (start.add(right), start.add(right + dense), start.add(right + dense + picked));
            let left = sums.add(rows * columns);
            Ok(Worker {
                multiplier: unit.start(),
                right: start,
                dense,
                picked,
                sums,
                rows,
                left,
                finite: Cell::new(true),
                _floats: floats,
            })
        }
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

    /// Writes the sums of the first rows and columns, plus the bias, to the rows of the output.
    ///
    /// # Safety
    /// There are so many sums; the bias is valid for reading, `output(row)` for writing `columns` elements.
    pub(crate) unsafe fn store<I: Isa, T: Element>(
        &self,
        isa: I,
        [rows, columns]: [usize; 2],
        bias: Option<*const T>,
        output: impl Fn(usize) -> *mut T,
    ) {
        let stored = StoreRows { sums: self.sums, block: self.rows * WIDTH, bias, output, rows, columns };
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
    pub(crate) unsafe fn multiply<I: Isa, T: Element, const TERMS: usize>(
        &self,
        isa: I,
        product: &Product<'_, T>,
    ) -> u64 {
        let Product { ref left, rows, weight, ref inner, ref columns, picked, add } = *product;
        let (tiles, blocks) = (rows.div_ceil(TILE), columns.len().div_ceil(WIDTH));
        let steps = inner.len().div_ceil(INNER);
        // Blocks of equal depth; tiles that are there already have the depth that they were made for.
        let depth = match left {
            Left::Tiles { .. } => DEPTH,
            Left::Rows(_) => steps.div_ceil(steps.div_ceil(DEPTH).max(1)).max(1),
        };
        let inner_of = |first: usize| {
            (inner.start + first * INNER).min(inner.end)..inner.end.min(inner.start + (first + depth) * INNER)
        };
        let columns_of =
            |block: usize| columns.start + block * WIDTH..columns.end.min(columns.start + (block + 1) * WIDTH);
        for first in (0..steps).step_by(depth) {
            let (inner_now, steps_now) = (inner_of(first), depth.min(steps - first));
            let start = match *left {
                // SAFETY: there are tiles for every block of inner indices.
                Left::Tiles { start, block } => unsafe { start.add(first / DEPTH * block) },
                Left::Rows(rows) => {
                    for (i, rows) in rows.chunks(TILE).enumerate() {
                        self.see(isa.vectorize(PackRows::<T, _, TERMS> {
                            rows: rows.len(),
                            input: |row: usize| rows[row].wrapping_add(inner_now.start),
                            width: inner_now.len(),
                            block: 0,
                            // SAFETY: there is room for all rows.
                            output: unsafe { self.left.add(i * tile_floats(TERMS)) },
                        }));
                    }
                    self.left.cast_const()
                }
            };
            for block in 0..blocks {
                // SAFETY: the caller's contract; the memory has room for a block.
                unsafe { self.pack_columns::<I, T, TERMS>(isa, weight, inner_now.clone(), columns_of(block)) };
                let next = match block + 1 < blocks {
                    true => (inner_now.clone(), columns_of(block + 1)),
                    false => (inner_of(first + depth), columns_of(0)),
                };
                let mut ahead = ahead(weight, next, tiles.div_ceil(2) * steps_now);
                for i in (0..tiles).step_by(2) {
                    let second = (i + 1).min(tiles - 1);
                    let c = match picked {
                        None => [i, second].map(|i| self.sums(block, i * TILE)),
                        // SAFETY: two tiles.
                        Some(_) => [0, second - i].map(|i| unsafe { self.picked.add(i * TILE * WIDTH) }),
                    };
                    let product = TileProduct {
                        // SAFETY: there are `tiles` tiles of rows in the block.
                        a: [i, second].map(|i| unsafe { start.add(i * tile_floats(TERMS)) }),
                        b: self.right,
                        b_stride: STRIDE,
                        b_step: STEP,
                        terms: TERMS,
                        rough: TERMS < exact(T::FLOAT),
                        term_strides: [DEPTH * TILE_BYTES, DEPTH * STEP],
                        steps: steps_now,
                        c,
                        c_stride: STRIDE,
                        add: picked.is_none() && (add || first > 0),
                        ahead,
                    };
                    // SAFETY: the sections have these sizes; inner indices and columns are padded to whole tiles.
                    unsafe {
                        match second > i {
                            true => self.multiplier.multiply::<true>(&product),
                            false => self.multiplier.multiply::<false>(&product),
                        }
                    }
                    ahead.start = ahead.start.wrapping_add(steps_now * ahead.rows * ahead.stride);
                    if let Some(picked) = picked {
                        let picked = &picked[i * TILE..rows.min((i + 2) * TILE)];
                        isa.vectorize(AddRows { input: self.picked, picked, sums: self.sums(block, 0) });
                    }
                }
            }
        }
        (tiles * TILE * columns.len() * steps * INNER) as u64
    }

    /// Splits a block of the weight.
    ///
    /// # Safety
    /// As of [`Worker::multiply`]; at most DEPTH * INNER inner indices and WIDTH columns.
    unsafe fn pack_columns<I: Isa, T: Element, const TERMS: usize>(
        &self,
        isa: I,
        weight: &Matrix<T>,
        inner: Range<usize>,
        columns: Range<usize>,
    ) {
        let (output, count, width) = (self.right, inner.len(), columns.len());
        let neighbours = T::FLOAT == Float::BF16;
        self.see(match *weight {
            Matrix::Columns { stride, .. } => {
                let input = weight.at(inner.start, &columns);
                isa.vectorize(PackColumns::<T, TERMS> {
                    input,
                    stride,
                    inner: count,
                    columns: width,
                    neighbours,
                    output,
                })
            }
            Matrix::Rows { .. } => {
                // SAFETY: the caller's contract; there is room for DEPTH * INNER rows of WIDTH floats.
                unsafe { weight.pack(isa, inner, columns, self.dense, WIDTH) };
                let (input, stride) = (self.dense.cast_const(), WIDTH);
                isa.vectorize(PackColumns::<f32, TERMS> {
                    input,
                    stride,
                    inner: count,
                    columns: width,
                    neighbours,
                    output,
                })
            }
        })
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
