//! The left matrix, converted for products with weights in blocks.

use super::isa::{ByteDot, DotJob, Engine, NARROW_SUBTRACTED, Words16, rounded};
use super::weight::Format;
use super::{FEW, Level, panel::Tiled};
use crate::host::Host;
use crate::isa::unit::TILE;
use crate::isa::{Isa, MAX_LANES, MatrixUnit, array};
use crate::memory::{Sections, Uncleared};
use crate::workers::{Shared, share};
use moh_operators::{DType, Element, Error};
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
/// - 8-bit activations: for weights of 8 bits, in order, for many rows perhaps in 16 bits each ([`Words16`]); of 4 bits, the values of
///   even index, then those of odd index, as they are in the low and in the high halves of the weight's bytes.
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
        let widened = !few && format.bits == 8 && !format.narrow && engine.widens_bytes();
        let values = match level {
            _ if unit.is_some() => Tiled::of(format.k).floats() / TILE,
            Level::Float if !few => crate::gemm::pitch(format.k),
            Level::Float => format.k.next_multiple_of(chunk),
            Level::Int8 if widened => format.k / 2,
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
        // Few rows are read in whole vectors, and vectors of blocks.
        if unit.is_none() && few {
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
                widened,
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
    /// The negative sums of its blocks in integers, times their scale. Besides, a row has the integers from which sums of its blocks start, so that
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
        if let Some(last) = segments.last_mut()
            && overlapping(format, parts.width, last.blocks.end - 1) == overlapped
        {
            last.blocks.end += 1;
            continue;
        }
        let rows: Vec<u32> = (0..rows).filter(|&row| uses(row, block)).map(|row| row as u32).collect();
        match segments.last_mut() {
            // Neighbours that the same rows use, such as heads that are always on, are multiplied as one.
            Some(last) if last.rows == rows => last.blocks.end += 1,
            _ => segments.push(Segment { blocks: block..block + 1, rows }),
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
    /// Whether bytes are stored as words of 16 bits.
    widened: bool,
    tiled: bool,
    layout: Layout,
    base: *mut f32,
    rows: Range<usize>,
    input: &'a (dyn Fn(usize) -> *const X + Sync),
    parts: Option<Parts<'a>>,
}

/// Maximum values of a block.
const MAX_BLOCK: usize = 256;
/// As many blocks as a vector has lanes, and a vector after them.
type Values = [f32; (MAX_BLOCK + 1) * MAX_LANES];

impl<X: Element> DotJob for Convert<'_, X> {
    type Output = ();

    #[inline(always)]
    fn run<D: ByteDot>(self, dot: D) {
        let (format, isa) = (self.format, dot.vectors());
        let mut values: Values = [0.0; (MAX_BLOCK + 1) * MAX_LANES];
        for row in self.rows.clone() {
            let input = (self.input)(row);
            // SAFETY: the constructor's contract: the layout has room for the values and sums of all blocks.
            unsafe {
                if self.tiled {
                    self.round(isa, row, input, &mut values);
                    continue;
                }
                let output = self.base.add(row * self.layout.pitch);
                if self.level == Level::Int8 {
                    for first in (0..format.blocks()).step_by(D::Vectors::LANES) {
                        let blocks = first..(first + D::Vectors::LANES).min(format.blocks());
                        self.quantise(dot, row, input, blocks, output, &mut values);
                    }
                    continue;
                }
                for block in 0..format.blocks() {
                    self.read(isa, row, input, block, &mut values);
                    self.store_floats::<D>(&values, output, block);
                }
            }
        }
    }
}

impl<X: Element> Convert<'_, X> {
    /// Whether a row uses all parts of a block.
    #[inline(always)]
    fn uses_all(&self, row: usize, block: usize) -> bool {
        let Some(parts) = self.parts else { return true };
        overlapping(self.format, parts.width, block).all(|part| (parts.used)(row, part))
    }

    /// The values of a block, in f32: where they are, or in `values`, as [`Convert::read`].
    ///
    /// # Safety
    /// As [`Convert::read`].
    #[inline(always)]
    unsafe fn floats<I: Isa>(
        &self,
        isa: I,
        row: usize,
        input: *const X,
        block: usize,
        values: &mut [f32],
    ) -> *const f32 {
        // SAFETY: the caller's contract; the type that corresponds to DTYPE is f32.
        unsafe {
            if X::DTYPE == DType::F32 && self.uses_all(row, block) {
                return input.add(block * self.format.block).cast();
            }
            self.read(isa, row, input, block, values);
        }
        values.as_ptr()
    }

    /// Reads a block; what the row does not use is 0.
    ///
    /// # Safety
    /// As the constructor's contract; `input` is the row.
    #[inline(always)]
    unsafe fn read<I: Isa>(&self, isa: I, row: usize, input: *const X, block: usize, values: &mut [f32]) {
        let (start, end) = (block * self.format.block, (block + 1) * self.format.block);
        let Some(parts) = self.parts.filter(|_| !self.uses_all(row, block)) else {
            for k in (start..end).step_by(I::LANES) {
                // SAFETY: the caller's contract; a block is a multiple of a vector, and the values have room for it.
                unsafe { isa.store(values.as_mut_ptr().add(k - start), isa.widen(input.add(k))) }
            }
            return;
        };
        let overlapped = overlapping(self.format, parts.width, block);
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

    /// Quantises blocks, as many as a vector has lanes at most: what is done once for each is done for all of them in one vector.
    ///
    /// A block's scale is max |x| / 127: NaN if a value is not finite, and 0 if all are (nearly) 0.
    ///
    /// # Safety
    /// As the constructor's contract; `input` and `output` are the row's.
    #[inline(always)]
    unsafe fn quantise<D: ByteDot>(
        &self,
        dot: D,
        row: usize,
        input: *const X,
        blocks: Range<usize>,
        output: *mut f32,
        values: &mut Values,
    ) {
        /// Below it, the reciprocal of the scale overflows.
        const LEAST: f32 = 1e-36;
        let (isa, lanes, len) = (dot.vectors(), D::Vectors::LANES, self.format.block);
        let zero = isa.splat(0.0);
        let (mut most, mut sums) = ([zero; MAX_LANES], [zero; MAX_LANES]);
        // SAFETY: the caller's contract; the values are those of the blocks, whose length is a multiple of the vectors' length. In
        // the layout a vector of blocks has room after the last one. A block's sum is of integers up to 127, at most MAX_BLOCK.
        unsafe {
            let mut inputs = [values.as_ptr(); MAX_LANES];
            for (i, block) in blocks.clone().enumerate() {
                inputs[i] = self.floats(isa, row, input, block, &mut values[i * len..]);
                for at in (0..len).step_by(lanes) {
                    most[i] = isa.larger_magnitude(most[i], isa.load(inputs[i].add(at)));
                }
            }
            let most = isa.across(most, |a, b| isa.larger_magnitude(a, b));
            let (least, largest) = (isa.splat(LEAST), isa.splat(127.0));
            let unless_zero = |x| isa.finite_max(isa.keep_less(least, most, x));
            let mut inverse = [0.0; MAX_LANES];
            isa.store(inverse.as_mut_ptr(), unless_zero(isa.div(largest, most)));
            for (i, block) in blocks.clone().enumerate() {
                let (inverse, start) = (isa.splat(inverse[i]), block * len);
                sums[i] = match len / lanes {
                    count if D::AT_ONCE == 4 && count.is_multiple_of(4) => {
                        self.store_rounded::<D, 4>(dot, inputs[i], inverse, output, start)
                    }
                    count if count.is_multiple_of(2) => {
                        self.store_rounded::<D, 2>(dot, inputs[i], inverse, output, start)
                    }
                    _ => self.store_rounded::<D, 1>(dot, inputs[i], inverse, output, start),
                };
            }
            // Of integers, exact. What is not finite differs from itself.
            let sums = isa.sums(sums);
            let steps = isa.add(unless_zero(isa.div(most, largest)), isa.sub(most, most));
            let place = |of: usize| output.add(of + blocks.start);
            isa.store(place(self.layout.scales), steps);
            isa.store(place(self.layout.corrections), isa.sub(zero, isa.mul(sums, steps)));
            let subtracted = match self.format.narrow {
                true => NARROW_SUBTRACTED,
                false => D::SUBTRACTED[usize::from(self.format.bits == 8)],
            };
            let added = i32::from(subtracted) - i32::from(self.format.default_zero());
            let mut finite = [0.0f32; MAX_LANES];
            isa.store(finite.as_mut_ptr(), isa.finite_max(isa.keep_less(most, isa.splat(f32::INFINITY), sums)));
            let starts = finite.map(|sum| sum.to_int_unchecked::<i32>() * added);
            std::ptr::copy_nonoverlapping(starts.as_ptr(), place(self.layout.starts).cast(), lanes);
        }
    }

    /// Rounds the numbers of a block times `inverse`, `N` vectors at once, and stores the integers from inner index `start` on. The lanes of
    /// what it returns have their sum.
    ///
    /// # Safety
    /// `input` is valid for reading the block, a multiple of these vectors, and `output` has room for the row.
    #[inline(always)]
    unsafe fn store_rounded<D: ByteDot, const N: usize>(
        &self,
        dot: D,
        input: *const f32,
        inverse: <D::Vectors as Isa>::V,
        output: *mut f32,
        start: usize,
    ) -> <D::Vectors as Isa>::V {
        let (isa, lanes) = (dot.vectors(), D::Vectors::LANES);
        let output: *mut u8 = output.cast();
        let mut sums = isa.splat(0.0);
        for at in (0..self.format.block).step_by(N * lanes) {
            let k = start + at;
            // SAFETY: the caller's contract. Vectors' bytes are neighbours: their number divides a vector of the weight.
            unsafe {
                let x: [_; N] = array(|i| isa.mul(isa.load(input.add(at + i * lanes)), inverse));
                let sum = if let Some(words) = dot.parts().filter(|_| self.widened) {
                    let (integers, sum) = rounded(isa, x);
                    words.store_low(integers, output.add(2 * k));
                    sum
                } else if self.format.bits == 8 {
                    dot.store_rounded(x, output.add(k))
                } else {
                    let place = output.add(k / 2 / (4 * lanes) * 8 * lanes + k / 2 % (4 * lanes));
                    dot.store_rounded_apart(x, place, place.add(4 * lanes))
                };
                sums = isa.add(sums, sum);
            }
        }
        sums
    }
}
