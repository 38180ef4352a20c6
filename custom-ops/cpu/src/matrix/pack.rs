//! Splits rows and weights into parts, in the order in which a unit reads them.

use super::{Parts, TILE_FLOATS, WIDTH, blocks, depth};
use crate::gemm::Matrix;
use crate::isa::unit::TILE;
use crate::isa::{Isa, Job, MAX_LANES};
use crate::terms::part;
use moh_operators::{Element, Float};
use std::marker::PhantomData;
use std::ops::Range;

/// Splits up to [`TILE`] rows of `width` elements into [`Parts::ROWS`] floats for every block of inner indices, `block` floats apart. What is left
/// of the tiles is 0, and so are the first `lead` elements and rows whose input is null. Returns whether all numbers were finite that had to be.
///
/// Contract of the constructor: vectors have [`crate::isa::MAX_LANES`] lanes; bf16 has one term; `input(row)` is null or valid for reading `width` elements,
/// `output` for writing; `lead` is less than [`Parts::INNER`].
pub(crate) struct PackRows<T, F: Fn(usize) -> *const T, P> {
    pub(crate) rows: usize,
    pub(crate) input: F,
    pub(crate) width: usize,
    pub(crate) lead: usize,
    pub(crate) block: usize,
    pub(crate) output: *mut f32,
    pub(crate) parts: PhantomData<P>,
}

impl<T: Element, F: Fn(usize) -> *const T, P> PackRows<T, F, P> {
    /// Elements from element `i` on, with 0 in place of those that lead.
    #[inline(always)]
    pub(super) fn behind_lead<I: Isa>(&self, isa: I, i: usize, x: I::V) -> I::V {
        isa.without_first(x, self.lead.saturating_sub(i))
    }
}

impl<T: Element, F: Fn(usize) -> *const T, P: Parts> Job for PackRows<T, F, P> {
    type Output = bool;

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> bool {
        P::pack_rows(isa, &self)
    }
}

/// Copies rows of tiles that [`PackRows`] has made, of one block of `steps` steps, to the first rows of other tiles. What is left of the last tile is 0.
///
/// Contract of the constructor: vectors have [`MAX_LANES`] lanes; `tiles` is valid for reading the picked rows, `output` for writing
/// [`Parts::ROWS`] floats for every tile.
pub(crate) struct PickRows<'a, P> {
    pub(crate) tiles: *const f32,
    pub(crate) picked: &'a [u32],
    pub(crate) steps: usize,
    pub(crate) output: *mut f32,
    pub(crate) parts: PhantomData<P>,
}

impl<P: Parts> Job for PickRows<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let numbers = P::COUNT * P::DEPTH * TILE_FLOATS;
        // Of a row, its vector in tile `i` of those along the inner dimension, and what it has besides its numbers.
        let vector = |row: usize, i: usize| row / TILE * P::ROWS + i * TILE_FLOATS + row % TILE * TILE;
        let scale = |row: usize, i: usize| row / TILE * P::ROWS + i + row % TILE;
        for to in 0..self.picked.len().next_multiple_of(TILE) {
            let from = self.picked.get(to).map(|&row| row as usize);
            // SAFETY: the constructor's contract: a row of a tile is a vector.
            unsafe {
                for (part, step) in (0..P::COUNT).flat_map(|part| (0..self.steps).map(move |step| (part, step))) {
                    let i = part * P::DEPTH + step;
                    let x = from.map_or(isa.splat(0.0), |from| isa.load(self.tiles.add(vector(from, i))));
                    isa.store(self.output.add(vector(to, i)), x);
                }
                for i in (numbers..P::ROWS).step_by(TILE) {
                    let x = from.map_or(0.0, |from| self.tiles.add(scale(from, i)).read());
                    self.output.add(scale(to, i)).write(x);
                }
            }
        }
    }
}

/// Splits up to [`WIDTH`] columns of a weight into [`Parts::COLUMNS`] floats: rows of [`WIDTH`] columns, of (steps, parts, [`TILE`]). What
/// is left of the last step and of the columns is 0. Returns what [`PackRows`] does.
///
/// Contract of the constructor: as of [`PackRows`]; `input` is valid for reading `inner` rows of `columns` elements, `stride` apart.
pub(crate) struct PackColumns<T, P> {
    pub(super) input: *const T,
    pub(super) stride: usize,
    pub(super) inner: usize,
    pub(super) columns: usize,
    /// Whether inner indices that are multiplied together are neighbours; else they are [`TILE`] apart.
    pub(super) neighbours: bool,
    pub(super) output: *mut f32,
    pub(super) parts: PhantomData<P>,
}

impl<T: Element, P> PackColumns<T, P> {
    /// Row `inner` of the columns from `column` on, of at most as many as a vector has lanes.
    #[inline(always)]
    pub(super) fn at<I: Isa>(&self, isa: I, inner: usize, column: usize) -> I::V {
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

/// Splits a block of the weight. Returns whether all numbers were finite that had to be.
///
/// # Safety
/// The weight has these inner indices and columns, at most DEPTH * INNER and WIDTH; `output` is valid for writing [`Parts::COLUMNS`] floats,
/// `dense` for as many floats as numbers. Vectors have [`crate::isa::MAX_LANES`] lanes.
pub(super) unsafe fn pack_block<I: Isa, T: Element, P: Parts>(
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
/// The weight has these inner indices and columns, [`WIDTH`] of which lie in one block; `output` is valid for writing [`floats`]. Vectors have
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
