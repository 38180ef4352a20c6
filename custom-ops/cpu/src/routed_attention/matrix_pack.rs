//! Packs tensors into blocks for a matrix unit: pairs along the inner dimension, each element split into as many bf16
//! terms as represent it exactly.

use crate::isa::unit::TILE;
use crate::isa::{Isa, Job, MAX_LANES};
use crate::terms::{PAIRS, load, part, terms_of};
use moh_operators::Element;

/// Query rows per tile.
pub(super) const WIDTH: usize = 2 * TILE;
/// Keys per block.
pub(super) const KEYS: usize = 128;
/// Gathers query rows of `dim` elements into the lanes of a (TERMS, pairs, WIDTH) array of pairs. Unused lanes and
/// pairs are 0.
///
/// Contract of the constructor: vectors have [`MAX_LANES`] lanes; with one term, elements have 16 bits; the rows, at
/// most [`WIDTH`], are valid for reading, `output` for writing; `pairs` is a multiple of [`MAX_LANES`].
pub(super) struct PackQueries<'a, T, const TERMS: usize> {
    pub(super) rows: &'a [*const T],
    pub(super) dim: usize,
    pub(super) pairs: usize,
    pub(super) output: *mut f32,
}

impl<T: Element, const TERMS: usize> Job for PackQueries<'_, T, TERMS> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        for lane in (0..WIDTH).step_by(MAX_LANES) {
            for pair in (0..self.pairs).step_by(MAX_LANES) {
                let mut blocks = [[isa.splat(0.0); MAX_LANES]; TERMS];
                for i in 0..MAX_LANES.min(self.rows.len().saturating_sub(lane)) {
                    // SAFETY: the constructor's contract.
                    let terms: [_; TERMS] =
                        unsafe { load(isa, self.rows[lane + i].add(2 * pair), self.dim - 2 * pair) };
                    for term in 0..TERMS {
                        blocks[term][i] = terms[term];
                    }
                }
                for (term, block) in blocks.iter_mut().enumerate() {
                    isa.transpose(block);
                    for i in 0..MAX_LANES {
                        let row = term * self.pairs + pair + i;
                        // SAFETY: the constructor's contract.
                        unsafe { isa.store(self.output.add(row * WIDTH + lane), block[i]) }
                    }
                }
            }
        }
    }
}

/// Offset of the 16 pairs from `pair` on in a row of `pairs`. Rows are cut into tiles, which are contiguous.
#[inline(always)]
fn in_tiles(row: usize, pair: usize, pairs: usize) -> usize {
    (row / TILE * (pairs / TILE) + pair / TILE) * TILE * TILE + row % TILE * TILE
}

/// Packs keys as (TERMS, KEYS, pairs) pairs in tiles. Unused pairs, and keys up to a multiple of 32, are 0.
///
/// Contract of the constructor: as for [`PackQueries`], for `keys <= KEYS` rows `stride` apart.
pub(super) struct PackKeys<T, const TERMS: usize> {
    pub(super) input: *const T,
    pub(super) stride: usize,
    pub(super) keys: usize,
    pub(super) dim: usize,
    pub(super) pairs: usize,
    pub(super) output: *mut f32,
}

impl<T: Element, const TERMS: usize> Job for PackKeys<T, TERMS> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        for key in 0..self.keys.next_multiple_of(WIDTH) {
            for pair in (0..self.pairs).step_by(MAX_LANES) {
                let mut terms = [isa.splat(0.0); TERMS];
                // SAFETY: the constructor's contract.
                unsafe {
                    if key < self.keys {
                        terms = load(isa, self.input.add(key * self.stride + 2 * pair), self.dim - 2 * pair);
                    }
                    for (term, vector) in terms.into_iter().enumerate() {
                        isa.store(self.output.add(in_tiles(term * KEYS + key, pair, self.pairs)), vector);
                    }
                }
            }
        }
    }
}

/// Transposes values to (TERMS, rows, KEYS / 2) pairs in tiles. Rows up to a multiple of 16, and keys up to a multiple
/// of 32, are 0.
///
/// Contract of the constructor: as for [`PackKeys`]; `rows` is `dim` rounded up to a multiple of [`MAX_LANES`].
pub(super) struct PackValues<T, const TERMS: usize> {
    pub(super) input: *const T,
    pub(super) stride: usize,
    pub(super) keys: usize,
    pub(super) dim: usize,
    pub(super) rows: usize,
    pub(super) output: *mut f32,
}

impl<T: Element, const TERMS: usize> Job for PackValues<T, TERMS> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        for start in (0..self.keys).step_by(PAIRS) {
            for d in (0..self.dim).step_by(MAX_LANES) {
                let n = (self.dim - d).min(MAX_LANES);
                let mut blocks = [[isa.splat(0.0); MAX_LANES]; TERMS];
                for i in 0..MAX_LANES {
                    let (even, odd) = (self.part(isa, start + 2 * i, d, n), self.part(isa, start + 2 * i + 1, d, n));
                    let terms = terms_of::<I, T, TERMS>(isa, even, odd);
                    for term in 0..TERMS {
                        blocks[term][i] = terms[term];
                    }
                }
                for (term, block) in blocks.iter_mut().enumerate() {
                    isa.transpose(block);
                    for i in 0..MAX_LANES {
                        let row = term * self.rows + d + i;
                        // SAFETY: the constructor's contract: rows are padded to whole tiles.
                        unsafe { isa.store(self.output.add(in_tiles(row, start / 2, KEYS / 2)), block[i]) }
                    }
                }
            }
        }
    }
}

impl<T: Element, const TERMS: usize> PackValues<T, TERMS> {
    /// `n` elements of a key's value, from element `d` on.
    #[inline(always)]
    fn part<I: Isa>(&self, isa: I, key: usize, d: usize, n: usize) -> I::V {
        if key >= self.keys {
            return isa.splat(0.0);
        }
        // SAFETY: the constructor's contract; key < keys, d + n <= dim.
        unsafe { part(isa, self.input.add(key * self.stride + d), n) }
    }
}
