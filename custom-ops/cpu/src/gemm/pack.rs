//! Conversion to f32 and transposition of matrices.

use crate::isa::{Isa, Job, MAX_LANES};
use moh_operators::Element;

/// Converts rows of `k` elements to f32 rows `pitch` apart. Padding up to a whole vector is 0.
///
/// Contract of the constructor: the inputs are valid for reading; `output` for writing whole vectors.
pub(super) struct CopyInputs<F> {
    pub(super) rows: usize,
    pub(super) input: F,
    pub(super) k: usize,
    pub(super) output: *mut f32,
    pub(super) pitch: usize,
}

impl<T: Element, F: Fn(usize) -> *const T> Job for CopyInputs<F> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let whole = self.k - self.k % I::LANES;
        for row in 0..self.rows {
            // SAFETY: the constructor's contract.
            unsafe {
                let (input, output) = ((self.input)(row), self.output.add(row * self.pitch));
                for k in (0..whole).step_by(I::LANES) {
                    isa.store(output.add(k), isa.widen(input.add(k)));
                }
                if whole < self.k {
                    isa.store(output.add(whole), isa.widen_part(input.add(whole), self.k - whole));
                }
            }
        }
    }
}

/// Converts `rows` rows of `columns` elements, `stride` apart, to f32 rows `pitch` apart. Padding up to a whole vector
/// is 0.
///
/// Contract of the constructor: `input` is valid for reading, `output` for writing whole vectors.
pub(super) struct CopyRows<T> {
    pub(super) input: *const T,
    pub(super) stride: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) output: *mut f32,
    pub(super) pitch: usize,
}

impl<T: Element> Job for CopyRows<T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let whole = self.columns - self.columns % I::LANES;
        for row in 0..self.rows {
            // SAFETY: the constructor's contract.
            unsafe {
                let (input, output) = (self.input.add(row * self.stride), self.output.add(row * self.pitch));
                for i in (0..whole).step_by(I::LANES) {
                    isa.store(output.add(i), isa.widen(input.add(i)));
                }
                if whole < self.columns {
                    isa.store(output.add(whole), isa.widen_part(input.add(whole), self.columns - whole));
                }
            }
        }
    }
}

/// Converts `rows` rows of `columns` elements, `stride` apart, to the transposed f32 matrix with rows `pitch` apart.
/// Padding up to a whole vector is 0.
///
/// Contract of the constructor: `input` is valid for reading; `output` for writing whole vectors.
pub(super) struct TransposeRows<T> {
    pub(super) input: *const T,
    pub(super) stride: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) output: *mut f32,
    pub(super) pitch: usize,
}

impl<T: Element> Job for TransposeRows<T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        for row in (0..self.rows).step_by(I::LANES) {
            let rows = (self.rows - row).min(I::LANES);
            for column in (0..self.columns).step_by(I::LANES) {
                let columns = (self.columns - column).min(I::LANES);
                // SAFETY: the constructor's contract; row + rows <= self.rows, column + columns <= self.columns.
                unsafe {
                    let input = self.input.add(row * self.stride + column);
                    let output = self.output.add(column * self.pitch + row);
                    if rows == I::LANES && columns == I::LANES {
                        // Constant loop bounds keep the block in registers.
                        self.block(isa, input, I::LANES, I::LANES, output);
                    } else {
                        self.block(isa, input, rows, columns, output);
                    }
                }
            }
        }
    }
}

impl<T: Element> TransposeRows<T> {
    /// # Safety
    /// `input` is valid for reading `rows` rows of `columns` elements, `output` for writing `columns` vectors.
    #[inline(always)]
    unsafe fn block<I: Isa>(&self, isa: I, input: *const T, rows: usize, columns: usize, output: *mut f32) {
        let mut block = [isa.splat(0.0); MAX_LANES];
        // SAFETY: the caller's contract.
        unsafe {
            for i in 0..rows {
                let input = input.add(i * self.stride);
                block[i] = isa.widen_part(input, columns);
            }
            isa.transpose(&mut block);
            for i in 0..columns {
                isa.store(output.add(i * self.pitch), block[i]);
            }
        }
    }
}
