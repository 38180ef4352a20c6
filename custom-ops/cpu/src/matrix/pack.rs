//! Splitting of both factors into bf16 terms.

use super::{DEPTH, INNER, TILE_FLOATS, WIDTH};
use crate::isa::unit::TILE;
use crate::isa::{Isa, Job, MAX_LANES};
use crate::terms::{load, part, split};
use moh_operators::Element;

/// Splits up to [`TILE`] rows of `width` elements into (TERMS, DEPTH) tiles for every block of inner indices, `block` floats apart. What
/// is left of the tiles is 0.
///
/// Contract of the constructor: vectors have [`MAX_LANES`] lanes; with one term, elements have 16 bits; `input(row)` is valid for
/// reading `width` elements, `output` for writing.
pub(crate) struct PackRows<T, F: Fn(usize) -> *const T, const TERMS: usize> {
    pub(crate) rows: usize,
    pub(crate) input: F,
    pub(crate) width: usize,
    pub(crate) block: usize,
    pub(crate) output: *mut f32,
}

impl<T: Element, F: Fn(usize) -> *const T, const TERMS: usize> Job for PackRows<T, F, TERMS> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        for step in 0..self.width.div_ceil(INNER) {
            let start = step / DEPTH * self.block + step % DEPTH * TILE_FLOATS;
            for row in 0..TILE {
                let mut terms = [isa.splat(0.0); TERMS];
                // SAFETY: the constructor's contract; there are `width` elements from the row's first on.
                unsafe {
                    if row < self.rows {
                        let x = (self.input)(row).add(step * INNER);
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
pub(super) struct PackColumns<T, const TERMS: usize> {
    pub(super) input: *const T,
    pub(super) stride: usize,
    pub(super) inner: usize,
    pub(super) columns: usize,
    pub(super) output: *mut f32,
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
