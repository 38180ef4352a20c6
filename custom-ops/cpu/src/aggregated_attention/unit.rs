//! Normalisation of vectors to length 1.

use crate::isa::{Isa, Job, MAX_LANES};
use moh_operators::Element;

/// Lower bound of the divisor.
const SHORTEST: f32 = 1e-12;

/// Reciprocals of the lengths, from their squares in the lanes; lengths are at least [`SHORTEST`].
#[inline(always)]
pub(super) fn reciprocals<I: Isa>(isa: I, squares: I::V) -> [f32; MAX_LANES] {
    let mut lanes = [1.0; MAX_LANES];
    // SAFETY: the array holds MAX_LANES >= LANES floats.
    unsafe { isa.store(lanes.as_mut_ptr(), squares) }
    for x in &mut lanes {
        let length = x.sqrt();
        // Not `f32::max`, which would drop a NaN.
        *x = 1.0 / if length < SHORTEST { SHORTEST } else { length };
    }
    lanes
}

/// Converts rows of `dim` elements to f32 and returns the squared lengths, one per lane. Lane `i` reads row `row(i)`
/// and writes to `output(i)`, in whole vectors padded with zeros.
///
/// # Safety
/// The rows are valid for reading, the outputs for writing.
#[inline(always)]
pub(super) unsafe fn copy<I: Isa, T: Element>(
    isa: I,
    dim: usize,
    row: impl Fn(usize) -> *const T,
    output: impl Fn(usize) -> *mut f32,
) -> I::V {
    let mut squares = [isa.splat(0.0); MAX_LANES];
    for d in (0..dim).step_by(I::LANES) {
        let n = (dim - d).min(I::LANES);
        for i in 0..I::LANES {
            // SAFETY: the caller's contract; d + n <= dim.
            unsafe {
                let x = isa.widen_part(row(i).add(d), n);
                isa.store(output(i).add(d), x);
                squares[i] = isa.fma(x, x, squares[i]);
            }
        }
    }
    isa.sums(squares)
}

/// Converts `rows` rows of `dim` elements, `stride` apart, to f32 rows `pitch` apart, each divided by its length.
///
/// Contract of the constructor: `input` is valid for reading, `output` for writing; `pitch` is at least `dim` rounded up
/// to whole vectors.
pub(super) struct Unit<T> {
    pub(super) input: *const T,
    pub(super) stride: usize,
    pub(super) rows: usize,
    pub(super) dim: usize,
    pub(super) output: *mut f32,
    pub(super) pitch: usize,
}

impl<T: Element> Job for Unit<T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        for first in (0..self.rows).step_by(I::LANES) {
            // Unused lanes repeat the last row.
            let row = |i: usize| (first + i).min(self.rows - 1);
            // SAFETY: the constructor's contract.
            unsafe {
                let squares = copy(
                    isa,
                    self.dim,
                    |i| self.input.add(row(i) * self.stride),
                    |i| self.output.add(row(i) * self.pitch),
                );
                let factors = reciprocals(isa, squares);
                for (i, &factor) in factors[..I::LANES.min(self.rows - first)].iter().enumerate() {
                    let (output, factor) = (self.output.add((first + i) * self.pitch), isa.splat(factor));
                    for d in (0..self.dim).step_by(I::LANES) {
                        isa.store(output.add(d), isa.mul(isa.load(output.add(d)), factor));
                    }
                }
            }
        }
    }
}
