//! Writes the rows of the output.

use super::rows::{MAX_ROWS, Rows};
use super::workspace::Workspace;
use crate::isa::{Isa, Job, MAX_LANES};
use moh_operators::Element;
use moh_operators::aggregated_attention::Problem;
use std::ops::Range;

/// Transposes the pooled tokens' part to rows, multiplies it by the rows' factors, and adds the weighted values of the
/// window. Returns the number of window cells inside the grid.
///
/// Contract of the constructor: the outputs are valid for writing `head_dim` elements.
pub(super) struct Output<'a, T> {
    pub(super) outputs: &'a [*mut T],
    pub(super) problem: &'a Problem,
    pub(super) workspace: &'a Workspace<'a>,
    pub(super) rows: &'a Rows,
    pub(super) factors: &'a [f32; MAX_ROWS],
}

impl<T: Element> Job for Output<'_, T> {
    type Output = usize;

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> usize {
        for lane in (0..self.outputs.len()).step_by(I::LANES) {
            self.transpose(isa, lane);
        }
        let (p, vectors) = (self.problem, self.workspace.layout.pitch / I::LANES);
        let mut inside = 0;
        for row in 0..self.outputs.len() {
            let cells = [cells(self.rows.y[row], p.height, p.window), cells(self.rows.x[row], p.width, p.window)];
            let mut vector = 0;
            while vector + 4 <= vectors {
                self.window::<I, 4>(isa, row, vector, &cells);
                vector += 4;
            }
            if vector + 2 <= vectors {
                self.window::<I, 2>(isa, row, vector, &cells);
                vector += 2;
            }
            if vector < vectors {
                self.window::<I, 1>(isa, row, vector, &cells);
            }
            inside += cells[0].len() * cells[1].len();
        }
        inside
    }
}

/// The rows (or columns) of a window that are inside a grid of `size` rows; `at` is the window's centre.
#[inline(always)]
fn cells(at: f32, size: usize, window: usize) -> Range<usize> {
    let (at, reach) = (at as usize, window / 2);
    reach.saturating_sub(at)..window.min(size + reach - at)
}

impl<T: Element> Output<'_, T> {
    #[inline(always)]
    fn transpose<I: Isa>(&self, isa: I, lane: usize) {
        let (dim, layout) = (self.problem.head_dim, self.workspace.layout);
        // SAFETY: the workspace has `dim` columns and `width` rows, in which whole vectors fit.
        unsafe {
            let columns = self.workspace.at(layout.columns).add(lane);
            let rows = self.workspace.at(layout.rows).add(lane * layout.pitch);
            let factors = isa.load(self.factors.as_ptr().add(lane));
            for d in (0..dim).step_by(I::LANES) {
                let mut block = [isa.splat(0.0); MAX_LANES];
                for i in 0..(dim - d).min(I::LANES) {
                    block[i] = isa.mul(isa.load(columns.add((d + i) * layout.width)), factors);
                }
                isa.transpose(&mut block);
                for i in 0..I::LANES {
                    isa.store(rows.add(i * layout.pitch + d), block[i]);
                }
            }
        }
    }

    /// Computes and stores `V` vectors of a row.
    #[inline(always)]
    fn window<I: Isa, const V: usize>(&self, isa: I, row: usize, vector: usize, cells: &[Range<usize>; 2]) {
        let (p, layout) = (self.problem, self.workspace.layout);
        let d = vector * I::LANES;
        // SAFETY: the row's window is in the band; the workspace's sections have these sizes; the constructor's
        // contract.
        unsafe {
            let values = self.workspace.at(layout.values).add(self.rows.window[row] + d);
            let weights = self.workspace.at(layout.scores).add(row);
            let pooled = self.workspace.at(layout.rows).add(row * layout.pitch + d);
            let mut sum = [isa.splat(0.0); V];
            for v in 0..V {
                sum[v] = isa.load(pooled.add(v * I::LANES));
            }
            for y in cells[0].clone() {
                for x in cells[1].clone() {
                    let weight = isa.splat(*weights.add((y * p.window + x) * layout.width));
                    let value = values.add((y * layout.line + x) * layout.pitch);
                    for v in 0..V {
                        sum[v] = isa.fma(weight, isa.load(value.add(v * I::LANES)), sum[v]);
                    }
                }
            }
            for v in 0..V {
                let (output, rest) = (self.outputs[row].add(d + v * I::LANES), p.head_dim - (d + v * I::LANES));
                if rest >= I::LANES {
                    isa.narrow(output, sum[v]);
                } else {
                    isa.narrow_part(output, sum[v], rest);
                }
            }
        }
    }
}
