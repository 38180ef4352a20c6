//! Products of a few rows: each weight element is read once, in place.

use super::Row;
use crate::isa::{Isa, Job};
use moh_operators::Element;

/// Maximum rows whose sums with a few columns fit the registers.
pub(super) const ROWS: usize = 6;

/// Products of `lines` with `columns` weight columns, each contiguous along the inner dimension and `stride` apart.
/// Results are added to the outputs from `column` on, or overwrite them if `first`.
///
/// Contract of the constructor: there are at most [`ROWS`] lines; their inputs are valid for reading `k` floats, `b` for
/// reading the columns, the outputs for reading and writing `columns` floats from `column` on.
pub(super) struct Dots<'a, T> {
    pub(super) lines: &'a [Row],
    pub(super) k: usize,
    pub(super) b: *const T,
    pub(super) stride: usize,
    pub(super) columns: usize,
    pub(super) column: usize,
    pub(super) first: bool,
}

impl<T: Element> Job for Dots<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        const { assert!(ROWS == 6) };
        match self.lines.len() {
            1 => self.rows::<I, 1>(isa),
            2 => self.rows::<I, 2>(isa),
            3 => self.rows::<I, 3>(isa),
            4 => self.rows::<I, 4>(isa),
            5 => self.rows::<I, 5>(isa),
            6 => self.rows::<I, 6>(isa),
            lines => debug_assert!(lines == 0, "{lines} lines"),
        }
    }
}

impl<T: Element> Dots<'_, T> {
    #[inline(always)]
    fn rows<I: Isa, const G: usize>(&self, isa: I) {
        let mut column = 0;
        if I::REGISTERS >= 32 {
            while column + 4 <= self.columns {
                self.block::<I, G, 4>(isa, column);
                column += 4;
            }
        }
        while column + 2 <= self.columns {
            self.block::<I, G, 2>(isa, column);
            column += 2;
        }
        if column < self.columns {
            self.block::<I, G, 1>(isa, column);
        }
    }

    /// Products of `G` rows with `N` columns.
    #[inline(always)]
    fn block<I: Isa, const G: usize, const N: usize>(&self, isa: I, column: usize) {
        let mut acc = [[isa.splat(0.0); N]; G];
        let whole = self.k - self.k % I::LANES;
        // SAFETY: the constructor's contract; column + N <= columns.
        unsafe {
            let b = self.b.add(column * self.stride);
            let mut weights = [isa.splat(0.0); N];
            for i in (0..whole).step_by(I::LANES) {
                for n in 0..N {
                    weights[n] = isa.widen(b.add(n * self.stride + i));
                }
                for g in 0..G {
                    let x = isa.load(self.lines[g].input.add(i));
                    for n in 0..N {
                        acc[g][n] = isa.fma(x, weights[n], acc[g][n]);
                    }
                }
            }
            if whole < self.k {
                let rest = self.k - whole;
                for n in 0..N {
                    weights[n] = isa.widen_part(b.add(n * self.stride + whole), rest);
                }
                for g in 0..G {
                    let x = isa.widen_part(self.lines[g].input.add(whole), rest);
                    for n in 0..N {
                        acc[g][n] = isa.fma(x, weights[n], acc[g][n]);
                    }
                }
            }
            for g in 0..G {
                for n in 0..N {
                    let output = self.lines[g].output.add(self.column + column + n);
                    let old = if self.first { 0.0 } else { *output };
                    *output = old + isa.sum(acc[g][n]);
                }
            }
        }
    }
}

/// As [`Dots`], for a weight whose rows are contiguous: rows of `columns` elements, `stride` apart.
///
/// Contract of the constructor: there are at most 4 lines; otherwise as for [`Dots`].
pub(super) struct Axpy<'a, T> {
    pub(super) lines: &'a [Row],
    pub(super) k: usize,
    pub(super) b: *const T,
    pub(super) stride: usize,
    pub(super) columns: usize,
    pub(super) column: usize,
    pub(super) first: bool,
}

impl<T: Element> Job for Axpy<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        match self.lines.len() {
            1 => self.rows::<I, 1>(isa),
            2 => self.rows::<I, 2>(isa),
            3 => self.rows::<I, 3>(isa),
            4 => self.rows::<I, 4>(isa),
            lines => debug_assert!(lines == 0, "{lines} lines"),
        }
    }
}

impl<T: Element> Axpy<'_, T> {
    #[inline(always)]
    fn rows<I: Isa, const G: usize>(&self, isa: I) {
        /// Weight rows per pass: the outputs are read and written once per pass.
        const DEPTH: usize = 8;
        let whole = self.k - self.k % DEPTH;
        for k in (0..whole).step_by(DEPTH) {
            self.block::<I, G, DEPTH>(isa, k);
        }
        for k in whole..self.k {
            self.block::<I, G, 1>(isa, k);
        }
    }

    /// Products of `G` rows with `K` weight rows, starting at inner index `k`.
    #[inline(always)]
    fn block<I: Isa, const G: usize, const K: usize>(&self, isa: I, k: usize) {
        let whole = self.columns - self.columns % I::LANES;
        let first = self.first && k == 0;
        // SAFETY: the constructor's contract; k + K <= self.k.
        unsafe {
            let b = self.b.add(k * self.stride);
            let mut weights = [isa.splat(0.0); K];
            for n in (0..whole).step_by(I::LANES) {
                for i in 0..K {
                    weights[i] = isa.widen(b.add(i * self.stride + n));
                }
                for g in 0..G {
                    let output = self.lines[g].output.add(self.column + n);
                    let old = if first { isa.splat(0.0) } else { isa.load(output) };
                    isa.store(output, self.sum::<I, K>(isa, g, k, &weights, old));
                }
            }
            if whole < self.columns {
                let rest = self.columns - whole;
                for i in 0..K {
                    weights[i] = isa.widen_part(b.add(i * self.stride + whole), rest);
                }
                for g in 0..G {
                    let output = self.lines[g].output.add(self.column + whole);
                    let old = if first { isa.splat(0.0) } else { isa.widen_part(output.cast_const(), rest) };
                    isa.narrow_part(output, self.sum::<I, K>(isa, g, k, &weights, old), rest);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn sum<I: Isa, const K: usize>(&self, isa: I, g: usize, k: usize, weights: &[I::V; K], old: I::V) -> I::V {
        let mut sum = old;
        for i in 0..K {
            // SAFETY: the caller's contract.
            let x = isa.splat(unsafe { *self.lines[g].input.add(k + i) });
            sum = isa.fma(x, weights[i], sum);
        }
        sum
    }
}
