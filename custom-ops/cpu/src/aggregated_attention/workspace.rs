//! A worker's memory: keys and values of a band, a head's constants, a tile's intermediates.

use super::unit::Unit;
use super::{Call, Head};
use crate::gather::{Log2Bias, Widen};
use crate::host::Host;
use crate::isa::Isa;
use crate::memory::{Memory, Sections};
use moh_operators::Element;
use moh_operators::Error;
use moh_operators::aggregated_attention::Problem;

/// Row stride for `dim` floats: a multiple of the vector length.
pub(super) fn pitch<I: Isa>(dim: usize) -> usize {
    dim.saturating_add(I::LANES - 1) / I::LANES * I::LANES
}

/// Sizes and offsets of the sections, in floats.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    /// Row stride of keys, values and queries.
    pub(super) pitch: usize,
    /// Stride of the band's grid rows, in keys. The border at the start of a row is also the right border of the
    /// previous one.
    pub(super) line: usize,
    /// Rows (queries) per tile, and the stride of transposed buffers, which have one query per lane.
    pub(super) width: usize,
    /// The band's normalised keys; 0 in the border and outside the grid.
    pub(super) keys: usize,
    /// The band's values; 0 in the border and outside the grid.
    pub(super) values: usize,
    /// (pooled, pitch): normalised keys.
    pub(super) pooled_keys: usize,
    /// (pooled, pitch)
    pub(super) pooled_values: usize,
    /// (head_dim, cells)
    pub(super) learnable_tokens: usize,
    /// (cells)
    pub(super) learnable_bias: usize,
    /// (cells): bias, times log2(e).
    pub(super) local_bias: usize,
    /// (pitch), 0 beyond head_dim.
    pub(super) embedding: usize,
    /// (cells + pooled, width): scores, then weights.
    pub(super) scores: usize,
    /// (cells, width): the learned part of the window's weights.
    pub(super) learnt: usize,
    /// (head_dim, width): queries, then the pooled tokens' part of the outputs.
    pub(super) columns: usize,
    /// (width, pitch): queries, then outputs.
    pub(super) rows: usize,
}

/// The memory and its layout.
pub(super) struct Workspace<'h> {
    floats: Memory<'h>,
    pub(super) layout: Layout,
    loaded: Option<Head>,
}

impl<'h> Workspace<'h> {
    /// Allocates memory for bands of `band` grid rows.
    pub(super) fn new<I: Isa>(p: &Problem, band: usize, host: &'h dyn Host) -> Result<Workspace<'h>, Error> {
        let mut sections = Sections::default();
        let (pitch, width) = (pitch::<I>(p.head_dim), I::LANES * I::TILE);
        let (reach, cells) = (p.window / 2, p.cells());
        let line = p.width + reach;
        let too_large = Error::OutOfMemory { bytes: usize::MAX };
        let lines = band.checked_add(2 * reach).and_then(|rows| rows.checked_mul(line));
        let keys = lines.and_then(|keys| keys.checked_add(reach)).ok_or(too_large.clone())?;
        let layout = Layout {
            pitch,
            line,
            width,
            keys: sections.add(keys, pitch)?,
            values: sections.add(keys, pitch)?,
            pooled_keys: sections.add(p.pooled, pitch)?,
            pooled_values: sections.add(p.pooled, pitch)?,
            learnable_tokens: sections.add(p.head_dim, cells)?,
            learnable_bias: sections.add(cells, 1)?,
            local_bias: sections.add(cells, 1)?,
            embedding: sections.add(pitch, 1)?,
            scores: sections.add(cells.checked_add(p.pooled).ok_or(too_large)?, width)?,
            learnt: sections.add(cells, width)?,
            columns: sections.add(p.head_dim, width)?,
            rows: sections.add(width, pitch)?,
        };
        Ok(Workspace { floats: sections.allocate(host)?, layout, loaded: None })
    }

    /// Pointer to the float at `offset`.
    pub(super) fn at(&self, offset: usize) -> *mut f32 {
        self.floats.at(offset)
    }

    /// Loads the head's pooled tokens and constants.
    pub(super) fn load_head<I: Isa, T: Element>(&mut self, call: &Call<'_, I, T>, head: Head) {
        if self.loaded == Some(head) {
            return;
        }
        let (p, layout, isa) = (call.problem, self.layout, call.isa);
        let (dim, cells, stride) = (p.head_dim, p.cells(), p.num_heads * p.head_dim);
        let Layout { pitch, .. } = layout;
        if p.pooled > 0 {
            let input = call.row(call.pooled_key, head, p.pooled, 0).as_ptr();
            let output = self.at(layout.pooled_keys);
            isa.vectorize(Unit { input, stride, rows: p.pooled, dim, output, pitch });
            let input = call.row(call.pooled_value, head, p.pooled, 0).as_ptr();
            let output = self.at(layout.pooled_values);
            isa.vectorize(Widen { input, stride, rows: p.pooled, dim, scale: [1.0; 2], output, pitch });
        }
        for (tensor, dim, output) in [
            (call.learnable_tokens, dim * cells, layout.learnable_tokens),
            (call.learnable_bias, cells, layout.learnable_bias),
            (call.query_embedding, dim, layout.embedding),
        ] {
            let input = tensor[head.index * dim..].as_ptr();
            let output = self.at(output);
            isa.vectorize(Widen { input, stride: 0, rows: 1, dim, scale: [1.0; 2], output, pitch: 0 });
        }
        let input = call.local_bias[head.index * cells..].as_ptr();
        let output = self.at(layout.local_bias);
        isa.vectorize(Widen { input, stride: 0, rows: 1, dim: cells, scale: Log2Bias, output, pitch: 0 });
        self.loaded = Some(head);
    }

    /// Loads the keys and values of the windows of the `selected` tokens (ascending); the band starts at grid row
    /// `first`.
    pub(super) fn load_band<I: Isa, T: Element>(
        &mut self,
        call: &Call<'_, I, T>,
        head: Head,
        first: usize,
        selected: &[u32],
    ) {
        let (p, reach) = (call.problem, call.problem.window / 2);
        let (mut next, mut end) = (0, 0);
        for &token in selected {
            // Tokens ascend, so most are in the same row as the previous one.
            if (token as usize) < end {
                continue;
            }
            let row = token as usize / p.width;
            end = (row + 1) * p.width;
            // Line `l` of the band is grid row `first + l - reach`.
            let lines = next.max(row - first)..row - first + 2 * reach + 1;
            next = lines.end;
            for line in lines {
                self.load_line(call, head, line, (first + line).checked_sub(reach).filter(|&row| row < p.height));
            }
        }
    }

    /// Fills a line of the band with a grid row, or with zeros.
    fn load_line<I: Isa, T: Element>(&mut self, call: &Call<'_, I, T>, head: Head, line: usize, row: Option<usize>) {
        let (p, Layout { pitch, .. }) = (call.problem, self.layout);
        let offset = (line * self.layout.line + p.window / 2) * pitch;
        let Some(row) = row else {
            for start in [self.layout.keys + offset, self.layout.values + offset] {
                self.floats.slice(start..start + p.width * pitch).fill(0.0);
            }
            return;
        };
        let (stride, dim) = (p.num_heads * p.head_dim, p.head_dim);
        let input = call.row(call.key, head, p.tokens(), row * p.width).as_ptr();
        let output = self.at(self.layout.keys + offset);
        call.isa.vectorize(Unit { input, stride, rows: p.width, dim, output, pitch });
        let input = call.row(call.value, head, p.tokens(), row * p.width).as_ptr();
        let output = self.at(self.layout.values + offset);
        call.isa.vectorize(Widen { input, stride, rows: p.width, dim, scale: [1.0; 2], output, pitch });
    }
}
