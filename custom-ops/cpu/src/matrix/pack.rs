//! Splitting of both factors into bf16 terms.

use super::{DEPTH, INNER, TILE_FLOATS, WIDTH};
use crate::isa::unit::TILE;
use crate::isa::{Isa, Job, MAX_LANES};
use crate::terms::{load, part, round, split, terms};
use moh_operators::{Element, Float};

/// Terms of two vectors, and what is 0 unless terms of a number that is not finite may be.
#[inline(always)]
fn terms_of<I: Isa, T: Element, const TERMS: usize>(isa: I, a: I::V, b: I::V) -> ([I::V; TERMS], I::V) {
    match TERMS < terms(T::FLOAT) {
        true => (round(isa, a, b), isa.add(isa.sub(a, a), isa.sub(b, b))),
        false => (split(isa, a, b), isa.splat(0.0)),
    }
}

/// Splits up to [`TILE`] rows of `width` elements into (TERMS, DEPTH) tiles for every block of inner indices, `block` floats apart. What
/// is left of the tiles is 0. Neighbours form pairs if they are bf16; else index i and i + [`TILE`]. Returns whether terms that were
/// rounded are those of finite numbers.
///
/// Contract of the constructor: vectors have [`MAX_LANES`] lanes; bf16 has one term; `input(row)` is valid for reading `width` elements, `output` for writing.
pub(crate) struct PackRows<T, F: Fn(usize) -> *const T, const TERMS: usize> {
    pub(crate) rows: usize,
    pub(crate) input: F,
    pub(crate) width: usize,
    pub(crate) block: usize,
    pub(crate) output: *mut f32,
}

impl<T: Element, F: Fn(usize) -> *const T, const TERMS: usize> Job for PackRows<T, F, TERMS> {
    type Output = bool;

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> bool {
        let mut zero = isa.splat(0.0);
        for step in 0..self.width.div_ceil(INNER) {
            let start = step / DEPTH * self.block + step % DEPTH * TILE_FLOATS;
            for row in 0..TILE {
                let mut terms = [isa.splat(0.0); TERMS];
                // SAFETY: the constructor's contract; there are `width` elements from the row's first on.
                unsafe {
                    if row < self.rows {
                        let x = (self.input)(row).add(step * INNER);
                        let n = self.width - step * INNER;
                        if T::FLOAT == Float::BF16 {
                            terms = load(isa, x, n);
                        } else {
                            let second = n.saturating_sub(TILE).min(TILE);
                            let (a, b) = (part(isa, x, n.min(TILE)), part(isa, x.wrapping_add(TILE), second));
                            let found;
                            (terms, found) = terms_of::<I, T, TERMS>(isa, a, b);
                            zero = isa.add(zero, found);
                        }
                    }
                    for (term, vector) in terms.into_iter().enumerate() {
                        isa.store(self.output.add(start + term * DEPTH * TILE_FLOATS + row * TILE), vector);
                    }
                }
            }
        }
        isa.sum(zero) == 0.0
    }
}

/// Splits up to [`WIDTH`] columns of a weight into (TERMS, DEPTH, TILE, WIDTH) pairs: inner indices are paired as in [`PackRows`],
/// neighbours if `neighbours`. What is left of the last step and of the columns is 0. Returns what [`PackRows`] does.
///
/// Contract of the constructor: as of [`PackRows`]; `input` is valid for reading `inner` rows of `columns` elements, `stride` apart.
pub(super) struct PackColumns<T, const TERMS: usize> {
    pub(super) input: *const T,
    pub(super) stride: usize,
    pub(super) inner: usize,
    pub(super) columns: usize,
    pub(super) neighbours: bool,
    pub(super) output: *mut f32,
}

impl<T: Element, const TERMS: usize> Job for PackColumns<T, TERMS> {
    type Output = bool;

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> bool {
        let mut zero = isa.splat(0.0);
        for step in 0..self.inner.div_ceil(INNER) {
            for pair in 0..TILE {
                let first = step * INNER + if self.neighbours { 2 * pair } else { pair };
                let second = first + if self.neighbours { 1 } else { TILE };
                for column in [0, MAX_LANES] {
                    let n = self.columns.saturating_sub(column).min(MAX_LANES);
                    let at = |inner: usize| match inner < self.inner {
                        // SAFETY: the constructor's contract.
                        true => unsafe { part(isa, self.input.wrapping_add(inner * self.stride + column), n) },
                        false => isa.splat(0.0),
                    };
                    let (terms, found) = terms_of::<I, T, TERMS>(isa, at(first), at(second));
                    zero = isa.add(zero, found);
                    for (term, vector) in terms.into_iter().enumerate() {
                        let place = ((term * DEPTH + step) * TILE + pair) * WIDTH + column;
                        // SAFETY: the constructor's contract.
                        unsafe { isa.store(self.output.add(place), vector) }
                    }
                }
            }
        }
        isa.sum(zero) == 0.0
    }
}
