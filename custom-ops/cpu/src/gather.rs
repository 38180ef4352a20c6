//! Copies between the tensors' rows and tiles with one row per lane: gather, transpose, widen.

use crate::isa::{Isa, Job, MAX_LANES};
use moh_operators::Element;
use std::f32::consts::LOG2_E;

/// What becomes of numbers on the way.
pub(crate) trait Scale: Copy {
    /// Of a vector of them.
    fn apply<I: Isa>(self, isa: I, x: I::V) -> I::V;
}

/// Two factors, because their product may overflow when the scaled numbers do not.
impl Scale for [f32; 2] {
    #[inline(always)]
    fn apply<I: Isa>(self, isa: I, x: I::V) -> I::V {
        let [first, second] = self;
        isa.mul(isa.mul(x, isa.splat(first)), isa.splat(second))
    }
}

/// A bias of scores as powers of 2: times log2(e). Finite numbers stay finite, such as the lowest, with which some models mask keys: only
/// -inf leaves a key out. Beyond 2.36e38 all are one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Log2Bias;

impl Scale for Log2Bias {
    #[inline(always)]
    fn apply<I: Isa>(self, isa: I, x: I::V) -> I::V {
        let (zero, least) = (isa.splat(0.0), isa.splat(f32::MIN));
        let finite = |x| isa.sub(zero, isa.max(isa.sub(zero, isa.max(x, least)), least));
        // The difference is 0, but of an infinity that infinity, and NaN of NaN.
        isa.add(finite(isa.mul(x, isa.splat(LOG2_E))), isa.sub(x, finite(x)))
    }
}

impl Log2Bias {
    /// As [`Scale::apply`], of one number.
    #[inline(always)]
    pub(crate) fn of(bias: f32) -> f32 {
        let scaled = bias * LOG2_E;
        if bias.is_finite() { scaled.clamp(f32::MIN, f32::MAX) } else { scaled }
    }
}

/// Gathers rows of `dim` elements, scaled, into the lanes of a (dim, width) f32 matrix. Lanes
/// after the last row are 0, up to a whole vector.
///
/// Contract of the constructor: the rows are valid for reading, `output` for writing.
pub(crate) struct Gather<'a, T, S> {
    pub(crate) rows: &'a [*const T],
    pub(crate) dim: usize,
    pub(crate) scale: S,
    pub(crate) output: *mut f32,
    pub(crate) width: usize,
}

impl<T: Element, S: Scale> Job for Gather<'_, T, S> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        for lane in (0..self.rows.len()).step_by(I::LANES) {
            let rows = (self.rows.len() - lane).min(I::LANES);
            for d in (0..self.dim).step_by(I::LANES) {
                let n = (self.dim - d).min(I::LANES);
                // The next rows, which are anywhere.
                for next in self.rows.iter().skip(lane + I::LANES).take(I::LANES) {
                    isa.prefetch(next.wrapping_add(d).cast());
                }
                // SAFETY: the constructor's contract.
                unsafe {
                    if rows == I::LANES && n == I::LANES {
                        // Constant loop bounds keep the block in registers.
                        self.block(isa, lane, d, I::LANES, I::LANES);
                    } else {
                        self.block(isa, lane, d, rows, n);
                    }
                }
            }
        }
    }
}

impl<T: Element, S: Scale> Gather<'_, T, S> {
    /// # Safety
    /// There are so many rows from `lane` on, and elements of each from `d` on.
    #[inline(always)]
    unsafe fn block<I: Isa>(&self, isa: I, lane: usize, d: usize, rows: usize, n: usize) {
        let mut block = [isa.splat(0.0); MAX_LANES];
        // SAFETY: the caller's contract, and the constructor's.
        unsafe {
            for i in 0..rows {
                let row = isa.widen_part(self.rows.get_unchecked(lane + i).add(d), n);
                block[i] = self.scale.apply(isa, row);
            }
            isa.transpose(&mut block);
            for i in 0..n {
                isa.store(self.output.add((d + i) * self.width + lane), block[i]);
            }
        }
    }
}

/// The inverse of [`Gather`]: writes lane `i` of a (dim, width) f32 matrix, times factor `i`, to row `i`. Returns
/// false if any element is not finite; elements in unused lanes of the last vector count too.
///
/// Contract of the constructor: `input` is valid for reading whole vectors of lanes, the rows for writing; there are
/// `width` factors.
pub(super) struct Scatter<'a, T> {
    pub(super) rows: &'a [*mut T],
    pub(super) dim: usize,
    pub(super) factors: *const f32,
    pub(super) input: *const f32,
    pub(super) width: usize,
}

impl<T: Element> Job for Scatter<'_, T> {
    type Output = bool;

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> bool {
        // Several, so that they need not wait for each other.
        let mut zeros = [isa.splat(0.0); ZEROS];
        for lane in (0..self.rows.len()).step_by(I::LANES) {
            let rows = (self.rows.len() - lane).min(I::LANES);
            for d in (0..self.dim).step_by(I::LANES) {
                let n = (self.dim - d).min(I::LANES);
                // SAFETY: the constructor's contract.
                unsafe {
                    if rows == I::LANES && n == I::LANES {
                        // Constant loop bounds keep the block in registers.
                        self.block(isa, lane, d, I::LANES, I::LANES, &mut zeros);
                    } else {
                        self.block(isa, lane, d, rows, n, &mut zeros);
                    }
                }
            }
        }
        let [a, b, c, d] = zeros;
        isa.sum(isa.add(isa.add(a, b), isa.add(c, d))) == 0.0
    }
}

/// Sums of 0 for numbers that are finite, and NaN for others.
const ZEROS: usize = 4;

impl<T: Element> Scatter<'_, T> {
    /// # Safety
    /// There are so many rows from `lane` on, and elements of each from `d` on.
    #[inline(always)]
    unsafe fn block<I: Isa>(&self, isa: I, lane: usize, d: usize, rows: usize, n: usize, zeros: &mut [I::V; ZEROS]) {
        let mut block = [isa.splat(0.0); MAX_LANES];
        // SAFETY: the caller's contract, and the constructor's.
        unsafe {
            let factors = isa.load(self.factors.add(lane));
            for i in 0..n {
                block[i] = isa.mul(isa.load(self.input.add((d + i) * self.width + lane)), factors);
                zeros[i % ZEROS] = isa.add(zeros[i % ZEROS], isa.sub(block[i], block[i]));
            }
            isa.transpose(&mut block);
            for i in 0..rows {
                isa.narrow_part(self.rows.get_unchecked(lane + i).add(d), block[i], n);
            }
        }
    }
}

/// Converts `rows` rows of `dim` elements, `stride` apart, to scaled f32 rows `pitch` apart.
///
/// Contract of the constructor: `input` is valid for reading, `output` for writing; `pitch` is at least `dim` rounded up
/// to whole vectors.
pub(crate) struct Widen<T, S> {
    pub(crate) input: *const T,
    pub(crate) stride: usize,
    pub(crate) rows: usize,
    pub(crate) dim: usize,
    pub(crate) scale: S,
    pub(crate) output: *mut f32,
    pub(crate) pitch: usize,
}

impl<T: Element, S: Scale> Job for Widen<T, S> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let whole = self.dim - self.dim % I::LANES;
        for row in 0..self.rows {
            // SAFETY: the constructor's contract.
            unsafe {
                let input = self.input.add(row * self.stride);
                let output = self.output.add(row * self.pitch);
                for d in (0..whole).step_by(I::LANES) {
                    isa.store(output.add(d), self.scale.apply(isa, isa.widen(input.add(d))));
                }
                if whole < self.dim {
                    let tail = isa.widen_part(input.add(whole), self.dim - whole);
                    isa.store(output.add(whole), self.scale.apply(isa, tail));
                }
            }
        }
    }
}

/// Fills `rows` rows of lanes: each with one value (`by_row`), or all with the same vectors.
///
/// Contract of the constructor: `input` is valid for reading `rows` floats or `vectors` vectors, `output` for writing.
pub(super) struct Fill {
    pub(super) input: *const f32,
    pub(super) by_row: bool,
    pub(super) rows: usize,
    pub(super) vectors: usize,
    pub(super) output: *mut f32,
    pub(super) width: usize,
}

impl Job for Fill {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        for row in 0..self.rows {
            for v in 0..self.vectors {
                // SAFETY: the constructor's contract.
                unsafe {
                    let x = match self.by_row {
                        true => isa.splat(*self.input.add(row)),
                        false => isa.load(self.input.add(v * I::LANES)),
                    };
                    isa.store(self.output.add(row * self.width + v * I::LANES), x);
                }
            }
        }
    }
}
