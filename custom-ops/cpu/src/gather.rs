//! Copies between the tensors' rows and tiles with one row per lane: gather, transpose, widen.

use crate::isa::{Isa, Job, MAX_LANES};
use moh_operators::Element;

/// Gathers rows of `dim` elements, multiplied by both factors, into the lanes of a (dim, width) f32 matrix. Lanes
/// after the last row are 0, up to a whole vector.
///
/// Contract of the constructor: the rows are valid for reading, `output` for writing.
pub(crate) struct Gather<'a, T> {
    pub(crate) rows: &'a [*const T],
    pub(crate) dim: usize,
    /// Two factors, because their product may overflow when the scaled elements do not.
    pub(crate) factors: [f32; 2],
    pub(crate) output: *mut f32,
    pub(crate) width: usize,
}

impl<T: Element> Job for Gather<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let [first, second] = self.factors;
        let (first, second) = (isa.splat(first), isa.splat(second));
        for lane in (0..self.rows.len()).step_by(I::LANES) {
            let rows = &self.rows[lane..(lane + I::LANES).min(self.rows.len())];
            for d in (0..self.dim).step_by(I::LANES) {
                let n = (self.dim - d).min(I::LANES);
                let mut block = [isa.splat(0.0); MAX_LANES];
                for i in 0..rows.len() {
                    // SAFETY: the constructor's contract; d + n <= dim.
                    let row = unsafe { isa.widen_part(rows[i].add(d), n) };
                    block[i] = isa.mul(isa.mul(row, first), second);
                }
                isa.transpose(&mut block);
                for i in 0..n {
                    // SAFETY: the constructor's contract; d + i < dim.
                    unsafe { isa.store(self.output.add((d + i) * self.width + lane), block[i]) }
                }
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
        let mut zero = isa.splat(0.0);
        for lane in (0..self.rows.len()).step_by(I::LANES) {
            let rows = &self.rows[lane..(lane + I::LANES).min(self.rows.len())];
            // SAFETY: the constructor's contract.
            let factors = unsafe { isa.load(self.factors.add(lane)) };
            for d in (0..self.dim).step_by(I::LANES) {
                let n = (self.dim - d).min(I::LANES);
                let mut block = [isa.splat(0.0); MAX_LANES];
                for i in 0..n {
                    // SAFETY: the constructor's contract; d + i < dim.
                    block[i] = isa.mul(unsafe { isa.load(self.input.add((d + i) * self.width + lane)) }, factors);
                    zero = isa.add(zero, isa.sub(block[i], block[i]));
                }
                isa.transpose(&mut block);
                for i in 0..rows.len() {
                    // SAFETY: the constructor's contract; d + n <= dim.
                    unsafe { isa.narrow_part(rows[i].add(d), block[i], n) }
                }
            }
        }
        isa.sum(zero) == 0.0
    }
}

/// Converts `rows` rows of `dim` elements, `stride` apart, to f32 rows `pitch` apart.
///
/// Contract of the constructor: `input` is valid for reading, `output` for writing; `pitch` is at least `dim` rounded up
/// to whole vectors.
pub(crate) struct Widen<T> {
    pub(crate) input: *const T,
    pub(crate) stride: usize,
    pub(crate) rows: usize,
    pub(crate) dim: usize,
    pub(crate) factors: [f32; 2],
    pub(crate) output: *mut f32,
    pub(crate) pitch: usize,
}

impl<T: Element> Job for Widen<T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let [first, second] = self.factors;
        let (first, second) = (isa.splat(first), isa.splat(second));
        let whole = self.dim - self.dim % I::LANES;
        for row in 0..self.rows {
            // SAFETY: the constructor's contract.
            unsafe {
                let input = self.input.add(row * self.stride);
                let output = self.output.add(row * self.pitch);
                for d in (0..whole).step_by(I::LANES) {
                    isa.store(output.add(d), isa.mul(isa.mul(isa.widen(input.add(d)), first), second));
                }
                if whole < self.dim {
                    let tail = isa.widen_part(input.add(whole), self.dim - whole);
                    isa.store(output.add(whole), isa.mul(isa.mul(tail, first), second));
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
