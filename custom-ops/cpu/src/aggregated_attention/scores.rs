//! Normalises queries and computes their scores with the window and the pooled tokens.

use super::rows::{MAX_ROWS, Rows};
use super::unit::{copy, reciprocals};
use super::workspace::Workspace;
use crate::isa::{Isa, Job, MAX_LANES};
use crate::product::product;
use moh_operators::Element;
use moh_operators::aggregated_attention::Problem;

/// Normalises the queries: unscaled into the workspace's columns; with embedding and scale into its rows, for the
/// scores.
///
/// Contract of the constructor: whole vectors of queries, valid for reading.
pub(super) struct Load<'a, T> {
    pub(super) queries: &'a [*const T],
    pub(super) problem: &'a Problem,
    pub(super) workspace: &'a Workspace<'a>,
    pub(super) rows: &'a Rows,
}

impl<T: Element> Job for Load<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let (dim, layout) = (self.problem.head_dim, self.workspace.layout);
        let (embedding, columns) = (self.workspace.at(layout.embedding), self.workspace.at(layout.columns));
        for lane in (0..self.queries.len()).step_by(I::LANES) {
            // SAFETY: the workspace holds `width` rows of `pitch` floats, `dim` columns and a padded embedding; the
            // constructor's contract.
            unsafe {
                let rows = self.workspace.at(layout.rows).add(lane * layout.pitch);
                let row = |i: usize| rows.add(i * layout.pitch);
                let squares = copy(isa, dim, |i| self.queries[lane + i], row);
                let factors = reciprocals(isa, squares);
                for d in (0..dim).step_by(I::LANES) {
                    let embedding = isa.load(embedding.add(d));
                    let mut block = [isa.splat(0.0); MAX_LANES];
                    for i in 0..I::LANES {
                        block[i] = isa.mul(isa.load(row(i).add(d)), isa.splat(factors[i]));
                        let shifted = isa.add(block[i], embedding);
                        isa.store(row(i).add(d), isa.mul(shifted, isa.splat(self.rows.scale[lane + i])));
                    }
                    isa.transpose(&mut block);
                    for i in 0..(dim - d).min(I::LANES) {
                        isa.store(columns.add((d + i) * layout.width + lane), block[i]);
                    }
                }
            }
        }
    }
}

/// Computes scores, times log2(e), adding the pooled tokens' to the bias already stored; and the learned part of the
/// window's weights.
pub(super) struct Scores<'a> {
    pub(super) problem: &'a Problem,
    pub(super) workspace: &'a Workspace<'a>,
    pub(super) rows: &'a Rows,
    pub(super) vectors: usize,
}

impl Job for Scores<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        match self.vectors {
            1 => self.products::<I, 1>(isa),
            2 => self.products::<I, 2>(isa),
            _ => self.products::<I, 3>(isa),
        }
        for vector in 0..self.vectors {
            self.window(isa, vector * I::LANES);
        }
    }
}

impl Scores<'_> {
    /// Products with operands that all rows share: learnable tokens and pooled keys.
    #[inline(always)]
    fn products<I: Isa, const V: usize>(&self, isa: I) {
        let (p, layout) = (self.problem, self.workspace.layout);
        let at = |offset: usize| self.workspace.at(offset);
        let (cells, width, queries) = (p.cells(), layout.width, at(layout.columns));
        // SAFETY: the workspace's sections have these sizes; `V` vectors of lanes are no more than its width.
        unsafe {
            let tokens = (at(layout.learnable_tokens).cast_const(), cells);
            product::<I, V, true>(isa, cells, p.head_dim, tokens, queries, at(layout.learnt), width, None);
            for d in 0..p.head_dim {
                let embedding = isa.splat(*at(layout.embedding).add(d));
                for v in 0..V {
                    let query = queries.add(d * width + v * I::LANES);
                    let scale = isa.load(self.rows.scale.as_ptr().add(v * I::LANES));
                    isa.store(query, isa.mul(isa.add(isa.load(query), embedding), scale));
                }
            }
            let keys = (at(layout.pooled_keys).cast_const(), layout.pitch);
            let scores = at(layout.scores).add(cells * width);
            let bias = [isa.splat(1.0); V];
            product::<I, V, false>(isa, p.pooled, p.head_dim, keys, queries, scores, width, Some(&bias));
        }
    }

    /// The window's scores for the rows from `lane` on; -inf outside the grid.
    #[inline(always)]
    fn window<I: Isa>(&self, isa: I, lane: usize) {
        let (p, layout) = (self.problem, self.workspace.layout);
        let (reach, outside) = ((p.window / 2) as f32, isa.splat(-1.0));
        let (height, width) = (isa.splat(p.height as f32), isa.splat(p.width as f32));
        // SAFETY: a tile has MAX_ROWS rows at most, each with a window in the band; the workspace's sections have these sizes.
        unsafe {
            let keys = self.workspace.at(layout.keys).cast_const();
            let queries = self.workspace.at(layout.rows).add(lane * layout.pitch).cast_const();
            let (y, x) = (isa.load(self.rows.y.as_ptr().add(lane)), isa.load(self.rows.x.as_ptr().add(lane)));
            let mut windows = [keys; MAX_LANES];
            for i in 0..I::LANES {
                windows[i] = keys.add(self.rows.window[lane + i]);
            }
            for cell in 0..p.cells() {
                let (row, column) = (cell / p.window, cell % p.window);
                let offset = (row * layout.line + column) * layout.pitch;
                let mut products = [isa.splat(0.0); MAX_LANES];
                for d in (0..layout.pitch).step_by(I::LANES) {
                    for i in 0..I::LANES {
                        let query = isa.load(queries.add(i * layout.pitch + d));
                        products[i] = isa.fma(query, isa.load(windows[i].add(offset + d)), products[i]);
                    }
                }
                let bias = isa.splat(*self.workspace.at(layout.local_bias).add(cell));
                let score = isa.add(isa.sums(products), bias);
                let y = isa.add(y, isa.splat(row as f32 - reach));
                let x = isa.add(x, isa.splat(column as f32 - reach));
                let score = isa.keep_less(outside, y, isa.keep_less(y, height, score));
                let score = isa.keep_less(outside, x, isa.keep_less(x, width, score));
                isa.store(self.workspace.at(layout.scores).add(cell * layout.width + lane), score);
            }
        }
    }
}

const _: () = assert!(MAX_ROWS.is_multiple_of(MAX_LANES));
