//! One tile of query rows against one block of keys: scores, running softmax, weighted values.
//!
//! Each query row is a vector lane: the tile's queries, scores and outputs are transposed, so that row maxima and sums
//! need no operations across lanes. Keys and values are read by broadcasting, in place, in any layout.

use crate::isa::{Isa, Job, MAX_TILE};
use crate::product::product;

/// The operands. All matrices are f32; transposed ones have a row stride of `width` floats.
#[derive(Clone, Copy)]
pub(super) struct Step {
    pub(super) width: usize,
    /// Vectors of query rows: 1 to `Isa::TILE`.
    pub(super) vectors: usize,
    pub(super) keys: usize,
    pub(super) head_dim: usize,
    pub(super) value_dim: usize,
    /// (head_dim, width)
    pub(super) queries: *const f32,
    /// Pointer to the first key, and the stride of keys.
    pub(super) key: (*const f32, usize),
    /// Pointer to the first value, and the stride of values.
    pub(super) value: (*const f32, usize),
    /// (keys, width): scratch; holds the bias on entry if `biased`.
    pub(super) scores: *mut f32,
    pub(super) biased: bool,
    /// (value_dim, width): sum of values so far; uninitialised if `first`.
    pub(super) output: *mut f32,
    pub(super) first: bool,
    /// (width): largest score so far, -inf at first.
    pub(super) max: *mut f32,
    /// (width): sum of weights so far, 0 at first.
    pub(super) sum: *mut f32,
    /// For each vector, the minimum and maximum number of visible keys over its lanes; ascending.
    pub(super) limits: [(usize, usize); MAX_TILE],
    /// (width): number of visible keys of each lane; uninitialised if minimum and maximum are equal in every vector.
    pub(super) visible: *const f32,
}

/// Returns the number of multiply-accumulate operations.
///
/// Contract of the constructor: all pointers are valid for the sizes above.
impl Job for Step {
    type Output = u64;

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> u64 {
        let mut ends = [0; MAX_TILE];
        let mut from = 0;
        for v in 0..self.vectors {
            // Rounded up to whole groups, so that the next segment starts on a full register tile; the excess is
            // masked.
            let last = v + 1 == self.vectors;
            let most = self.limits[v].1;
            let end = if last { most } else { most.next_multiple_of(I::GROUP) };
            ends[v] = end.min(self.keys).max(from);
            // SAFETY: the constructor's contract; from <= ends[v] <= keys.
            unsafe {
                match self.vectors - v {
                    1 => self.scores::<I, 1>(isa, v, from, ends[v]),
                    2 => self.scores::<I, 2>(isa, v, from, ends[v]),
                    _ => self.scores::<I, 3>(isa, v, from, ends[v]),
                }
            }
            from = ends[v];
        }
        let mut decay = [isa.splat(1.0); MAX_TILE];
        for v in 0..self.vectors {
            // SAFETY: the constructor's contract.
            decay[v] = unsafe { self.softmax(isa, v, ends[v]) };
        }
        let mut macs = 0;
        let mut from = 0;
        for v in 0..self.vectors {
            // SAFETY: the constructor's contract; from <= ends[v] <= keys.
            unsafe {
                match self.vectors - v {
                    1 => self.values::<I, 1>(isa, v, from, ends[v], [decay[v]]),
                    2 => self.values::<I, 2>(isa, v, from, ends[v], [decay[v], decay[v + 1]]),
                    _ => self.values::<I, 3>(isa, v, from, ends[v], decay),
                }
            }
            from = ends[v];
            macs += ends[v] * I::LANES * (self.head_dim + self.value_dim);
        }
        macs as u64
    }
}

impl Step {
    /// Computes the scores of keys `from .. end` for the last `V` vectors.
    #[inline(always)]
    unsafe fn scores<I: Isa, const V: usize>(&self, isa: I, vector: usize, from: usize, end: usize) {
        let (key, stride) = self.key;
        let ones = [isa.splat(1.0); V];
        // SAFETY: the caller's contract.
        unsafe {
            product::<I, V, false>(
                isa,
                end - from,
                self.head_dim,
                (key.add(from * stride), stride),
                self.queries.add(vector * I::LANES),
                self.scores.add(from * self.width + vector * I::LANES),
                self.width,
                self.biased.then_some(&ones),
            );
        }
    }

    /// Converts the scores of keys `0 .. end` to weights; returns the factor for the previous output.
    #[inline(always)]
    unsafe fn softmax<I: Isa>(&self, isa: I, vector: usize, end: usize) -> I::V {
        // Several independent accumulators hide the latency of additions.
        const CHAINS: usize = 4;
        let whole = end - end % CHAINS;
        // SAFETY: the caller's contract.
        unsafe {
            let scores = self.scores.add(vector * I::LANES);
            let visible = isa.load(self.visible.add(vector * I::LANES));
            for j in self.limits[vector].0..end {
                let s = scores.add(j * self.width);
                isa.store(s, isa.keep_less(isa.splat(j as f32), visible, isa.load(s)));
            }
            let old = isa.load(self.max.add(vector * I::LANES));
            let mut max = [old; CHAINS];
            for j in (0..whole).step_by(CHAINS) {
                for c in 0..CHAINS {
                    max[c] = isa.max(isa.load(scores.add((j + c) * self.width)), max[c]);
                }
            }
            for j in whole..end {
                max[0] = isa.max(isa.load(scores.add(j * self.width)), max[0]);
            }
            let new = isa.max(isa.max(max[0], max[1]), isa.max(max[2], max[3]));
            isa.store(self.max.add(vector * I::LANES), new);

            let shift = isa.finite_max(new);
            let decay = isa.exp2(isa.sub(old, shift));
            let mut sum = [isa.splat(0.0); CHAINS];
            for j in (0..whole).step_by(CHAINS) {
                for c in 0..CHAINS {
                    let s = scores.add((j + c) * self.width);
                    let weight = isa.exp2(isa.sub(isa.load(s), shift));
                    isa.store(s, weight);
                    sum[c] = isa.add(sum[c], weight);
                }
            }
            for j in whole..end {
                let s = scores.add(j * self.width);
                let weight = isa.exp2(isa.sub(isa.load(s), shift));
                isa.store(s, weight);
                sum[0] = isa.add(sum[0], weight);
            }
            let sum = isa.add(isa.add(sum[0], sum[1]), isa.add(sum[2], sum[3]));
            let total = self.sum.add(vector * I::LANES);
            isa.store(total, isa.fma(isa.load(total), decay, sum));
            decay
        }
    }

    /// Adds the weighted values of keys `from .. end` for the last `V` vectors. The first call of a step covers all
    /// vectors and also applies `decay`.
    #[inline(always)]
    unsafe fn values<I: Isa, const V: usize>(&self, isa: I, vector: usize, from: usize, end: usize, decay: [I::V; V]) {
        let (value, stride) = self.value;
        let scale = match vector {
            0 if self.first => None,
            0 => Some(decay),
            _ if from == end => return,
            _ => Some([isa.splat(1.0); V]),
        };
        // SAFETY: the caller's contract.
        unsafe {
            product::<I, V, true>(
                isa,
                self.value_dim,
                end - from,
                (value.add(from * stride), stride),
                self.scores.add(from * self.width + vector * I::LANES),
                self.output.add(vector * I::LANES),
                self.width,
                scale.as_ref(),
            );
        }
    }
}
