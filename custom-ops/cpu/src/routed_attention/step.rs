//! One tile of query rows against one block of keys: scores, running softmax, weighted values.
//!
//! Query rows lie in vector lanes: the tile's queries, scores and outputs are stored transposed, so that row maxima and
//! sums need no work across lanes, and keys and values are read by broadcasting, in place, whatever their layout.

use crate::isa::{Isa, Job, MAX_TILE};
use crate::product::product;

/// The work, and where it lies. All matrices are of f32; `width` floats separate the rows of those that are transposed.
#[derive(Clone, Copy)]
pub(super) struct Step {
    pub(super) width: usize,
    /// Vectors of query rows, from 1 to `Isa::TILE`.
    pub(super) vectors: usize,
    pub(super) keys: usize,
    pub(super) head_dim: usize,
    pub(super) value_dim: usize,
    /// (head_dim, width)
    pub(super) queries: *const f32,
    /// First key, and the stride of keys.
    pub(super) key: (*const f32, usize),
    /// First value, and the stride of values.
    pub(super) value: (*const f32, usize),
    /// (keys, width): scratch, or the bias where `biased`.
    pub(super) scores: *mut f32,
    pub(super) biased: bool,
    /// (value_dim, width): the sum of values so far; undefined where `first`.
    pub(super) output: *mut f32,
    pub(super) first: bool,
    /// (width): largest score so far, -inf at first.
    pub(super) max: *mut f32,
    /// (width): sum of weights so far, 0 at first.
    pub(super) sum: *mut f32,
    /// How many of the keys the lanes of each vector see at least, and at most: in ascending order.
    pub(super) limits: [(usize, usize); MAX_TILE],
    /// (width): how many of the keys each lane sees; undefined where every vector's least is its most.
    pub(super) visible: *const f32,
}

/// The result is the number of multiply-accumulate operations.
///
/// Contract of the constructor: all pointers are valid for the sizes above.
impl Job for Step {
    type Output = u64;

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> u64 {
        let mut ends = [0; MAX_TILE];
        let mut from = 0;
        for v in 0..self.vectors {
            // Whole groups, because the next segment then starts on a full register tile; the excess is masked.
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
    /// Scores of keys `from .. end` for the last `V` vectors.
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

    /// Turns the scores of keys `0 .. end` into weights; returns what the earlier output is to be multiplied with.
    #[inline(always)]
    unsafe fn softmax<I: Isa>(&self, isa: I, vector: usize, end: usize) -> I::V {
        // Independent chains: one would wait for each addition's latency.
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

    /// Adds the weighted values of keys `from .. end` for the last `V` vectors. The first call of a step has all vectors
    /// and also applies `decay`.
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
