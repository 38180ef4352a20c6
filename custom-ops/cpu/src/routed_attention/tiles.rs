//! Many query rows: tiles of rows against blocks of keys.

use super::call::{Call, Head};
use super::rows::RowMemory;
use super::step::Step;
use crate::gather::{Fill, Gather, Log2Bias, Scatter, Widen};
use crate::host::Host;
use crate::isa::{Isa, MAX_LANES, MAX_TILE};
use crate::memory::{Memory, Sections, pitch};
use moh_operators::Error;
use moh_operators::routed_attention::Problem;
use moh_operators::{DType, Element};
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// Tile sizes that fit the caches.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tiling {
    /// Rows per tile.
    pub(super) width: usize,
    /// Keys per block.
    pub(super) keys: usize,
    /// Rows whose queries and outputs a worker holds.
    pub(super) chunk: usize,
}

impl Tiling {
    pub(super) fn new<I: Isa>(p: &Problem) -> Tiling {
        /// Floats of queries and outputs per worker: they fit the L2 cache.
        const CHUNK_FLOATS: usize = 256 << 10;
        const MIN_TILES: usize = 2;
        let width = I::LANES * I::TILE;
        let tiles = (CHUNK_FLOATS / p.head_dim.saturating_add(p.value_dim).max(1) / width).max(MIN_TILES);
        Tiling { width, keys: 128, chunk: tiles * width }
    }
}

/// A worker's memory.
pub(super) struct TileMemory<'h> {
    floats: Memory<'h>,
    tiling: Tiling,
    queries: usize,
    outputs: usize,
    max: usize,
    sum: usize,
    keys: usize,
    values: usize,
    scores: usize,
    lanes: usize,
}

impl<'h> TileMemory<'h> {
    pub(super) fn new(p: &Problem, tiling: Tiling, host: &'h dyn Host) -> Result<TileMemory<'h>, Error> {
        let mut sections = Sections::default();
        let keys = tiling.keys.min(p.kv_len);
        Ok(TileMemory {
            queries: sections.add(tiling.chunk, p.head_dim)?,
            outputs: sections.add(tiling.chunk, p.value_dim)?,
            max: sections.add(tiling.chunk, 1)?,
            sum: sections.add(tiling.chunk, 1)?,
            keys: sections.add(keys, pitch(p.head_dim))?,
            values: sections.add(keys, pitch(p.value_dim))?,
            scores: sections.add(keys, tiling.width)?,
            lanes: sections.add(tiling.width.max(keys), 1)?,
            floats: sections.allocate(host)?,
            tiling,
        })
    }
}

/// Computes `rows` (ascending, at most a chunk) of one KV head. Returns the number of multiply-accumulate operations.
pub(super) fn attend<I: Isa, T: Element>(
    call: &Call<'_, I, T>,
    head: Head,
    rows: &[u32],
    memory: &mut TileMemory<'_>,
    spare: &mut RowMemory<'_>,
) -> u64 {
    let p = call.problem;
    let mut chunk = Chunk { call, head, rows, memory };
    chunk.load_queries();
    let visible = rows.last().map_or(0, |&row| call.visible(head, row));
    let mut macs = 0;
    let step = chunk.memory.tiling.keys;
    for start in (0..visible).step_by(step) {
        let end = (start + step).min(visible);
        macs += chunk.block(start, end - start);
    }
    let finite = chunk.store_outputs();
    if p.is_causal && !finite {
        macs += repair(call, head, rows, spare);
    }
    macs
}

/// Recomputes rows that are not finite, with f32 vectors and only their visible keys: in a tile, masked keys get weight 0, but the
/// product of 0 with NaN or infinity is NaN, and numbers rounded to bf16 may be infinite.
pub(super) fn repair<I: Isa, T: Element>(
    call: &Call<'_, I, T>,
    head: Head,
    rows: &[u32],
    memory: &mut RowMemory<'_>,
) -> u64 {
    let mut macs = 0;
    for &row in rows {
        let output = call.output(head, row);
        // SAFETY: the row's output was written just now, and belongs to this item.
        let output = unsafe { std::slice::from_raw_parts(output, call.problem.value_dim) };
        if output.iter().any(|x| !x.to_f32().is_finite()) {
            macs += memory.attend(call, head, &[row], 0..call.length(head.batch));
            memory.store(call, head, &[row]);
        }
    }
    macs
}

struct Chunk<'a, 'h, I, T> {
    call: &'a Call<'a, I, T>,
    head: Head,
    rows: &'a [u32],
    memory: &'a mut TileMemory<'h>,
}

impl<I: Isa, T: Element> Chunk<'_, '_, I, T> {
    fn at(&self, offset: usize) -> *mut f32 {
        self.memory.floats.at(offset)
    }

    fn load_queries(&mut self) {
        let (call, head, width) = (self.call, self.head, self.memory.tiling.width);
        let dim = call.problem.head_dim;
        let queries = self.at(self.memory.queries);
        let (max, sum) = (self.memory.max, self.memory.sum);
        let rows = self.memory.tiling.chunk;
        self.memory.floats.slice(max..max + rows).fill(f32::NEG_INFINITY);
        self.memory.floats.slice(sum..sum + rows).fill(0.0);
        let mut pointers = Vec::with_capacity(width);
        for (i, rows) in self.rows.chunks(width).enumerate() {
            pointers.clear();
            pointers.extend(rows.iter().map(|&row| call.query(head, row)));
            let factors = [call.problem.scale, LOG2_E];
            // SAFETY: a chunk has `width * dim` floats for each of its tiles.
            let output = unsafe { queries.add(i * width * dim) };
            call.isa.vectorize(Gather { rows: &pointers, dim, scale: factors, output, width });
        }
    }

    /// Processes all tiles against keys `start .. start + keys`.
    fn block(&mut self, start: usize, keys: usize) -> u64 {
        let (call, head, width) = (self.call, self.head, self.memory.tiling.width);
        let p = call.problem;
        // A key is read contiguously, but values are read in pieces across many keys, so strided values are copied
        // sooner. (With up to 16 tiles, reading keys where they are takes 0.95 to 1.0 of the time of copying them first.)
        let key = self.panel(call.keys(head, start), keys, p.head_dim, 16, self.memory.keys);
        let value = self.panel(call.values(head, start), keys, p.value_dim, 1, self.memory.values);
        let queries = self.at(self.memory.queries);
        let outputs = self.at(self.memory.outputs);
        let (max, sum) = (self.at(self.memory.max), self.at(self.memory.sum));
        let scores = self.at(self.memory.scores);
        let lanes = self.at(self.memory.lanes);
        let mut macs = 0;
        for (i, rows) in self.rows.chunks(width).enumerate() {
            let seen = |row: &u32| call.visible(head, *row).saturating_sub(start).min(keys);
            let keys = rows.last().map_or(0, seen);
            if keys == 0 {
                continue;
            }
            let mut limits = [(0, 0); MAX_TILE];
            for (limits, rows) in limits.iter_mut().zip(rows.chunks(I::LANES)) {
                *limits = (rows.first().map_or(0, seen), rows.last().map_or(0, seen));
            }
            let biased = fill_bias(call, head, rows, start..start + keys, scores, lanes, width);
            if limits[0].0 < keys {
                for (lane, row) in rows.iter().enumerate() {
                    // SAFETY: `lanes` has a float for each of the tile's rows.
                    unsafe { lanes.add(lane).write(seen(row) as f32) }
                }
            }
            // SAFETY: a chunk has these sizes for each of its tiles.
            let (queries, output, max, sum) = unsafe {
                let lane = i * width;
                (queries.add(lane * p.head_dim), outputs.add(lane * p.value_dim), max.add(lane), sum.add(lane))
            };
            macs += call.isa.vectorize(Step {
                width,
                vectors: rows.len().div_ceil(I::LANES),
                keys,
                head_dim: p.head_dim,
                value_dim: p.value_dim,
                queries,
                key,
                value,
                scores,
                biased,
                output,
                first: start == 0,
                max,
                sum,
                limits,
                visible: lanes,
            });
        }
        macs
    }

    /// Rows of `dim` elements as f32: in place if they are f32 and contiguous, or if a copy would be used by at most
    /// `few` tiles; otherwise converted into a copy.
    fn panel(
        &self,
        (input, stride): (*const T, usize),
        rows: usize,
        dim: usize,
        few: usize,
        copy: usize,
    ) -> (*const f32, usize) {
        let tiles = self.rows.len().div_ceil(self.memory.tiling.width);
        if T::DTYPE == DType::F32 && (stride == dim || tiles <= few) {
            return (input.cast(), stride);
        }
        let (output, pitch) = (self.at(copy), pitch(dim));
        self.call.isa.vectorize(Widen { input, stride, rows, dim, scale: [1.0, 1.0], output, pitch });
        (output, pitch)
    }

    /// Writes the output rows. Returns false if an element may not be finite.
    fn store_outputs(&mut self) -> bool {
        let (call, head, width) = (self.call, self.head, self.memory.tiling.width);
        let dim = call.problem.value_dim;
        let outputs = self.at(self.memory.outputs);
        let sum = self.memory.sum;
        let mut finite = true;
        let mut pointers = Vec::with_capacity(width);
        for (i, rows) in self.rows.chunks(width).enumerate() {
            let sums = self.memory.floats.slice(sum + i * width..sum + (i + 1) * width);
            pointers.clear();
            for (sum, &row) in sums.iter_mut().zip(rows) {
                pointers.push(call.output(head, row));
                *sum = call.gate(head, row) / *sum;
            }
            // SAFETY: a chunk has `width * dim` floats for each of its tiles.
            let input = unsafe { outputs.add(i * width * dim) };
            finite &= call.isa.vectorize(Scatter { rows: &pointers, dim, factors: sums.as_ptr(), input, width });
            for (factor, &row) in sums.iter().zip(rows) {
                // The factor is infinite only if the sum is 0, since the weight of the largest score is 1.
                if factor.is_infinite() {
                    call.clear(head, row..row + 1);
                }
            }
        }
        finite
    }
}

/// Initialises the scores with the rows' bias; returns false if there is none.
pub(super) fn fill_bias<I: Isa, T: Element>(
    call: &Call<'_, I, T>,
    head: Head,
    rows: &[u32],
    keys: Range<usize>,
    scores: *mut f32,
    lanes: *mut f32,
    width: usize,
) -> bool {
    let mut pointers = [std::ptr::null(); MAX_LANES * MAX_TILE];
    let Some((_, stride)) = call.bias(head, rows[0], keys.start) else { return false };
    for (pointer, &row) in pointers.iter_mut().zip(rows) {
        *pointer = call.bias(head, row, keys.start).map_or(std::ptr::null(), |(bias, _)| bias.as_ptr());
    }
    let pointers = &pointers[..rows.len()];
    let vectors = rows.len().div_ceil(I::LANES);
    let rows = keys.len();
    let shared = pointers.iter().all(|&pointer| pointer == pointers[0]);
    if stride == 1 && !shared {
        call.isa.vectorize(Gather { rows: pointers, dim: rows, scale: Log2Bias, output: scores, width });
    } else if stride == 1 {
        call.isa.vectorize(Widen {
            input: pointers[0],
            stride: 0,
            rows: 1,
            dim: rows,
            scale: Log2Bias,
            output: lanes,
            pitch: 0,
        });
        call.isa.vectorize(Fill { input: lanes, by_row: true, rows, vectors, output: scores, width });
    } else {
        for (lane, &bias) in pointers.iter().enumerate() {
            // SAFETY: the pointer is into a row's bias, and `lanes` has a float for each row.
            unsafe { lanes.add(lane).write(Log2Bias::of((*bias).to_f32())) }
        }
        call.isa.vectorize(Fill { input: lanes, by_row: false, rows, vectors, output: scores, width });
    }
    true
}
