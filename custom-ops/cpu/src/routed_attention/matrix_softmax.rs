//! Running softmax between the two products on a matrix unit.

use super::matrix_pack::{KEYS, WIDTH};
use crate::isa::{Isa, Job, MAX_LANES};
use crate::terms::split;

/// Converts a tile's scores to weights: pairs of consecutive keys, split into `TERMS` bf16 terms.
///
/// Contract of the constructor: vectors have [`MAX_LANES`] lanes; all pointers are valid for the sizes given.
pub(super) struct Softmax<const TERMS: usize> {
    /// Factor of the scores, for powers of two instead of e.
    pub(super) factor: f32,
    /// For each vector, the minimum and maximum number of visible keys over its lanes; ascending.
    pub(super) limits: [(usize, usize); 2],
    /// Number of keys to write weights for, even; 0 for keys that do not exist.
    pub(super) padded: usize,
    /// (keys, WIDTH)
    pub(super) scores: *mut f32,
    /// (keys, WIDTH): bias to add to the scores.
    pub(super) bias: Option<*const f32>,
    /// (WIDTH): number of visible keys of each lane; uninitialised if minimum and maximum are equal in every vector.
    pub(super) visible: *const f32,
    /// (TERMS, KEYS / 2, WIDTH), of which padded / 2 rows per term are written.
    pub(super) weights: *mut f32,
    /// (WIDTH): largest score so far, -inf at first.
    pub(super) max: *mut f32,
    /// (WIDTH): sum of weights so far, 0 at first.
    pub(super) sum: *mut f32,
    /// (rows, WIDTH): sum of values so far, which is rescaled when the largest score grows.
    pub(super) output: Option<*mut f32>,
    pub(super) rows: usize,
}

impl<const TERMS: usize> Job for Softmax<TERMS> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        for (v, &(least, most)) in self.limits.iter().enumerate() {
            // SAFETY: the constructor's contract.
            unsafe {
                let max = match self.bias {
                    Some(bias) => self.largest::<I, true>(isa, v, least, most, bias),
                    None => self.largest::<I, false>(isa, v, least, most, std::ptr::null()),
                };
                self.weigh(isa, v, most, max);
            }
        }
    }
}

/// Several independent accumulators hide the latency of instructions.
const CHAINS: usize = 4;

impl<const TERMS: usize> Softmax<TERMS> {
    #[inline(always)]
    unsafe fn score<I: Isa, const BIASED: bool>(
        &self,
        isa: I,
        key: usize,
        lane: usize,
        factor: I::V,
        bias: *const f32,
    ) -> I::V {
        // SAFETY: the caller's contract.
        unsafe {
            let score = isa.load(self.scores.add(key * WIDTH + lane));
            match BIASED {
                true => isa.fma(score, factor, isa.load(bias.add(key * WIDTH + lane))),
                false => isa.mul(score, factor),
            }
        }
    }

    #[inline(always)]
    unsafe fn weight<I: Isa>(&self, isa: I, key: usize, lane: usize, shift: I::V) -> I::V {
        // SAFETY: the caller's contract.
        unsafe { isa.exp2(isa.sub(isa.load(self.scores.add(key * WIDTH + lane)), shift)) }
    }

    /// Writes the weights of keys `key` and `key + 1`.
    #[inline(always)]
    unsafe fn keep<I: Isa>(&self, isa: I, key: usize, lane: usize, first: I::V, second: I::V) {
        let terms: [_; TERMS] = split(isa, first, second);
        for (term, pairs) in terms.into_iter().enumerate() {
            // SAFETY: the caller's contract.
            unsafe { isa.store(self.weights.add((term * (KEYS / 2) + key / 2) * WIDTH + lane), pairs) }
        }
    }

    /// Scales and masks the scores; returns the largest.
    #[inline(always)]
    unsafe fn largest<I: Isa, const BIASED: bool>(
        &self,
        isa: I,
        vector: usize,
        least: usize,
        most: usize,
        bias: *const f32,
    ) -> I::V {
        let factor = isa.splat(self.factor);
        // SAFETY: the caller's contract.
        unsafe {
            let lane = vector * MAX_LANES;
            let mut max = [isa.load(self.max.add(lane)); CHAINS];
            let whole = least - least % CHAINS;
            for j in (0..whole).step_by(CHAINS) {
                for c in 0..CHAINS {
                    let score = self.score::<I, BIASED>(isa, j + c, lane, factor, bias);
                    isa.store(self.scores.add((j + c) * WIDTH + lane), score);
                    max[c] = isa.max(score, max[c]);
                }
            }
            let visible = isa.load(self.visible.add(lane));
            for j in whole..most {
                let mut score = self.score::<I, BIASED>(isa, j, lane, factor, bias);
                if j >= least {
                    score = isa.keep_less(isa.splat(j as f32), visible, score);
                }
                isa.store(self.scores.add(j * WIDTH + lane), score);
                max[0] = isa.max(score, max[0]);
            }
            isa.max(isa.max(max[0], max[1]), isa.max(max[2], max[3]))
        }
    }

    /// Writes the weights of keys `0 .. end`, and 0 for the padding.
    #[inline(always)]
    unsafe fn weigh<I: Isa>(&self, isa: I, vector: usize, end: usize, new: I::V) {
        // SAFETY: the caller's contract.
        unsafe {
            let lane = vector * MAX_LANES;
            let max = self.max.add(lane);
            let shift = isa.finite_max(new);
            let decay = isa.exp2(isa.sub(isa.load(max), shift));
            isa.store(max, new);
            let mut sum = [isa.splat(0.0); CHAINS];
            let whole = end - end % CHAINS;
            for j in (0..whole).step_by(CHAINS) {
                let mut weights = [isa.splat(0.0); CHAINS];
                for c in 0..CHAINS {
                    weights[c] = self.weight(isa, j + c, lane, shift);
                    sum[c] = isa.add(sum[c], weights[c]);
                }
                self.keep(isa, j, lane, weights[0], weights[1]);
                self.keep(isa, j + 2, lane, weights[2], weights[3]);
            }
            for j in (whole..self.padded).step_by(2) {
                let mut weights = [isa.splat(0.0); 2];
                for c in 0..2 {
                    if j + c < end {
                        weights[c] = self.weight(isa, j + c, lane, shift);
                        sum[c] = isa.add(sum[c], weights[c]);
                    }
                }
                self.keep(isa, j, lane, weights[0], weights[1]);
            }
            let new = isa.add(isa.add(sum[0], sum[1]), isa.add(sum[2], sum[3]));
            let sum = self.sum.add(lane);
            isa.store(sum, isa.fma(isa.load(sum), decay, new));
            // Lanes whose largest score did not change keep their sums: their decay is 1.
            if let Some(output) = self.output
                && isa.sum(isa.sub(isa.splat(1.0), decay)) != 0.0
            {
                for row in 0..self.rows {
                    let output = output.add(row * WIDTH + lane);
                    isa.store(output, isa.mul(isa.load(output), decay));
                }
            }
        }
    }
}
