//! Many rows on a bf16 matrix unit: tiles of 32 query rows against blocks of keys.
//!
//! As in [`super::tiles`], each query row is a lane: scores are keys times queries, outputs are transposed values
//! times weights. The unit reads pairs along the inner dimension. Elements of other types are split into several bf16
//! terms; so are the softmax weights, which are rounded. Their sums use the f32 weights.

use super::call::{Call, Head};
use super::matrix_pack::{KEYS, PackKeys, PackQueries, PackValues, WIDTH};
use super::matrix_softmax::Softmax;
use super::rows::RowMemory;
use super::tiles::{Tiling, fill_bias, repair};
use crate::gather::Scatter;
use crate::host::Host;
use crate::isa::Isa;
use crate::isa::unit::{Lines, TILE, TileProduct};
use crate::isa::{MatrixUnit, Multiplier};
use crate::memory::{Memory, Sections};
use moh_operators::Error;
use moh_operators::routed_attention::Problem;
use moh_operators::{Element, Float};
use std::f32::consts::LOG2_E;

/// Minimum query rows per KV head for splitting or rounding keys and values to bf16 terms: with fewer rows that costs more
/// than the products save. (Measured time in f32 relative to f32 vectors, with 512 and 2048 keys: 0.95 to 1.8 with 32
/// rows, 0.78 to 1.08 with 64, 0.65 to 0.92 with 128; rounded, as many keys as rows, on AVX512-BF16: 0.90 to 1.10 with 24 to 48.)
pub(super) const ROWS_TO_SPLIT_KEYS_FOR: usize = 64;
/// Row stride of transposed matrices, in bytes.
const STRIDE: usize = WIDTH * size_of::<f32>();
/// Distance between blocks of 32 inner indices (16 pairs), in bytes.
const STEP: usize = TILE * STRIDE;

/// Tile sizes that fit the caches.
pub(super) fn tiling(p: &Problem, terms: usize) -> Tiling {
    /// Floats of queries and outputs per worker: they fit the L2 cache.
    const CHUNK_FLOATS: usize = 192 << 10;
    const MIN_TILES: usize = 2;
    let tiles = (CHUNK_FLOATS / (terms * pairs(p.head_dim) + rows(p.value_dim)) / WIDTH).max(MIN_TILES);
    Tiling { width: WIDTH, keys: KEYS, chunk: tiles * WIDTH }
}

/// Pairs per query or key, padded to whole blocks.
fn pairs(dim: usize) -> usize {
    dim.div_ceil(2 * TILE).saturating_mul(TILE).max(TILE)
}

/// Rows of an output, padded to whole tiles.
fn rows(dim: usize) -> usize {
    dim.div_ceil(TILE).saturating_mul(TILE).max(TILE)
}

/// A worker's memory. A pair of bfloat16 takes the space of one float.
pub(super) struct MatrixMemory<'h> {
    floats: Memory<'h>,
    chunk: usize,
    /// Per tile: (terms, pairs, WIDTH).
    queries: usize,
    /// Per tile: (rows, WIDTH).
    outputs: usize,
    max: usize,
    sum: usize,
    /// (terms, KEYS, pairs), in tiles.
    keys: usize,
    /// (terms, rows, KEYS / 2), in tiles.
    values: usize,
    /// (KEYS, WIDTH)
    scores: usize,
    /// (KEYS, WIDTH)
    bias: usize,
    /// (terms, KEYS / 2, WIDTH)
    weights: usize,
    lanes: usize,
}

impl<'h> MatrixMemory<'h> {
    pub(super) fn new(p: &Problem, terms: usize, chunk: usize, host: &'h dyn Host) -> Result<MatrixMemory<'h>, Error> {
        let chunk = chunk.next_multiple_of(WIDTH);
        let mut sections = Sections::default();
        Ok(MatrixMemory {
            chunk,
            queries: sections.add(chunk, terms * pairs(p.head_dim))?,
            outputs: sections.add(chunk, rows(p.value_dim))?,
            max: sections.add(chunk, 1)?,
            sum: sections.add(chunk, 1)?,
            keys: sections.add(terms * KEYS, pairs(p.head_dim))?,
            values: sections.add(rows(p.value_dim), terms * KEYS / 2)?,
            scores: sections.add(KEYS, WIDTH)?,
            bias: sections.add(if p.bias_strides.is_some() { KEYS } else { 0 }, WIDTH)?,
            weights: sections.add(terms * KEYS / 2, WIDTH)?,
            lanes: sections.add(KEYS.max(WIDTH), 1)?,
            floats: sections.allocate(host)?,
        })
    }
}

/// As [`super::tiles::attend`], with numbers of as many bf16 terms.
pub(super) fn attend<I: Isa, T: Element>(
    (unit, terms): (MatrixUnit, usize),
    call: &Call<'_, I, T>,
    head: Head,
    rows: &[u32],
    memory: &mut MatrixMemory<'_>,
    spare: &mut RowMemory<'_>,
) -> u64 {
    match terms {
        1 => attend_terms::<I, T, 1>(unit, call, head, rows, memory, spare),
        2 => attend_terms::<I, T, 2>(unit, call, head, rows, memory, spare),
        _ => attend_terms::<I, T, 3>(unit, call, head, rows, memory, spare),
    }
}

fn attend_terms<I: Isa, T: Element, const TERMS: usize>(
    unit: MatrixUnit,
    call: &Call<'_, I, T>,
    head: Head,
    rows: &[u32],
    memory: &mut MatrixMemory<'_>,
    spare: &mut RowMemory<'_>,
) -> u64 {
    let p = call.problem;
    let visible = rows.last().map_or(0, |&row| call.visible(head, row));
    let mut chunk = Chunk::<I, T, TERMS> { multiplier: unit.start(), call, head, rows, memory };
    chunk.load_queries();
    let mut macs = 0;
    for start in (0..visible).step_by(KEYS) {
        macs += chunk.block(start, KEYS.min(visible - start));
    }
    let finite = chunk.store_outputs();
    drop(chunk);
    // With several bf16 terms an infinity yields NaN, even if the exact result does not; rounding can yield an infinity.
    if (p.is_causal || T::FLOAT != Float::BF16) && !finite {
        macs += repair(call, head, rows, spare);
    }
    macs
}

struct Chunk<'a, 'h, I, T, const TERMS: usize> {
    multiplier: Multiplier,
    call: &'a Call<'a, I, T>,
    head: Head,
    rows: &'a [u32],
    memory: &'a mut MatrixMemory<'h>,
}

impl<I: Isa, T: Element, const TERMS: usize> Chunk<'_, '_, I, T, TERMS> {
    fn at(&self, offset: usize) -> *mut f32 {
        self.memory.floats.at(offset)
    }

    fn load_queries(&mut self) {
        let (call, head) = (self.call, self.head);
        let (max, sum, rows) = (self.memory.max, self.memory.sum, self.memory.chunk);
        self.memory.floats.slice(max..max + rows).fill(f32::NEG_INFINITY);
        self.memory.floats.slice(sum..sum + rows).fill(0.0);
        let (dim, pairs) = (call.problem.head_dim, pairs(call.problem.head_dim));
        for (i, rows) in self.rows.chunks(WIDTH).enumerate() {
            let mut pointers = [std::ptr::null(); WIDTH];
            for (pointer, &row) in pointers.iter_mut().zip(rows) {
                *pointer = call.query(head, row);
            }
            let output = self.at(self.memory.queries + i * TERMS * WIDTH * pairs);
            call.isa.vectorize(PackQueries::<_, TERMS> { rows: &pointers[..rows.len()], dim, pairs, output });
        }
    }

    /// Processes all tiles against keys `start .. start + keys`.
    fn block(&mut self, start: usize, keys: usize) -> u64 {
        let (call, head, p) = (self.call, self.head, self.call.problem);
        let (pairs, out_rows) = (pairs(p.head_dim), rows(p.value_dim));
        let (key, key_stride) = call.keys(head, start);
        let output = self.at(self.memory.keys);
        call.isa.vectorize(PackKeys::<_, TERMS> {
            input: key,
            stride: key_stride,
            keys,
            dim: p.head_dim,
            pairs,
            output,
        });
        let (value, stride) = call.values(head, start);
        let output = self.at(self.memory.values);
        call.isa.vectorize(PackValues::<_, TERMS> {
            input: value,
            stride,
            keys,
            dim: p.value_dim,
            rows: out_rows,
            output,
        });
        let mut macs = 0;
        for (i, rows) in self.rows.chunks(WIDTH).enumerate() {
            let seen = |row: &u32| call.visible(head, *row).saturating_sub(start).min(keys);
            let keys = rows.last().map_or(0, seen);
            if keys == 0 {
                continue;
            }
            let steps = keys.div_ceil(WIDTH);
            self.scores(i, steps);
            let lanes = self.at(self.memory.lanes);
            let bias = match p.bias_strides {
                Some(_) => Some(self.at(self.memory.bias)),
                None => None,
            };
            if let Some(bias) = bias {
                fill_bias(call, head, rows, start..start + keys, bias, lanes, WIDTH);
            }
            let mut limits = [(0, 0); 2];
            for (limits, rows) in limits.iter_mut().zip(rows.chunks(TILE)) {
                *limits = (rows.first().map_or(0, seen), rows.last().map_or(0, seen));
            }
            if limits[0].0 < keys {
                for (lane, row) in rows.iter().enumerate() {
                    // SAFETY: `lanes` has a float for each of the tile's rows.
                    unsafe { lanes.add(lane).write(seen(row) as f32) }
                }
            }
            call.isa.vectorize(Softmax::<TERMS> {
                factor: p.scale * LOG2_E,
                limits,
                padded: steps * WIDTH,
                scores: self.at(self.memory.scores),
                bias: bias.map(<*mut f32>::cast_const),
                visible: lanes,
                weights: self.at(self.memory.weights),
                max: self.at(self.memory.max + i * WIDTH),
                sum: self.at(self.memory.sum + i * WIDTH),
                output: (start > 0).then_some(self.at(self.memory.outputs + i * WIDTH * out_rows)),
                rows: out_rows,
            });
            self.values(i, keys, start > 0);
            macs += steps * WIDTH * WIDTH * (p.head_dim + p.value_dim);
        }
        macs as u64
    }

    /// Scores of tile `i` with `32 * steps` keys.
    fn scores(&self, i: usize, steps: usize) {
        let dim = self.call.problem.head_dim;
        let pairs = pairs(dim);
        // However numbers are paired, no more pairs than numbers are not 0.
        let last = (dim + 2 * TILE - 2 * pairs).min(TILE);
        let b = self.at(self.memory.queries + i * TERMS * WIDTH * pairs);
        for step in 0..steps {
            let key = |half: usize| self.at(self.memory.keys + (2 * step + half) * TILE * pairs).cast_const();
            let score = |half: usize| self.at(self.memory.scores + (2 * step + half) * TILE * WIDTH);
            let product = TileProduct {
                a: [key(0), key(1)],
                b,
                b_stride: STRIDE,
                b_step: STEP,
                terms: TERMS,
                term_strides: [KEYS * pairs, pairs * WIDTH].map(|floats| floats * size_of::<f32>()),
                steps: pairs / TILE,
                last,
                c: [score(0), score(1)],
                c_stride: STRIDE,
                add: false,
                ahead: Lines::NONE,
            };
            // SAFETY: the sections have these sizes; keys are padded to a multiple of 32.
            unsafe { self.multiplier.multiply::<true>(&product) }
        }
    }

    /// Adds the weighted values of `keys` keys to the outputs of tile `i`.
    fn values(&self, i: usize, keys: usize, add: bool) {
        let steps = keys.div_ceil(WIDTH);
        let last = (keys + WIDTH - steps * WIDTH).div_ceil(2);
        let rows = rows(self.call.problem.value_dim);
        let outputs = self.memory.outputs + i * WIDTH * rows;
        for row in (0..rows).step_by(2 * TILE) {
            let second = (row + TILE).min(rows - TILE);
            let value = |row: usize| self.at(self.memory.values + row * KEYS / 2).cast_const();
            let product = TileProduct {
                a: [value(row), value(second)],
                b: self.at(self.memory.weights),
                b_stride: STRIDE,
                b_step: STEP,
                terms: TERMS,
                term_strides: [rows * KEYS / 2, KEYS / 2 * WIDTH].map(|floats| floats * size_of::<f32>()),
                steps,
                last,
                c: [self.at(outputs + row * WIDTH), self.at(outputs + second * WIDTH)],
                c_stride: STRIDE,
                add,
                ahead: Lines::NONE,
            };
            // SAFETY: the sections have these sizes; values and weights are padded to a multiple of 32 keys.
            unsafe {
                match second > row {
                    true => self.multiplier.multiply::<true>(&product),
                    false => self.multiplier.multiply::<false>(&product),
                }
            }
        }
    }

    /// Writes the output rows. Returns false if an element may not be finite.
    fn store_outputs(&mut self) -> bool {
        let (call, head) = (self.call, self.head);
        let (dim, out_rows, sum) = (call.problem.value_dim, rows(call.problem.value_dim), self.memory.sum);
        let mut finite = true;
        for (i, rows) in self.rows.chunks(WIDTH).enumerate() {
            let mut pointers = [std::ptr::null_mut(); WIDTH];
            let input = self.at(self.memory.outputs + i * WIDTH * out_rows);
            let sums = self.memory.floats.slice(sum + i * WIDTH..sum + (i + 1) * WIDTH);
            for ((pointer, sum), &row) in pointers.iter_mut().zip(sums.iter_mut()).zip(rows) {
                *pointer = call.output(head, row);
                *sum = call.gate(head, row) / *sum;
            }
            let rows_out = &pointers[..rows.len()];
            finite &= call.isa.vectorize(Scatter { rows: rows_out, dim, factors: sums.as_ptr(), input, width: WIDTH });
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
