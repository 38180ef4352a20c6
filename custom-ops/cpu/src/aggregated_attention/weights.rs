//! Converts scores to weights and sums the pooled tokens' values.

use super::rows::{MAX_ROWS, Rows};
use super::workspace::Workspace;
use crate::isa::{Isa, Job};
use crate::product::product;
use moh_operators::aggregated_attention::Problem;

/// Softmax over window and pooled tokens. The window's weights get all factors (learned part, gate, 1/sum); the pooled
/// tokens' weighted values are summed into the workspace's columns without gate / sum, which is returned per row.
pub(super) struct Weights<'a> {
    pub(super) problem: &'a Problem,
    pub(super) workspace: &'a Workspace<'a>,
    pub(super) rows: &'a Rows,
    pub(super) vectors: usize,
}

impl Job for Weights<'_> {
    type Output = [f32; MAX_ROWS];

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> [f32; MAX_ROWS] {
        let mut factors = self.rows.gate;
        for lane in (0..self.vectors * I::LANES).step_by(I::LANES) {
            let mut sums = [0.0; MAX_ROWS];
            // SAFETY: a vector is shorter than a tile.
            unsafe { isa.store(sums.as_mut_ptr(), self.softmax(isa, lane)) }
            for i in 0..I::LANES {
                factors[lane + i] /= sums[i];
            }
            self.window(isa, lane, &factors);
        }
        match self.vectors {
            1 => self.pooled::<I, 1>(isa),
            2 => self.pooled::<I, 2>(isa),
            _ => self.pooled::<I, 3>(isa),
        }
        factors
    }
}

impl Weights<'_> {
    /// Converts the scores of the rows from `lane` on to weights, the largest being 1; returns their sums.
    #[inline(always)]
    fn softmax<I: Isa>(&self, isa: I, lane: usize) -> I::V {
        // Several independent accumulators hide the latency of additions.
        const CHAINS: usize = 4;
        let (p, layout) = (self.problem, self.workspace.layout);
        let len = p.cells() + p.pooled;
        let whole = len - len % CHAINS;
        // SAFETY: the scores are `len` rows of `width` floats.
        unsafe {
            let score = |j: usize| self.workspace.at(layout.scores).add(j * layout.width + lane);
            let mut max = [isa.splat(f32::NEG_INFINITY); CHAINS];
            for j in (0..whole).step_by(CHAINS) {
                for c in 0..CHAINS {
                    max[c] = isa.max(isa.load(score(j + c)), max[c]);
                }
            }
            for j in whole..len {
                max[0] = isa.max(isa.load(score(j)), max[0]);
            }
            let max = isa.max(isa.max(max[0], max[1]), isa.max(max[2], max[3]));
            let max = isa.finite_max(max);
            let mut sum = [isa.splat(0.0); CHAINS];
            for j in (0..whole).step_by(CHAINS) {
                for c in 0..CHAINS {
                    let weight = isa.exp2(isa.sub(isa.load(score(j + c)), max));
                    isa.store(score(j + c), weight);
                    sum[c] = isa.add(sum[c], weight);
                }
            }
            for j in whole..len {
                let weight = isa.exp2(isa.sub(isa.load(score(j)), max));
                isa.store(score(j), weight);
                sum[0] = isa.add(sum[0], weight);
            }
            isa.add(isa.add(sum[0], sum[1]), isa.add(sum[2], sum[3]))
        }
    }

    /// Adds the learned part to the window's weights and multiplies by the gates.
    #[inline(always)]
    fn window<I: Isa>(&self, isa: I, lane: usize, factors: &[f32; MAX_ROWS]) {
        let layout = self.workspace.layout;
        // SAFETY: scores and the learned part have at least `cells` rows of `width` floats; a tile has at most
        // MAX_ROWS rows.
        unsafe {
            let factor = isa.load(factors.as_ptr().add(lane));
            let gate = isa.load(self.rows.gate.as_ptr().add(lane));
            for cell in 0..self.problem.cells() {
                let weight = self.workspace.at(layout.scores).add(cell * layout.width + lane);
                let learnt = isa.load(self.workspace.at(layout.learnt).add(cell * layout.width + lane));
                let bias = isa.splat(*self.workspace.at(layout.learnable_bias).add(cell));
                let learnt = isa.mul(isa.add(learnt, bias), gate);
                isa.store(weight, isa.fma(isa.load(weight), factor, learnt));
            }
        }
    }

    #[inline(always)]
    fn pooled<I: Isa, const V: usize>(&self, isa: I) {
        let (p, layout) = (self.problem, self.workspace.layout);
        let values = (self.workspace.at(layout.pooled_values).cast_const(), layout.pitch);
        let output = self.workspace.at(layout.columns);
        // SAFETY: the workspace's sections have these sizes; `V` vectors of lanes are no more than its width.
        unsafe {
            let weights = self.workspace.at(layout.scores).add(p.cells() * layout.width);
            product::<I, V, true>(isa, p.head_dim, p.pooled, values, weights, output, layout.width, None);
        }
    }
}
