//! The left matrix, converted for products with weights in blocks.

use super::isa::{ByteDot, DotJob, Engine};
use super::weight::Format;
use super::{FEW, Level, panel::Tiled};
use crate::host::Host;
use crate::isa::unit::TILE;
use crate::isa::{Isa, MAX_LANES, MatrixUnit};
use crate::memory::{Sections, Uncleared};
use crate::workers::{Shared, share};
use moh_operators::{Element, Error};
use std::ops::Range;

/// The parts of the inner dimension that each row uses, such as the heads that are on. The others count as 0 and are never
/// read.
#[derive(Clone, Copy)]
pub(crate) struct Parts<'a> {
    /// Inner indices of a part.
    pub(crate) width: usize,
    /// Whether a row uses a part.
    pub(crate) used: &'a (dyn Fn(usize, usize) -> bool + Sync),
}

/// Rows of the left matrix, in the order in which the products read them. Blocks of no row's parts are skipped.
///
/// A vector of a weight has 4 * LANES bytes: 8 * LANES values of 4 bits, or 4 * LANES of 8 bits. A row is stored in chunks
/// of as many values:
///
/// - 8-bit activations: for weights of 8 bits, in order; of 4 bits, the values of even index, then those of odd index, as
///   they are in the low and in the high halves of the weight's bytes.
/// - f32 for few rows: value i of each word of the weight's vector, for i = 0, 1, ..
/// - f32 for many rows: in order, without chunks.
///
/// For a matrix unit, rows are rounded to bfloat16 instead, in tiles: see [`Tiled`].
pub(crate) struct Activations<'h> {
    pub(super) engine: Engine,
    pub(super) format: Format,
    pub(super) level: Level,
    /// The matrix unit that multiplies them, if one does.
    pub(super) unit: Option<MatrixUnit>,
    pub(super) rows: usize,
    pub(super) used: Used,
    pub(super) layout: Layout,
    memory: Uncleared<'h>,
}

// SAFETY: the memory is only read once the activations exist.
unsafe impl Sync for Activations<'_> {}

/// The blocks that rows use.
pub(super) enum Used {
    /// For few rows: ranges of blocks that any row uses, extended to whole vectors of the weight. A row's values are 0 in
    /// blocks that it does not use.
    Ranges(Vec<Range<usize>>),
    /// For many rows: ranges of blocks with the rows that use them; `None` if all rows use all blocks.
    Segments(Option<Vec<Segment>>),
}

/// Consecutive blocks and the rows that use them, ascending.
pub(super) struct Segment {
    pub(super) blocks: Range<usize>,
    pub(super) rows: Vec<u32>,
}

/// A row of the memory, in floats: its values, and for each of its blocks a scale, a correction and a start, which [`Converted`] describes. Loops go
/// through several rows with one pointer each.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    /// Length of a row.
    pub(super) pitch: usize,
    pub(super) scales: usize,
    pub(super) corrections: usize,
    pub(super) starts: usize,
}

impl<'h> Activations<'h> {
    /// Converts `rows` rows, the pointers to which `input` returns, for products with weights of this format.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    ///
    /// # Safety
    /// The rows are valid for reading the inner indices of the parts that they use (all, if `parts` is `None`).
    pub(crate) unsafe fn new<X: Element>(
        engine: Engine,
        host: &'h dyn Host,
        format: Format,
        level: Level,
        rows: usize,
        input: &(dyn Fn(usize) -> *const X + Sync),
        parts: Option<Parts<'_>>,
    ) -> Result<Activations<'h>, Error> {
        /// Values that are converted by the calling thread: waking another would take longer.
        const ALONE: usize = 32 << 10;
        /// The same for numbers that are only rounded.
        const ROUNDED_ALONE: usize = 256 << 10;
        let few = rows <= FEW;
        let lanes = engine.lanes();
        let chunk = 4 * lanes * 8 / format.bits;
        // Parts of several rows in a step of the unit would need copies.
        let apart = parts.is_none() || format.block.is_multiple_of(Tiled::INNER);
        let unit = engine.unit().filter(|_| !few && level == Level::Int8 && apart);
        let values = match level {
            _ if unit.is_some() => Tiled::of(format.k).floats() / TILE,
            Level::Float if !few => crate::gemm::pitch(format.k),
            Level::Float => format.k.next_multiple_of(chunk),
            Level::Int8 => format.k.next_multiple_of(chunk) / 4,
        };
        let blocks = format.blocks().next_multiple_of(MAX_LANES) + MAX_LANES;
        // A unit's numbers have no scales.
        let (rows_of_memory, pitch) = match unit {
            Some(_) => (rows.next_multiple_of(TILE), values),
            None => (rows, crate::gemm::pitch(values + 3 * blocks)),
        };
        let mut sections = Sections::default();
        sections.add(rows_of_memory, pitch)?;
        let mut memory = sections.allocate_unwritten(host)?;
        if unit.is_none() {
            memory.clear();
        }
        let layout = Layout { pitch, scales: values, corrections: values + blocks, starts: values + 2 * blocks };
        let used = used(format, lanes, rows, parts, few);
        let activations = Activations { engine, format, level, unit, rows, used, layout, memory };
        let base = Shared(activations.memory.at(0));
        let convert = |rows: Range<usize>| {
            engine.run(Convert {
                format,
                level,
                few,
                tiled: unit.is_some(),
                layout,
                base: { base }.0,
                rows,
                input,
                parts,
            });
        };
        let alone = if unit.is_some() { ROUNDED_ALONE } else { ALONE };
        if rows * format.k <= alone || host.parallelism() < 2 {
            convert(0..rows);
            return Ok(activations);
        }
        let step = rows.div_ceil(4 * host.parallelism());
        let work = |_: &mut (), item: usize| {
            convert(item * step..((item + 1) * step).min(rows));
            0
        };
        share(host, rows.div_ceil(step), || Ok(()), work)?;
        Ok(activations)
    }

    /// Columns that are computed together: others are multiples of it, but for the last.
    pub(crate) fn columns(&self) -> usize {
        if self.unit.is_some() { Tiled::COLUMNS } else { MAX_LANES }
    }

    /// The first of the tiles of 16 rows, of which there is one.
    pub(super) fn tiles(&self, tile: usize) -> *const f32 {
        self.memory.at(tile * TILE * self.layout.pitch)
    }

    /// The memory of a row, which exists.
    #[inline(always)]
    pub(super) fn row(&self, row: usize) -> Converted {
        let at = |offset: usize| self.memory.at(row * self.layout.pitch + offset).cast_const();
        Converted { values: at(0), scales: at(self.layout.scales), corrections: at(self.layout.corrections) }
    }
}

/// A converted row.
#[derive(Clone, Copy)]
pub(super) struct Converted {
    pub(super) values: *const f32,
    /// The scales of its blocks.
    pub(super) scales: *const f32,
    /// The negative sums of its blocks, times their scale. Besides, a row has the integers from which sums of its blocks start, so that
    /// weights without zero points need no correction.
    pub(super) corrections: *const f32,
}

/// The parts that overlap a block.
fn overlapping(format: Format, width: usize, block: usize) -> Range<usize> {
    block * format.block / width..((block + 1) * format.block).div_ceil(width)
}

fn used(format: Format, lanes: usize, rows: usize, parts: Option<Parts<'_>>, few: bool) -> Used {
    let Some(parts) = parts else {
        return if few { Used::Ranges(ranges(format, lanes, |_| true)) } else { Used::Segments(None) };
    };
    let uses = |row: usize, block: usize| overlapping(format, parts.width, block).any(|part| (parts.used)(row, part));
    if few {
        return Used::Ranges(ranges(format, lanes, |block| (0..rows).any(|row| uses(row, block))));
    }
    let mut segments: Vec<Segment> = Vec::new();
    for block in 0..format.blocks() {
        let overlapped = overlapping(format, parts.width, block);
        match segments.last_mut() {
            Some(last) if overlapping(format, parts.width, last.blocks.start) == overlapped => last.blocks.end += 1,
            _ => {
                let rows = (0..rows).filter(|&row| uses(row, block)).map(|row| row as u32).collect();
                segments.push(Segment { blocks: block..block + 1, rows });
            }
        }
    }
    Used::Segments(Some(segments))
}

/// The ranges of blocks for which `used` holds, extended to whole vectors of the weight.
fn ranges(format: Format, lanes: usize, used: impl Fn(usize) -> bool) -> Vec<Range<usize>> {
    let together = (4 * lanes / format.block_bytes()).max(1);
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for start in (0..format.blocks()).step_by(together) {
        let end = (start + together).min(format.blocks());
        if (start..end).any(&used) {
            match ranges.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => ranges.push(start..end),
            }
        }
    }
    ranges
}

/// Converts rows.
///
/// Contract of the constructor: as [`Activations::new`]; `base` points to the memory of the layout, and no one else uses
/// these rows.
struct Convert<'a, X> {
    format: Format,
    level: Level,
    few: bool,
    tiled: bool,
    layout: Layout,
    base: *mut f32,
    rows: Range<usize>,
    input: &'a (dyn Fn(usize) -> *const X + Sync),
    parts: Option<Parts<'a>>,
}

/// Maximum values of a block.
const MAX_BLOCK: usize = 256;
type Values = [f32; MAX_BLOCK + MAX_LANES];

impl<X: Element> DotJob for Convert<'_, X> {
    type Output = ();

    #[inline(always)]
    fn run<D: ByteDot>(self, dot: D) {
        let (format, isa) = (self.format, dot.vectors());
        let mut values: Values = [0.0; MAX_BLOCK + MAX_LANES];
        for row in self.rows.clone() {
            let input = (self.input)(row);
            if self.tiled {
                // SAFETY: the constructor's contract.
                unsafe { self.round(isa, row, input, &mut values) };
                continue;
            }
            for block in 0..format.blocks() {
                // SAFETY: the constructor's contract; a block has at most MAX_BLOCK values, and the layout has room for
                // the values and sums of all blocks.
                unsafe {
                    self.read(isa, row, input, block, &mut values);
                    let output = self.base.add(row * self.layout.pitch);
                    let scale = output.add(self.layout.scales + block);
                    let correction = output.add(self.layout.corrections + block);
                    if self.level == Level::Float {
                        *correction = -values[..format.block].iter().sum::<f32>();
                        self.store_floats::<D>(&values, output, block);
                        continue;
                    }
                    let (step, sum) = quantise(isa, &mut values, format.block);
                    *scale = step;
                    *correction = -(sum as f32 * step);
                    let zero = format.default_zero() - D::SUBTRACTED[usize::from(format.bits == 8)];
                    *output.add(self.layout.starts + block).cast() = -sum * i32::from(zero);
                    self.store_bytes(dot, &values, output.cast(), block);
                }
            }
        }
    }
}

impl<X: Element> Convert<'_, X> {
    /// Reads a block; what the row does not use is 0.
    ///
    /// # Safety
    /// As the constructor's contract; `input` is the row.
    #[inline(always)]
    unsafe fn read<I: Isa>(&self, isa: I, row: usize, input: *const X, block: usize, values: &mut Values) {
        let (start, end) = (block * self.format.block, (block + 1) * self.format.block);
        let mut copy = |range: Range<usize>| {
            for k in range.clone().step_by(I::LANES) {
                let n = (range.end - k).min(I::LANES);
                // SAFETY: the caller's contract; the buffer has room for a vector after the block.
                unsafe {
                    let x = isa.widen_part(input.add(k), n);
                    isa.store(values.as_mut_ptr().add(k - start), x);
                }
            }
        };
        let Some(parts) = self.parts else { return copy(start..end) };
        let overlapped = overlapping(self.format, parts.width, block);
        if overlapped.clone().all(|part| (parts.used)(row, part)) {
            return copy(start..end);
        }
        values[..self.format.block].fill(0.0);
        for part in overlapped.filter(|&part| (parts.used)(row, part)) {
            let range = (part * parts.width).max(start)..((part + 1) * parts.width).min(end);
            let (from, len) = (range.start - start, range.len());
            // Elementwise, because a vector's store could overwrite the values of the next part.
            for i in 0..len {
                // SAFETY: the caller's contract.
                values[from + i] = unsafe { *input.add(range.start + i) }.to_f32();
            }
        }
    }

    /// Rounds a row to bfloat16, in tiles.
    ///
    /// # Safety
    /// As the constructor's contract; `input` is the row.
    #[inline(always)]
    unsafe fn round<I: Isa>(&self, isa: I, row: usize, input: *const X, values: &mut Values) {
        let tiled = Tiled::of(self.format.k);
        // SAFETY: the caller's contract: there are tiles for every row; a block is in the buffer, with a vector after it.
        unsafe {
            let tile = self.base.add(row / TILE * TILE * self.layout.pitch);
            let Some(parts) = self.parts else {
                tiled.round(isa, 0..self.format.k, tile, row % TILE, |k| input.add(k));
                return;
            };
            for block in 0..self.format.blocks() {
                if overlapping(self.format, parts.width, block).any(|part| (parts.used)(row, part)) {
                    self.read(isa, row, input, block, values);
                    let range = block * self.format.block..(block + 1) * self.format.block;
                    tiled.round(isa, range.clone(), tile, row % TILE, |k| values.as_ptr().add(k - range.start));
                }
            }
        }
    }

    /// # Safety
    /// `output` has room for the row.
    #[inline(always)]
    unsafe fn store_floats<D: ByteDot>(&self, values: &Values, output: *mut f32, block: usize) {
        let (count, start) = (self.format.block, block * self.format.block);
        if !self.few {
            // SAFETY: the caller's contract.
            return unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), output.add(start), count) };
        }
        let lanes = D::Vectors::LANES;
        let in_word = 32 / self.format.bits;
        for (i, &value) in values[..count].iter().enumerate() {
            let k = start + i;
            let word = k / in_word;
            let place = (word / lanes * in_word + k % in_word) * lanes + word % lanes;
            // SAFETY: the caller's contract.
            unsafe { *output.add(place) = value }
        }
    }

    /// # Safety
    /// `output` has room for the row.
    #[inline(always)]
    unsafe fn store_bytes<D: ByteDot>(&self, dot: D, values: &Values, output: *mut u8, block: usize) {
        let (isa, lanes) = (dot.vectors(), D::Vectors::LANES);
        for i in (0..self.format.block).step_by(lanes) {
            let k = block * self.format.block + i;
            // SAFETY: the caller's contract. A vector's bytes are neighbours: their number divides a vector of the weight.
            unsafe {
                let values = isa.load(values.as_ptr().add(i));
                if self.format.bits == 8 {
                    dot.store_bytes(values, output.add(k));
                } else {
                    let place = output.add(k / 2 / (4 * lanes) * 8 * lanes + k / 2 % (4 * lanes));
                    dot.store_bytes_apart(values, place, place.add(4 * lanes));
                }
            }
        }
    }
}

/// Quantises the first `count` values: returns the scale and the sum of the integers, which are in the values' low bytes.
///
/// The scale is max |x| / 127: NaN if a value is not finite, and 0 if all are (nearly) 0.
#[inline(always)]
fn quantise<I: Isa>(isa: I, values: &mut Values, count: usize) -> (f32, i32) {
    /// Added to an integer, gives a float whose low bits are the integer. The sum is rounded to nearest even.
    const MAGIC: f32 = 12_582_912.0;
    /// Below it, the reciprocal of the scale overflows.
    const LEAST: f32 = 1e-36;
    let zero = isa.splat(0.0);
    let mut most = zero;
    let start = values.as_mut_ptr();
    // SAFETY: `count` is a block's length, a multiple of the vectors' length.
    unsafe {
        for i in (0..count).step_by(I::LANES) {
            let x = isa.load(start.add(i));
            most = isa.max(isa.max(x, isa.sub(zero, x)), most);
        }
        let mut lanes = [0.0f32; MAX_LANES];
        isa.store(lanes.as_mut_ptr(), most);
        let mut half = MAX_LANES / 2;
        // In halves, which are vectors, and not one after the other.
        while half > 0 {
            for i in 0..half {
                lanes[i] = if lanes[i + half] > lanes[i] { lanes[i + half] } else { lanes[i] };
            }
            half /= 2;
        }
        let most = lanes[0];
        let inverse = if most >= LEAST { 127.0 / most } else { 0.0 };
        let mut sum = zero;
        for i in (0..count).step_by(I::LANES) {
            let integer = isa.add(isa.mul(isa.load(start.add(i)), isa.splat(inverse)), isa.splat(MAGIC));
            isa.store(start.add(i), integer);
            sum = isa.add(sum, isa.sub(integer, isa.splat(MAGIC)));
        }
        // Of integers, exact; NaN if a number is not finite.
        let sum = isa.sum(sum);
        match (sum.is_nan(), inverse > 0.0) {
            (true, _) => (f32::NAN, 0),
            (false, false) => (0.0, 0),
            (false, true) => (most / 127.0, sum as i32),
        }
    }
}
