//! Stores sums to the caller's output.

use crate::isa::{Isa, Job};
use moh_operators::Element;

/// Writes rows of `columns` sums, plus the bias, to output rows.
///
/// Contract of the constructor: the sums are valid for reading and the outputs for writing `columns` elements, the
/// bias for reading as many.
pub(crate) struct Store<'a, T> {
    pub(crate) rows: &'a [(*const f32, *mut T)],
    pub(crate) columns: usize,
    pub(crate) bias: Option<*const T>,
}

impl<T: Element> Job for Store<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let whole = self.columns - self.columns % I::LANES;
        // SAFETY: the constructor's contract.
        unsafe {
            for &(sums, output) in self.rows {
                for column in (0..whole).step_by(I::LANES) {
                    let sum = isa.load(sums.add(column));
                    let sum = self.bias.map_or(sum, |bias| isa.add(sum, isa.widen(bias.add(column))));
                    isa.narrow(output.add(column), sum);
                }
                if whole < self.columns {
                    let n = self.columns - whole;
                    let sum = isa.widen_part(sums.add(whole), n);
                    let sum = self.bias.map_or(sum, |bias| isa.add(sum, isa.widen_part(bias.add(whole), n)));
                    isa.narrow_part(output.add(whole), sum, n);
                }
            }
        }
    }
}

/// Adds rows of `columns` sums, plus the bias, times a factor, to other rows of sums.
///
/// Contract of the constructor: whole vectors of the sums are valid for reading and of the other rows for reading and
/// writing; `columns` elements of the bias are valid for reading.
pub(crate) struct AddScaled<'a, T> {
    pub(crate) rows: &'a [(*const f32, *mut f32, f32)],
    pub(crate) columns: usize,
    pub(crate) bias: Option<*const T>,
}

impl<T: Element> Job for AddScaled<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        for column in (0..self.columns).step_by(I::LANES) {
            let n = (self.columns - column).min(I::LANES);
            // SAFETY: the constructor's contract; column + n <= columns.
            unsafe {
                let mut bias = isa.splat(0.0);
                if let Some(start) = self.bias {
                    bias = isa.widen_part(start.add(column), n);
                }
                for &(sums, totals, factor) in self.rows {
                    let (sums, totals) = (sums.add(column), totals.add(column));
                    let sum = isa.add(isa.load(sums), bias);
                    isa.store(totals, isa.fma(isa.splat(factor), sum, isa.load(totals)));
                }
            }
        }
    }
}
