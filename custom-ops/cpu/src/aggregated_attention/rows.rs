//! Positions, scales and gates of the rows (queries) of a tile.

use super::workspace::Workspace;
use super::{Call, Head};
use crate::isa::{Isa, MAX_LANES, MAX_TILE};
use moh_operators::Element;
use std::f32::consts::LOG2_E;

/// The maximum number of rows of a tile.
pub(super) const MAX_ROWS: usize = MAX_LANES * MAX_TILE;

/// Per-row inputs of the computation. Unused rows, up to a whole vector, repeat the last one.
pub(super) struct Rows {
    /// Position in the grid: row and column.
    pub(super) y: [f32; MAX_ROWS],
    pub(super) x: [f32; MAX_ROWS],
    /// Offset in floats of the window's start in the band.
    pub(super) window: [usize; MAX_ROWS],
    /// Factor applied to the scores, times log2(e).
    pub(super) scale: [f32; MAX_ROWS],
    pub(super) gate: [f32; MAX_ROWS],
}

impl Rows {
    pub(super) fn new<I: Isa, T: Element>(
        call: &Call<'_, I, T>,
        head: Head,
        first: usize,
        tokens: &[u32],
        workspace: &Workspace<'_>,
    ) -> Rows {
        let (p, layout) = (call.problem, workspace.layout);
        let (mut rows, mut last) = (
            Rows {
                y: [0.0; MAX_ROWS],
                x: [0.0; MAX_ROWS],
                window: [0; MAX_ROWS],
                scale: [0.0; MAX_ROWS],
                gate: [0.0; MAX_ROWS],
            },
            0,
        );
        let mut y = tokens.first().map_or(0, |&token| token as usize / p.width);
        for i in 0..tokens.len().next_multiple_of(I::LANES) {
            last = tokens.get(i).map_or(last, |&token| token as usize);
            // Tokens ascend, so a step-by-step search is faster than a division.
            while last >= (y + 1) * p.width {
                y += 1;
            }
            let x = last - y * p.width;
            (rows.y[i], rows.x[i]) = (y as f32, x as f32);
            rows.window[i] = ((y - first) * layout.line + x) * layout.pitch;
            rows.scale[i] = call.query_scale[last * p.num_heads + head.index] * LOG2_E;
            rows.gate[i] = call.gates[call.block(head, p.tokens(), last)];
        }
        rows
    }
}
