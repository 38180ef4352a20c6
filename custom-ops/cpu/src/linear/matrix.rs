//! A dense product on a bf16 matrix unit.
//!
//! Rows of x are split into bf16 terms once, for all workers. A worker takes a span of the weight's columns. It splits blocks of 32
//! columns and some inner indices, which stay in the first-level cache while all rows are multiplied with them, 32 at a time; the
//! span's sums stay in the second-level cache.

use crate::host::{Host, Unwritten};
use crate::isa::unit::{Lines, ROW_BYTES, TILE, TILE_BYTES, TileProduct};
use crate::isa::{Isa, Job, MAX_LANES, MatrixUnit, Multiplier};
use crate::terms::{load, part, split, terms};
use crate::workers::{Shared, share};
use moh_operators::linear::Problem;
use moh_operators::{Element, Error};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// Columns of a block of the product.
const WIDTH: usize = 2 * TILE;
/// Inner indices of a tile.
const INNER: usize = 2 * TILE;
/// Floats of a tile.
const TILE_FLOATS: usize = TILE_BYTES / size_of::<f32>();
/// Bytes between rows of a block of the weight, or of sums; and between its parts of [`INNER`] inner indices.
const STRIDE: usize = 2 * ROW_BYTES;
const STEP: usize = TILE * STRIDE;
/// Tiles along the inner dimension of a block of the weight: with three terms it takes half of a first-level cache. (Measured with
/// 256 rows, nanoseconds a tile product: 8.3, 7.5, 7.4, 8.9, 8.2, 7.8 for 2, 3, 4, 6, 8, 12; 6.2 without reading and writing sums.)
const DEPTH: usize = 4;
/// Rows that a worker multiplies at a time: their terms are read again for every span of columns.
const CHUNK: usize = 512;
/// Elements of x whose terms are in memory at a time, if they are of more than [`CHUNK`] rows.
const LEFT: usize = 512 << 10;
/// Elements of x that a worker splits at a time: to split fewer takes less time than to wake another.
const SPLIT: usize = 64 << 10;
/// Floats of a worker's sums, which stay in the second-level cache; and columns of a span at most.
const SUMS: usize = 256 << 10;
const SPAN: usize = 2048;
/// Spans for each worker where there are several: each reads the terms of all rows again.
const ITEMS_PER_WORKER: usize = 2;

/// The tensors of a call. Slice lengths have been validated against `problem`.
pub(super) struct Dense<'a, I, T> {
    pub(super) isa: I,
    pub(super) unit: MatrixUnit,
    pub(super) problem: &'a Problem,
    pub(super) x: &'a [T],
    pub(super) weight: &'a [T],
    pub(super) bias: Option<&'a [T]>,
    pub(super) output: Shared<T>,
}

impl<I: Isa, T: Element> Dense<'_, I, T> {
    /// Computes the output. Returns the number of multiply-accumulate operations; `None` if an element is not finite, and may
    /// have to be by the definition: an infinity is no sum of several terms.
    pub(super) fn run(&self, host: &dyn Host) -> Result<Option<u64>, Error> {
        let rows = self.problem.rows;
        let most = (LEFT / self.problem.width).max(CHUNK);
        let chunk = rows.div_ceil(rows.div_ceil(most).max(1)).next_multiple_of(WIDTH);
        let mut macs = 0;
        for start in (0..rows).step_by(chunk) {
            let rows = start..(start + chunk).min(rows);
            let done = match terms(T::FLOAT) {
                1 => self.chunk::<1>(rows, host),
                2 => self.chunk::<2>(rows, host),
                _ => self.chunk::<3>(rows, host),
            }?;
            let Some(done) = done else { return Ok(None) };
            macs += done;
        }
        Ok(Some(macs))
    }

    fn chunk<const TERMS: usize>(&self, rows: Range<usize>, host: &dyn Host) -> Result<Option<u64>, Error> {
        let (steps, tiles) = (self.problem.width.div_ceil(INNER), rows.len().div_ceil(TILE));
        let block = TERMS * DEPTH * TILE_FLOATS;
        let blocks = steps.div_ceil(DEPTH);
        let floats = tiles.saturating_mul(block).saturating_mul(blocks);
        let left = Unwritten::new::<f32>(host, floats)?;
        let packed = Shared(left.as_mut_ptr::<f32>());
        let width = self.problem.width;
        let split = |i: usize| {
            let start = rows.start + i * TILE;
            let input = &self.x[start * width..(start + TILE).min(rows.end) * width];
            // SAFETY: the memory has room for every tile in every block, and this one belongs to one item alone.
            let output = unsafe { { packed }.0.add(i * block) };
            self.isa.vectorize(PackRows::<T, TERMS> { input, width, block: tiles * block, output });
        };
        let each = (SPLIT / (TILE * width)).clamp(1, tiles);
        let items = |(): &mut (), item: usize| {
            (item * each..((item + 1) * each).min(tiles)).for_each(split);
            0
        };
        share(host, tiles.div_ceil(each), || Ok(()), items)?;
        let columns = self.problem.out_width;
        let groups = rows.len().div_ceil(CHUNK);
        // Pairs of tiles are not divided.
        let group = tiles.div_ceil(groups).next_multiple_of(2);
        let groups = tiles.div_ceil(group);
        let most = (SUMS / (group * TILE)).clamp(WIDTH, SPAN) / WIDTH;
        let wanted = match host.parallelism() {
            0 | 1 => 1,
            workers => (ITEMS_PER_WORKER * workers).div_ceil(groups),
        };
        let span = columns.div_ceil(WIDTH).div_ceil(wanted).clamp(1, most) * WIDTH;
        let spans = columns.div_ceil(span);
        let finite = AtomicBool::new(true);
        let make = || Workspace::new::<TERMS>(self.unit, group * TILE, span, host);
        let product = Product::<I, T, TERMS> { dense: self, rows: &rows, left: packed.0, steps, tiles };
        let product = &product;
        let macs = share(host, groups * spans, make, |workspace, item| {
            let (first, start) = (item / spans * group, item % spans * span);
            let (tiles, columns) = (first..(first + group).min(tiles), start..(start + span).min(columns));
            product.multiply(&tiles, &columns, workspace);
            if !product.store(&tiles, &columns, workspace) {
                finite.store(false, Ordering::Relaxed);
            }
            (tiles.len() * TILE * columns.len() * steps * INNER) as u64
        })?;
        Ok((TERMS == 1 || finite.into_inner()).then_some(macs))
    }
}

/// A worker's memory.
struct Workspace<'h> {
    multiplier: Multiplier,
    /// (terms, DEPTH, TILE, WIDTH) pairs.
    right: *mut f32,
    /// Per block of columns: (rows, WIDTH).
    sums: *mut f32,
    rows: usize,
    _floats: Unwritten<'h>,
}

impl<'h> Workspace<'h> {
    fn new<const TERMS: usize>(
        unit: MatrixUnit,
        rows: usize,
        span: usize,
        host: &'h dyn Host,
    ) -> Result<Workspace<'h>, Error> {
        let right = TERMS * DEPTH * TILE * WIDTH;
        let floats = Unwritten::new::<f32>(host, rows.saturating_mul(span).saturating_add(right))?;
        let start = floats.as_mut_ptr::<f32>();
        // SAFETY: the memory begins with the block of the weight.
        let sums = unsafe { start.add(right) };
        Ok(Workspace { multiplier: unit.start(), right: start, sums, rows, _floats: floats })
    }

    fn sums(&self, block: usize, row: usize) -> *mut f32 {
        // SAFETY: there are rows of sums for every block of columns.
        unsafe { self.sums.add((block * self.rows + row) * WIDTH) }
    }
}

/// The product of packed rows with the weight.
struct Product<'a, I, T, const TERMS: usize> {
    dense: &'a Dense<'a, I, T>,
    rows: &'a Range<usize>,
    /// Per block of inner indices: (tiles, terms, DEPTH) tiles.
    left: *const f32,
    steps: usize,
    tiles: usize,
}

// SAFETY: the packed rows are only read.
unsafe impl<I: Sync, T: Sync, const TERMS: usize> Sync for Product<'_, I, T, TERMS> {}

impl<I: Isa, T: Element, const TERMS: usize> Product<'_, I, T, TERMS> {
    /// The sums of some tiles of rows and a span of columns.
    fn multiply(&self, tiles: &Range<usize>, columns: &Range<usize>, workspace: &Workspace<'_>) {
        let Dense { isa, problem: p, weight, .. } = self.dense;
        let blocks = columns.len().div_ceil(WIDTH);
        let inner = |first: usize| first * INNER..p.width.min((first + DEPTH) * INNER);
        let at = |inner: usize, block: usize| {
            weight.as_ptr().wrapping_add(inner * p.out_width + columns.start + block * WIDTH)
        };
        let right = workspace.right;
        for first in (0..self.steps).step_by(DEPTH) {
            let (inner_now, steps) = (inner(first), DEPTH.min(self.steps - first));
            for block in 0..blocks {
                isa.vectorize(PackColumns::<T, TERMS> {
                    input: at(inner_now.start, block),
                    stride: p.out_width,
                    inner: inner_now.len(),
                    columns: WIDTH.min(columns.len() - block * WIDTH),
                    output: right,
                });
                let next = match block + 1 < blocks {
                    true => (inner_now.clone(), block + 1),
                    false => (inner(first + DEPTH), 0),
                };
                // Rows of the weight for each step.
                let each = next.0.len().div_ceil(tiles.len().div_ceil(2) * steps);
                for i in tiles.clone().step_by(2) {
                    let second = (i + 1).min(tiles.end - 1);
                    let product = TileProduct {
                        // SAFETY: there are `tiles` tiles of rows in every block.
                        a: [i, second].map(|i| unsafe {
                            self.left.add((first / DEPTH * self.tiles + i) * TERMS * DEPTH * TILE_FLOATS)
                        }),
                        b: right,
                        b_stride: STRIDE,
                        b_step: STEP,
                        terms: TERMS,
                        term_strides: [DEPTH * TILE_BYTES, DEPTH * STEP],
                        steps,
                        c: [i, second].map(|i| workspace.sums(block, (i - tiles.start) * TILE)),
                        c_stride: STRIDE,
                        add: first > 0,
                        ahead: Lines {
                            start: at(next.0.start + (i - tiles.start) / 2 * steps * each, next.1).cast(),
                            stride: p.out_width * size_of::<T>(),
                            bytes: WIDTH * size_of::<T>(),
                            rows: each,
                        },
                    };
                    // SAFETY: the sections have these sizes; inner indices and columns are padded to whole tiles.
                    unsafe {
                        match second > i {
                            true => workspace.multiplier.multiply::<true>(&product),
                            false => workspace.multiplier.multiply::<false>(&product),
                        }
                    }
                }
            }
        }
    }

    /// Writes these rows and columns of the output. Returns false if an element is not finite.
    fn store(&self, tiles: &Range<usize>, columns: &Range<usize>, workspace: &Workspace<'_>) -> bool {
        let Dense { isa, problem: p, bias, output, .. } = *self.dense;
        isa.vectorize(StoreRows {
            sums: workspace.sums(0, 0),
            block: workspace.rows * WIDTH,
            bias: bias.map(|bias| bias[columns.start..].as_ptr()),
            // SAFETY: the output has `out_width` elements for every row.
            output: unsafe { output.0.add((self.rows.start + tiles.start * TILE) * p.out_width + columns.start) },
            stride: p.out_width,
            rows: (tiles.end * TILE).min(self.rows.len()) - tiles.start * TILE,
            columns: columns.len(),
        })
    }
}

/// Splits up to [`TILE`] rows of `width` elements into (TERMS, DEPTH) tiles for every block of inner indices, `block` floats apart. What
/// is left of the tiles is 0.
///
/// Contract of the constructor: vectors have [`MAX_LANES`] lanes; with one term, elements have 16 bits; `output` is valid for
/// writing.
struct PackRows<'a, T, const TERMS: usize> {
    input: &'a [T],
    width: usize,
    block: usize,
    output: *mut f32,
}

impl<T: Element, const TERMS: usize> Job for PackRows<'_, T, TERMS> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let rows = self.input.len() / self.width;
        for step in 0..self.width.div_ceil(INNER) {
            let start = step / DEPTH * self.block + step % DEPTH * TILE_FLOATS;
            for row in 0..TILE {
                let mut terms = [isa.splat(0.0); TERMS];
                // SAFETY: the constructor's contract; there are `width` elements from the row's first on.
                unsafe {
                    if row < rows {
                        let x = self.input.as_ptr().add(row * self.width + step * INNER);
                        terms = load(isa, x, self.width - step * INNER);
                    }
                    for (term, vector) in terms.into_iter().enumerate() {
                        isa.store(self.output.add(start + term * DEPTH * TILE_FLOATS + row * TILE), vector);
                    }
                }
            }
        }
    }
}

/// Splits up to [`WIDTH`] columns of a weight into (TERMS, DEPTH, TILE, WIDTH) pairs: inner indices are paired as in [`PackRows`]. What
/// is left of the last step and of the columns is 0.
///
/// Contract of the constructor: as of [`PackRows`]; `input` is valid for reading `inner` rows of `columns` elements, `stride` apart.
struct PackColumns<T, const TERMS: usize> {
    input: *const T,
    stride: usize,
    inner: usize,
    columns: usize,
    output: *mut f32,
}

impl<T: Element, const TERMS: usize> Job for PackColumns<T, TERMS> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        for step in 0..self.inner.div_ceil(INNER) {
            for pair in 0..TILE {
                let first = step * INNER + if TERMS > 1 { pair } else { 2 * pair };
                let second = first + if TERMS > 1 { TILE } else { 1 };
                for column in [0, MAX_LANES] {
                    let n = self.columns.saturating_sub(column).min(MAX_LANES);
                    let at = |inner: usize| match inner < self.inner {
                        // SAFETY: the constructor's contract.
                        true => unsafe { part(isa, self.input.wrapping_add(inner * self.stride + column), n) },
                        false => isa.splat(0.0),
                    };
                    let terms: [_; TERMS] = split(isa, at(first), at(second));
                    for (term, vector) in terms.into_iter().enumerate() {
                        let place = ((term * DEPTH + step) * TILE + pair) * WIDTH + column;
                        // SAFETY: the constructor's contract.
                        unsafe { isa.store(self.output.add(place), vector) }
                    }
                }
            }
        }
    }
}

/// Writes rows of sums, plus the bias, to an output. Returns false if an element is not finite.
///
/// Contract of the constructor: the sums are valid for reading `rows` rows of [`WIDTH`] floats for every block of columns, blocks
/// `block` floats apart; the bias for reading and the outputs, `stride` apart, for writing `columns` elements.
struct StoreRows<T> {
    sums: *const f32,
    block: usize,
    bias: Option<*const T>,
    output: *mut T,
    stride: usize,
    rows: usize,
    columns: usize,
}

impl<T: Element> Job for StoreRows<T> {
    type Output = bool;

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> bool {
        let mut zero = isa.splat(0.0);
        for row in 0..self.rows {
            for column in (0..self.columns).step_by(I::LANES) {
                let n = (self.columns - column).min(I::LANES);
                // SAFETY: the constructor's contract; column + n <= columns.
                unsafe {
                    let mut sum = isa.load(self.sums.add(column / WIDTH * self.block + row * WIDTH + column % WIDTH));
                    if let Some(bias) = self.bias {
                        sum = isa.add(sum, part(isa, bias.add(column), n));
                    }
                    zero = isa.add(zero, isa.sub(sum, sum));
                    let output = self.output.add(row * self.stride + column);
                    match n == I::LANES {
                        true => isa.narrow(output, sum),
                        false => isa.narrow_part(output, sum, n),
                    }
                }
            }
        }
        isa.sum(zero) == 0.0
    }
}
