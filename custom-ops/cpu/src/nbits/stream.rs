//! Products of a few rows, with the weight as it is read: each of its values is loaded once for several rows.

use super::activations::Converted;
use super::isa::{ByteDot, DotJob, FLOAT_SUBTRACTED};
use super::{Activations, Level, NBits, Row};
use crate::isa::{Isa, MAX_LANES, array};
use std::ops::Range;

const CACHE_LINE: usize = 64;

/// Columns of a tile, at most.
const TOGETHER: usize = 4;

/// Bytes of the weight between what is multiplied and what is fetched. The processor's own prefetching ends with each page.
const AHEAD: usize = 2048;

/// Adds the products of `rows` with `columns` over `ranges` of blocks to the rows' sums.
///
/// Contract of the constructor: as [`super::Worker::multiply`].
pub(super) struct Stream<'a> {
    pub(super) weight: &'a NBits<'a>,
    pub(super) x: &'a Activations<'a>,
    pub(super) rows: &'a [Row],
    pub(super) columns: Range<usize>,
    pub(super) ranges: &'a [Range<usize>],
}

impl DotJob for Stream<'_> {
    type Output = u64;

    #[inline(always)]
    fn run<D: ByteDot>(self, dot: D) -> u64 {
        match (self.weight.format.bits, self.x.level) {
            (4, Level::Int8) => self.all::<D, 4, true>(dot),
            (4, Level::Float) => self.all::<D, 4, false>(dot),
            (_, Level::Int8) => self.all::<D, 8, true>(dot),
            (_, Level::Float) => self.all::<D, 8, false>(dot),
        }
        let blocks: usize = self.ranges.iter().map(ExactSizeIterator::len).sum();
        (self.rows.len() * self.columns.len() * blocks * self.weight.format.block) as u64
    }
}

/// What does not depend on the tile.
struct Plan<W> {
    /// Words of a block.
    words: usize,
    /// Vectors whose products are added before they are scaled.
    run: usize,
    /// For each sum of a group of LANES blocks: the block of each of its words.
    indices: [W; MAX_LANES],
    /// What the products have not subtracted from the weights; `None` if there are zero points.
    rest: Option<f32>,
    subtracted: f32,
}

impl Stream<'_> {
    #[inline(always)]
    fn all<D: ByteDot, const BITS: usize, const INT: bool>(&self, dot: D) {
        let lanes = D::Vectors::LANES;
        let words = self.weight.format.block_bytes() / 4;
        let mut indices = [dot.zero(); MAX_LANES];
        for unit in 0..lanes {
            let block = |lane: usize| if words <= lanes { (unit * lanes + lane) / words } else { unit };
            indices[unit] = dot.indices(&array(|lane| block(lane) as u32));
        }
        let subtracted = if INT { D::SUBTRACTED } else { FLOAT_SUBTRACTED }[BITS / 8];
        let default = if BITS == 4 { 8 } else { 128 };
        let rest = self.weight.zero_points.is_none().then_some(f32::from(default - subtracted));
        let plan = Plan { words, run: (words / lanes).max(1), indices, rest, subtracted: f32::from(subtracted) };
        // Nothing times a sum that is infinite would be no number.
        match self.weight.zero_points.is_none() && default == subtracted {
            true => self.columns::<D, BITS, INT, false>(dot, &plan),
            false => self.columns::<D, BITS, INT, true>(dot, &plan),
        }
    }

    /// All columns; `REST` says whether the products leave something to be subtracted.
    #[inline(always)]
    fn columns<D: ByteDot, const BITS: usize, const INT: bool, const REST: bool>(&self, dot: D, plan: &Plan<D::W>) {
        let most = if D::Vectors::REGISTERS >= 32 { 4 } else { 2 };
        let (blocks, scales) = (self.weight.format.blocks(), self.weight.scales);
        let pitch = blocks.next_multiple_of(MAX_LANES);
        let mut converted = if scales.is_f32() { Vec::new() } else { vec![0.0; TOGETHER * pitch] };
        let mut column = self.columns.start;
        while column < self.columns.end {
            let together = if self.rows.len() == 1 { TOGETHER } else { 2 };
            let columns = if self.columns.end - column >= together { together } else { 1 };
            let mut of_columns = [std::ptr::null(); TOGETHER];
            for (c, place) in of_columns.iter_mut().enumerate().take(columns) {
                let buffer = converted.as_mut_ptr().wrapping_add(c * pitch);
                // SAFETY: the weight has these columns, and the buffer room for each.
                *place = unsafe { scales.floats(dot.vectors(), (column + c) * blocks, blocks, buffer) };
            }
            let mut rows = self.rows;
            while !rows.is_empty() {
                let count = match rows.len() {
                    len if len >= most => most,
                    2 | 3 => 2,
                    _ => 1,
                };
                let (tile, rest) = rows.split_at(count);
                // SAFETY: the constructor's contract.
                unsafe {
                    match (count, columns) {
                        (1, 4) => self.tile::<D, BITS, INT, REST, 1, 4, 4>(dot, plan, tile, (column, &of_columns)),
                        (1, 2) => self.tile::<D, BITS, INT, REST, 1, 2, 4>(dot, plan, tile, (column, &of_columns)),
                        (1, _) => self.tile::<D, BITS, INT, REST, 1, 1, 4>(dot, plan, tile, (column, &of_columns)),
                        (2, 2) => self.tile::<D, BITS, INT, REST, 2, 2, 2>(dot, plan, tile, (column, &of_columns)),
                        (2, _) => self.tile::<D, BITS, INT, REST, 2, 1, 2>(dot, plan, tile, (column, &of_columns)),
                        (_, 2) => self.tile::<D, BITS, INT, REST, 4, 2, 1>(dot, plan, tile, (column, &of_columns)),
                        (_, _) => self.tile::<D, BITS, INT, REST, 4, 1, 1>(dot, plan, tile, (column, &of_columns)),
                    }
                }
                rows = rest;
            }
            column += columns;
        }
    }

    /// What the products have not subtracted from the weights, times the scales: of a column's blocks from `group` on.
    #[inline(always)]
    fn rest<D: ByteDot>(
        &self,
        dot: D,
        plan: &Plan<D::W>,
        column: usize,
        group: usize,
        scale: <D::Vectors as Isa>::V,
    ) -> <D::Vectors as Isa>::V {
        let isa = dot.vectors();
        isa.mul(
            scale,
            match plan.rest {
                Some(rest) => isa.splat(rest),
                None => self.weight.zeros(dot, column, group, plan.subtracted),
            },
        )
    }

    /// `R` rows times `C` columns, in `K` sums each. `K` follows from the rows alone, so that it does not matter which columns a thread
    /// gets.
    ///
    /// # Safety
    /// As the constructor's contract; there are `R` rows.
    #[inline(always)]
    unsafe fn tile<
        D: ByteDot,
        const BITS: usize,
        const INT: bool,
        const REST: bool,
        const R: usize,
        const C: usize,
        const K: usize,
    >(
        &self,
        dot: D,
        plan: &Plan<D::W>,
        rows: &[Row],
        (column, scales_of): (usize, &[*const f32; TOGETHER]),
    ) {
        let (isa, lanes, format) = (dot.vectors(), D::Vectors::LANES, self.weight.format);
        let (row_bytes, block_bytes) = (format.row_bytes(), format.block_bytes());
        let input: [Converted; R] = array(|r| self.x.row(rows[r].index as usize));
        let mut sums = [[isa.splat(0.0); C]; R];
        // The same columns' next ones, or of short columns those after them.
        let ahead = (C * row_bytes).max(2 * AHEAD);
        // SAFETY: the constructor's contract: the weight has these columns and blocks, and the activations these rows, with
        // whole vectors of scales and corrections after the last block.
        unsafe {
            for range in self.ranges {
                // Whole groups of the usual blocks first, and the rest below.
                let whole = range.start..range.end - range.len() % lanes;
                let start = match plan.words {
                    4 if INT => self.groups::<D, BITS, REST, R, C, K, 4>(
                        dot,
                        plan,
                        &input,
                        (column, whole),
                        scales_of,
                        &mut sums,
                    ),
                    8 if INT && lanes >= 8 => self.groups::<D, BITS, REST, R, C, K, 8>(
                        dot,
                        plan,
                        &input,
                        (column, whole),
                        scales_of,
                        &mut sums,
                    ),
                    _ => range.start,
                };
                for group in (start..range.end).step_by(lanes) {
                    let count = (range.end - group).min(lanes);
                    let mut scales = [[isa.splat(0.0); C]; R];
                    let mut zeros = [isa.splat(0.0); C];
                    for c in 0..C {
                        let scale = isa.widen_part(scales_of[c].add(group), count);
                        if REST && !INT {
                            zeros[c] = self.weight.zeros(dot, column + c, group, plan.subtracted);
                        }
                        if REST && INT {
                            let rest = self.rest(dot, plan, column + c, group, scale);
                            for r in 0..R {
                                sums[r][c] = isa.fma(rest, isa.load(input[r].corrections.add(group)), sums[r][c]);
                            }
                        }
                        for r in 0..R {
                            scales[r][c] = match INT {
                                true => isa.mul(scale, isa.load(input[r].scales.add(group))),
                                false => scale,
                            };
                        }
                    }
                    let bytes = count * block_bytes;
                    let start = group * block_bytes;
                    let data = self.weight.data.as_ptr().wrapping_add(column * row_bytes + start);
                    let values: [*const u8; R] = array(|r| {
                        let of_vector = if INT { 4 * lanes * 8 / BITS } else { 4 * lanes * 32 / BITS };
                        input[r].values.cast::<u8>().add(start / (4 * lanes) * of_vector)
                    });
                    let units = if plan.words <= lanes { bytes.div_ceil(4 * lanes) } else { count };
                    for unit in 0..units {
                        let first = unit * plan.run;
                        let shared = Shared { scales: &scales, zeros: &zeros, index: plan.indices[unit] };
                        if (first + plan.run) * 4 * lanes <= bytes {
                            let load = |c: usize, vector: usize| {
                                let place = data.add(c * row_bytes + vector * 4 * lanes);
                                isa.prefetch(place.wrapping_add(ahead));
                                dot.load(place)
                            };
                            let run = first..first + plan.run;
                            unit_of::<D, BITS, INT, REST, R, C>(dot, run, load, &values, shared, &mut sums);
                        } else {
                            let load = |c: usize, vector: usize| {
                                let at = vector * 4 * lanes;
                                dot.load_part(data.add(c * row_bytes + at), bytes - at)
                            };
                            let run = first..first + 1;
                            unit_of::<D, BITS, INT, REST, R, C>(dot, run, load, &values, shared, &mut sums);
                        }
                    }
                }
            }
            for r in 0..R {
                for c in 0..C {
                    *rows[r].output.add(column - self.columns.start + c) += isa.sum(sums[r][c]);
                }
            }
        }
    }

    /// Adds 8-bit products of whole groups of LANES blocks of `WORDS` words; gives the end of `groups`.
    ///
    /// One column after the other, in the order in which the weight lies in memory. Several sums for each, because additions to one would
    /// wait for each other.
    ///
    /// # Safety
    /// As the constructor's contract; `plan.words` is `WORDS`, at most LANES, and the weight has these blocks and columns.
    #[inline(always)]
    unsafe fn groups<
        D: ByteDot,
        const BITS: usize,
        const REST: bool,
        const R: usize,
        const C: usize,
        const K: usize,
        const WORDS: usize,
    >(
        &self,
        dot: D,
        plan: &Plan<D::W>,
        input: &[Converted; R],
        (column, groups): (usize, Range<usize>),
        scales_of: &[*const f32; TOGETHER],
        sums: &mut [[<D::Vectors as Isa>::V; C]; R],
    ) -> usize {
        let (isa, lanes, bytes, format) = (dot.vectors(), D::Vectors::LANES, 4 * D::Vectors::LANES, self.weight.format);
        let row_bytes = format.row_bytes();
        // SAFETY: the caller's contract. Prefetches read nothing.
        unsafe {
            for c in 0..C {
                let data = self.weight.data.as_ptr().add((column + c) * row_bytes);
                let mut parts = [[isa.splat(0.0); K]; R];
                for group in groups.clone().step_by(lanes) {
                    let data = data.add(group * WORDS * 4);
                    let scale = isa.load(scales_of[c].add(group));
                    let mut scales = [scale; R];
                    let rest = if REST { self.rest(dot, plan, column + c, group, scale) } else { scale };
                    for r in 0..R {
                        if REST {
                            sums[r][c] = isa.fma(rest, isa.load(input[r].corrections.add(group)), sums[r][c]);
                        }
                        scales[r] = isa.mul(scale, isa.load(input[r].scales.add(group)));
                    }
                    for unit in 0..WORDS {
                        let place = data.add(unit * bytes);
                        if unit * bytes % CACHE_LINE == 0 {
                            isa.prefetch(place.wrapping_add(AHEAD));
                        }
                        let w = dot.load(place);
                        for r in 0..R {
                            let x = input[r].values.cast::<u8>().add((group * WORDS * 4 + unit * bytes) * 8 / BITS);
                            let words = if BITS == 4 {
                                dot.dot_halves(w, dot.load(x), dot.load(x.add(bytes)))
                            } else {
                                dot.dot8(dot.zero(), w, dot.load(x))
                            };
                            let part = &mut parts[r][unit % K];
                            *part = isa.fma(dot.to_float(words), dot.spread(scales[r], plan.indices[unit]), *part);
                        }
                    }
                }
                for r in 0..R {
                    for part in &parts[r] {
                        sums[r][c] = isa.add(sums[r][c], *part);
                    }
                }
            }
        }
        groups.end
    }
}

/// What consecutive vectors of the weight share, of a group of LANES blocks.
struct Shared<'a, D: ByteDot, const R: usize, const C: usize> {
    scales: &'a [[<D::Vectors as Isa>::V; C]; R],
    zeros: &'a [<D::Vectors as Isa>::V; C],
    /// The lane of each word's block.
    index: D::W,
}

/// Adds the products with consecutive vectors of the weight, `run`, which share their scales. Zero points are subtracted from weights in
/// floating point: their products with the activations' sums would be large numbers that cancel.
///
/// # Safety
/// `input` is valid for reading the values of these vectors.
#[inline(always)]
unsafe fn unit_of<D: ByteDot, const BITS: usize, const INT: bool, const REST: bool, const R: usize, const C: usize>(
    dot: D,
    run: Range<usize>,
    load: impl Fn(usize, usize) -> D::W,
    input: &[*const u8; R],
    Shared { scales, zeros, index }: Shared<'_, D, R, C>,
    sums: &mut [[<D::Vectors as Isa>::V; C]; R],
) {
    let (isa, bytes) = (dot.vectors(), 4 * D::Vectors::LANES);
    let zeros = if REST && !INT { zeros.map(|zeros| dot.spread(zeros, index)) } else { *zeros };
    let mut words = [[dot.zero(); C]; R];
    let mut floats = [[isa.splat(0.0); C]; R];
    // SAFETY: the caller's contract.
    unsafe {
        for vector in run {
            let w: [D::W; C] = array(|c| load(c, vector));
            match (INT, BITS) {
                (true, 4) => {
                    for r in 0..R {
                        let x = input[r].add(vector * 2 * bytes);
                        let (even, odd) = (dot.load(x), dot.load(x.add(bytes)));
                        for c in 0..C {
                            words[r][c] = dot.dot4(words[r][c], dot.low(w[c]), even);
                            words[r][c] = dot.dot4(words[r][c], dot.high(w[c]), odd);
                        }
                    }
                }
                (true, _) => {
                    for r in 0..R {
                        let x = dot.load(input[r].add(vector * bytes));
                        for c in 0..C {
                            words[r][c] = dot.dot8(words[r][c], w[c], x);
                        }
                    }
                }
                (false, _) => {
                    macro_rules! value {
                        ($method:ident, $($index:literal)*) => {$(
                            for c in 0..C {
                                let mut value = dot.$method::<$index>(w[c]);
                                if REST {
                                    value = isa.sub(value, zeros[c]);
                                }
                                for r in 0..R {
                                    let x = input[r].add((vector * 32 / BITS + $index) * bytes).cast();
                                    floats[r][c] = isa.fma(value, isa.load(x), floats[r][c]);
                                }
                            }
                        )*};
                    }
                    match BITS {
                        4 => {
                            value!(nibble, 0 1 2 3 4 5 6 7);
                        }
                        _ => {
                            value!(byte, 0 1 2 3);
                        }
                    }
                }
            }
        }
    }
    for r in 0..R {
        for c in 0..C {
            let product = if INT { dot.to_float(words[r][c]) } else { floats[r][c] };
            sums[r][c] = isa.fma(product, dot.spread(scales[r][c], index), sums[r][c]);
        }
    }
}
