//! A dense product on a matrix unit. Rows of x are split into terms once, for all workers; a worker takes a span of the weight's columns.

use crate::epilogue::Epilogue;
use crate::gemm::Matrix;
use crate::host::{Host, Unwritten};
use crate::isa::unit::TILE;
use crate::isa::{Isa, MatrixUnit};
use crate::kernel::WeightData;
use crate::matrix::{self, Left, PackRows, Parts, Product, ROWS, Right, WIDTH, Worker, with_parts};
use crate::workers::{Shared, share};
use moh_operators::linear::Problem;
use moh_operators::{Element, Error};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// Elements of x whose terms are in memory at a time for so many workers, if they are of more than [`ROWS`] rows.
const LEFT: usize = 512 << 10;
const WORKERS: usize = 8;
/// Elements of x that a worker splits at a time: to split fewer takes less time than to wake another.
const SPLIT: usize = 64 << 10;
/// What an item takes besides its columns, in blocks of them: it reads the terms of all rows from another cache.
const FIXED: f32 = 0.5;

/// The tensors of a call. Slice lengths have been validated against `problem`.
pub(super) struct Dense<'a, I, T> {
    pub(super) isa: I,
    pub(super) unit: MatrixUnit,
    pub(super) problem: &'a Problem,
    pub(super) x: &'a [T],
    pub(super) weight: WeightData<'a, T>,
    pub(super) bias: Option<&'a [T]>,
    pub(super) epilogue: Epilogue<'a, T>,
    pub(super) output: Shared<T>,
}

impl<I: Isa, T: Element> Dense<'_, I, T> {
    /// Computes the output. Returns the number of multiply-accumulate operations; `None` if the weight is packed otherwise, or if an element is
    /// not finite, and may have to be by the definition: an infinity is no sum of several terms.
    pub(super) fn run(&self, host: &dyn Host) -> Result<Option<u64>, Error> {
        let rows = self.problem.rows;
        if rows == 0 {
            return Ok(Some(0));
        }
        let most = (LEFT * host.parallelism().div_ceil(WORKERS) / self.problem.width).max(ROWS);
        let chunk = rows.div_ceil(rows.div_ceil(most)).next_multiple_of(WIDTH);
        let mut macs = 0;
        for start in (0..rows).step_by(chunk) {
            let rows = start..(start + chunk).min(rows);
            let done = with_parts!(T, host.precision(), |P| self.chunk::<P>(rows, host))?;
            let Some(done) = done else { return Ok(None) };
            macs += done;
        }
        Ok(Some(macs))
    }

    fn chunk<P: Parts>(&self, rows: Range<usize>, host: &dyn Host) -> Result<Option<u64>, Error> {
        let (width, columns) = (self.problem.width, self.problem.out_width);
        let matrix;
        let weight = match (self.weight.blocks::<P>([width, columns]), self.weight.plain()) {
            (Some(start), _) => &Right::Blocks { start, inner: width },
            (None, Some(weight)) => {
                matrix = self::matrix(self.problem, weight);
                &Right::Matrix(&matrix)
            }
            (None, None) => return Ok(None),
        };
        let tiles = rows.len().div_ceil(TILE);
        let left =
            Unwritten::new::<f32>(host, tiles.saturating_mul(P::ROWS).saturating_mul(matrix::blocks::<P>(width)))?;
        let packed = Shared(left.as_mut_ptr::<f32>());
        let finite = AtomicBool::new(true);
        let split = |i: usize| {
            let start = rows.start + i * TILE;
            let is_finite = self.isa.vectorize(PackRows {
                rows: (rows.end - start).min(TILE),
                input: |row: usize| self.x[(start + row) * width..].as_ptr(),
                width,
                lead: 0,
                block: tiles * P::ROWS,
                // SAFETY: the memory has room for every tile in every block, and this one belongs to one item alone.
                output: unsafe { { packed }.0.add(i * P::ROWS) },
                parts: PhantomData::<P>,
            });
            finite.fetch_and(is_finite, Ordering::Relaxed);
        };
        let each = (SPLIT / (TILE * width)).clamp(1, tiles);
        let items = |(): &mut (), item: usize| {
            (item * each..((item + 1) * each).min(tiles)).for_each(split);
            0
        };
        share(host, tiles.div_ceil(each), || Ok(()), items)?;
        // Pairs of tiles are not divided.
        let group = tiles.div_ceil(rows.len().div_ceil(ROWS)).next_multiple_of(2);
        let groups = tiles.div_ceil(group);
        let span = matrix::span(columns, group * TILE, groups, host.parallelism(), FIXED);
        let spans = columns.div_ceil(span);
        let make = || Worker::<P>::new(self.unit, [group * TILE, 0], span, host);
        let macs = share(host, groups * spans, make, |worker, item| {
            let (first, start) = (item / spans * group, item % spans * span);
            let columns = start..(start + span).min(columns);
            let rows = rows.start + first * TILE..rows.end.min(rows.start + (first + group) * TILE);
            let product = Product {
                // SAFETY: there are tiles for all rows of the chunk.
                left: Left::Tiles { start: unsafe { { packed }.0.add(first * P::ROWS) }, block: tiles * P::ROWS },
                rows: rows.len(),
                weight,
                inner: 0..width,
                columns: columns.clone(),
                picked: None,
                add: false,
            };
            let bias = self.bias.map(|bias| bias[columns.clone()].as_ptr());
            // SAFETY: the output has `out_width` elements for every row.
            let output = |row: usize| unsafe {
                { self.output }.0.add((rows.start + row) * self.problem.out_width + columns.start)
            };
            // SAFETY: the weight has these columns, and the tiles its inner indices.
            let macs = unsafe { worker.multiply(self.isa, &product) };
            let epilogue = |row: usize| self.epilogue.of_row(rows.start + row, columns.start);
            // SAFETY: the output has these columns for every row, which belong to this item alone; so do bias and epilogue.
            unsafe { worker.store(self.isa, rows.len(), (0, columns.len()), bias, epilogue, output) };
            finite.fetch_and(worker.is_finite(), Ordering::Relaxed);
            macs
        })?;
        Ok(finite.into_inner().then_some(macs))
    }
}

/// The weight as a matrix.
pub(super) fn matrix<T: Element>(problem: &Problem, weight: &[T]) -> Matrix<T> {
    let columns = problem.out_width;
    Matrix::Columns { data: weight.as_ptr(), stride: columns, block: columns, block_stride: 0 }
}
