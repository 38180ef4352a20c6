//! A few query rows against one block of keys, each read once and in place. Limited by memory bandwidth.
//!
//! Vector lanes run along the head dimension in the products, and along the keys in the softmax.

use crate::isa::{Isa, Job, MAX_LANES};
use moh_operators::Element;

/// Maximum rows per step.
pub(super) const ROWS: usize = 4;
/// Maximum keys per step.
pub(super) const KEYS: usize = 256;

/// The operands.
///
/// Contract of the constructor: all pointers are valid for the sizes given; pitches are multiples of [`MAX_LANES`].
#[derive(Clone, Copy)]
pub(super) struct RowStep<T> {
    /// 1 to [`ROWS`].
    pub(super) rows: usize,
    /// 1 to [`KEYS`].
    pub(super) keys: usize,
    pub(super) head_dim: usize,
    pub(super) value_dim: usize,
    /// (rows, query_pitch), padded with 0 after head_dim.
    pub(super) queries: *const f32,
    pub(super) query_pitch: usize,
    /// Pointer to the first key, and the stride of keys.
    pub(super) key: (*const T, usize),
    /// Pointer to the first value, and the stride of values.
    pub(super) value: (*const T, usize),
    /// (rows, KEYS): the bias on entry (0 without one), then scratch.
    pub(super) scores: *mut f32,
    /// (rows, value_pitch): sum of values so far, 0 at first.
    pub(super) output: *mut f32,
    pub(super) value_pitch: usize,
    /// (rows): largest score so far, -inf at first.
    pub(super) max: *mut f32,
    /// (rows): sum of weights so far, 0 at first.
    pub(super) sum: *mut f32,
    /// Number of visible keys of each row.
    pub(super) visible: [usize; ROWS],
}

impl<T: Element> Job for RowStep<T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        // SAFETY: the constructor's contract.
        unsafe {
            match self.rows {
                1 => self.step::<I, 1>(isa),
                2 => self.step::<I, 2>(isa),
                3 => self.step::<I, 3>(isa),
                _ => self.step::<I, ROWS>(isa),
            }
        }
    }
}

impl<T: Element> RowStep<T> {
    #[inline(always)]
    unsafe fn step<I: Isa, const R: usize>(&self, isa: I) {
        // SAFETY: the caller's contract.
        unsafe {
            let whole = self.keys - self.keys % 4;
            for j in (0..whole).step_by(4) {
                self.scores::<I, R, 4>(isa, j);
            }
            for j in whole..self.keys {
                self.scores::<I, R, 1>(isa, j);
            }
            let mut decay = [isa.splat(1.0); R];
            for r in 0..R {
                decay[r] = self.softmax(isa, r);
            }
            if self.visible[..R].iter().all(|&n| n == self.keys) {
                self.all_values::<I, R>(isa, 0, self.keys, decay);
            } else {
                // Row by row: a masked key must not contribute, since even 0 * NaN is NaN.
                for r in 0..R {
                    self.all_values::<I, 1>(isa, r, self.visible[r], [decay[r]]);
                }
            }
        }
    }

    /// Computes the scores of keys `j .. j + K`.
    #[inline(always)]
    unsafe fn scores<I: Isa, const R: usize, const K: usize>(&self, isa: I, j: usize) {
        let (key, stride) = self.key;
        let mut acc = [[isa.splat(0.0); K]; R];
        let whole = self.head_dim - self.head_dim % I::LANES;
        // SAFETY: the caller's contract; j + K <= keys.
        unsafe {
            let key = key.add(j * stride);
            for d in (0..self.head_dim).step_by(I::LANES) {
                let mut k = [isa.splat(0.0); K];
                for i in 0..K {
                    let key = key.add(i * stride + d);
                    k[i] = if d < whole { isa.widen(key) } else { isa.widen_part(key, self.head_dim - d) };
                }
                for r in 0..R {
                    let q = isa.load(self.queries.add(r * self.query_pitch + d));
                    for i in 0..K {
                        acc[r][i] = isa.fma(q, k[i], acc[r][i]);
                    }
                }
            }
            for r in 0..R {
                for i in 0..K {
                    *self.scores.add(r * KEYS + j + i) += isa.sum(acc[r][i]);
                }
            }
        }
    }

    /// Converts a row's scores to weights; returns the factor for its previous output.
    #[inline(always)]
    unsafe fn softmax<I: Isa>(&self, isa: I, row: usize) -> I::V {
        let n = self.visible[row];
        // SAFETY: the caller's contract; KEYS is a multiple of every LANES, so padding stays in bounds.
        unsafe {
            let scores = self.scores.add(row * KEYS);
            let padded = n.next_multiple_of(I::LANES);
            for j in n..padded {
                *scores.add(j) = f32::NEG_INFINITY;
            }
            let old = *self.max.add(row);
            let mut max = isa.splat(old);
            for j in (0..padded).step_by(I::LANES) {
                max = isa.max(isa.load(scores.add(j)), max);
            }
            let mut lanes = [f32::NEG_INFINITY; MAX_LANES];
            isa.store(lanes.as_mut_ptr(), max);
            let mut new = lanes[0];
            for lane in 1..I::LANES {
                new = if lanes[lane] > new { lanes[lane] } else { new };
            }
            *self.max.add(row) = new;

            let shift = isa.finite_max(isa.splat(new));
            let decay = isa.exp2(isa.sub(isa.splat(old), shift));
            let mut sum = isa.splat(0.0);
            for j in (0..padded).step_by(I::LANES) {
                let weight = isa.exp2(isa.sub(isa.load(scores.add(j)), shift));
                isa.store(scores.add(j), weight);
                sum = isa.add(sum, weight);
            }
            isa.store(lanes.as_mut_ptr(), decay);
            let total = self.sum.add(row);
            *total = *total * lanes[0] + isa.sum(sum);
            decay
        }
    }

    /// Adds the weighted values of the first `keys` keys to rows `row .. row + R`.
    #[inline(always)]
    unsafe fn all_values<I: Isa, const R: usize>(&self, isa: I, row: usize, keys: usize, decay: [I::V; R]) {
        const WIDE: usize = 4;
        let whole = self.value_dim - self.value_dim % I::LANES;
        let mut d = 0;
        // SAFETY: the caller's contract.
        unsafe {
            while d + WIDE * I::LANES <= whole {
                self.values::<I, R, WIDE>(isa, row, keys, d, I::LANES, &decay);
                d += WIDE * I::LANES;
            }
            while d < whole {
                self.values::<I, R, 1>(isa, row, keys, d, I::LANES, &decay);
                d += I::LANES;
            }
            if d < self.value_dim {
                self.values::<I, R, 1>(isa, row, keys, d, self.value_dim - d, &decay);
            }
        }
    }

    /// [`RowStep::all_values`] for `V` vectors of `lanes` elements, from element `d` on.
    #[inline(always)]
    unsafe fn values<I: Isa, const R: usize, const V: usize>(
        &self,
        isa: I,
        row: usize,
        keys: usize,
        d: usize,
        lanes: usize,
        decay: &[I::V; R],
    ) {
        let (value, stride) = self.value;
        let mut acc = [[isa.splat(0.0); V]; R];
        // SAFETY: the caller's contract.
        unsafe {
            let output = self.output.add(row * self.value_pitch + d);
            let weights = self.scores.add(row * KEYS);
            for r in 0..R {
                for v in 0..V {
                    acc[r][v] = isa.mul(isa.load(output.add(r * self.value_pitch + v * I::LANES)), decay[r]);
                }
            }
            for j in 0..keys {
                let value = value.add(j * stride + d);
                let mut x = [isa.splat(0.0); V];
                for v in 0..V {
                    let value = value.add(v * I::LANES);
                    x[v] = isa.widen_part(value, lanes);
                }
                for r in 0..R {
                    let weight = isa.splat(*weights.add(r * KEYS + j));
                    for v in 0..V {
                        acc[r][v] = isa.fma(weight, x[v], acc[r][v]);
                    }
                }
            }
            for r in 0..R {
                for v in 0..V {
                    isa.store(output.add(r * self.value_pitch + v * I::LANES), acc[r][v]);
                }
            }
        }
    }
}
