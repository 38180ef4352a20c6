//! From the caller's bfloat16 tensors to blocks for a matrix unit: pairs of neighbours along the inner index in one lane.

use super::matrix::{KEYS, WIDTH};
use crate::cpu::isa::{Isa, Job, MAX_LANES};
use crate::tensor::Element;

/// Elements of a vector of pairs.
const PAIRS: usize = 2 * MAX_LANES;

/// Gathers rows of `dim` elements into the lanes of (pairs, WIDTH) pairs. Lanes and pairs beyond are 0.
///
/// Contract of the constructor: vectors have [`MAX_LANES`] lanes and elements 16 bits; the rows, [`WIDTH`] at most, are valid
/// for reading, `output` for writing; `pairs` is a multiple of [`MAX_LANES`].
pub(super) struct PackQueries<'a, T> {
    pub(super) rows: &'a [*const T],
    pub(super) dim: usize,
    pub(super) pairs: usize,
    pub(super) output: *mut f32,
}

impl<T: Element> Job for PackQueries<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        for lane in (0..WIDTH).step_by(MAX_LANES) {
            for pair in (0..self.pairs).step_by(MAX_LANES) {
                let mut block = [isa.splat(0.0); MAX_LANES];
                for i in 0..MAX_LANES.min(self.rows.len().saturating_sub(lane)) {
                    // SAFETY: the constructor's contract.
                    block[i] = unsafe { load(isa, self.rows[lane + i].add(2 * pair), self.dim - 2 * pair) };
                }
                isa.transpose(&mut block);
                for i in 0..MAX_LANES {
                    // SAFETY: the constructor's contract.
                    unsafe { isa.store(self.output.add((pair + i) * WIDTH + lane), block[i]) }
                }
            }
        }
    }
}

/// The first [`PAIRS`] of `n` elements, and 0 beyond, as they are.
#[inline(always)]
unsafe fn load<I: Isa, T: Element>(isa: I, input: *const T, n: usize) -> I::V {
    // SAFETY: the caller's contract: `n` elements of 16 bits.
    unsafe {
        if n >= PAIRS {
            return isa.load(input.cast());
        }
        let mut buffer = [T::from_f32(0.0); PAIRS];
        std::ptr::copy_nonoverlapping(input, buffer.as_mut_ptr(), n);
        isa.load(buffer.as_ptr().cast())
    }
}

/// Copies keys to rows of `pairs` pairs. Pairs beyond are 0, and so are keys up to a multiple of 32.
///
/// Contract of the constructor: as of [`PackQueries`], for `keys <= KEYS` rows `stride` apart.
pub(super) struct PackKeys<T> {
    pub(super) input: *const T,
    pub(super) stride: usize,
    pub(super) keys: usize,
    pub(super) dim: usize,
    pub(super) pairs: usize,
    pub(super) output: *mut f32,
}

impl<T: Element> Job for PackKeys<T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        for key in 0..self.keys.next_multiple_of(WIDTH) {
            for pair in (0..self.pairs).step_by(MAX_LANES) {
                let mut vector = isa.splat(0.0);
                // SAFETY: the constructor's contract.
                unsafe {
                    if key < self.keys {
                        vector = load(isa, self.input.add(key * self.stride + 2 * pair), self.dim - 2 * pair);
                    }
                    isa.store(self.output.add(key * self.pairs + pair), vector);
                }
            }
        }
    }
}

/// Transposes values to rows of [`KEYS`] / 2 pairs. Rows up to a multiple of 16 and keys up to one of 32 are 0.
///
/// Contract of the constructor: as of [`PackKeys`].
pub(super) struct PackValues<T> {
    pub(super) input: *const T,
    pub(super) stride: usize,
    pub(super) keys: usize,
    pub(super) dim: usize,
    pub(super) output: *mut f32,
}

impl<T: Element> Job for PackValues<T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        for start in (0..self.keys).step_by(PAIRS) {
            for d in (0..self.dim).step_by(MAX_LANES) {
                let n = (self.dim - d).min(MAX_LANES);
                let mut block = [isa.splat(0.0); MAX_LANES];
                for i in 0..MAX_LANES {
                    block[i] = isa.pair(self.part(isa, start + 2 * i, d, n), self.part(isa, start + 2 * i + 1, d, n));
                }
                isa.transpose(&mut block);
                for i in 0..MAX_LANES {
                    // SAFETY: the constructor's contract: the rows are filled up to whole tiles.
                    unsafe { isa.store(self.output.add((d + i) * (KEYS / 2) + start / 2), block[i]) }
                }
            }
        }
    }
}

impl<T: Element> PackValues<T> {
    /// `n` elements of a key's value, from `d` on.
    #[inline(always)]
    fn part<I: Isa>(&self, isa: I, key: usize, d: usize, n: usize) -> I::V {
        if key >= self.keys {
            return isa.splat(0.0);
        }
        // SAFETY: the constructor's contract; key < keys, d + n <= dim.
        unsafe {
            let input = self.input.add(key * self.stride + d);
            if n == MAX_LANES { isa.widen(input) } else { isa.widen_part(input, n) }
        }
    }
}
