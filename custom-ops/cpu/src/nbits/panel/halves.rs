//! Products of many rows by a matrix unit, where activations may be rounded: both factors are rounded to bfloat16. A panel of the
//! weight is unpacked to pairs of them. Products of integers would have to be scaled for every block, which takes longer.

use super::products;
use crate::isa::unit::{Lines, ROW_BYTES, TILE, TILE_BYTES, TileProduct};
use crate::isa::{Isa, MAX_LANES, MatrixUnit, Multiplier};
use crate::memory::{Sections, Uncleared};
use crate::nbits::activations::{Segment, Used};
use crate::nbits::isa::{ByteDot, DotJob, FLOAT_SUBTRACTED};
use crate::nbits::{Activations, NBits, Row, Start};
use half::bf16;
use moh_operators::{Element, Error};
use std::ops::Range;

/// Inner indices of a panel. It is read again for every two tiles of rows, with which and with their sums it takes three quarters of a
/// first-level cache. (256 rows by 1152 x 4608: 2.7 ms, and 3.2 ms with 512 inner indices.)
const DEPTH: usize = 256;
/// Columns of a panel.
const COLUMNS: usize = Tiled::COLUMNS;
/// Rows of two tiles.
const ROWS: usize = 2 * TILE;
/// Rows and columns whose sums are kept until all panels along the inner dimension are added: they stay in the second-level cache.
const KEPT_ROWS: usize = 512;
const KEPT_COLUMNS: usize = 256;
/// Floats of a tile: pairs of bfloat16, or sums.
const TILE_FLOATS: usize = TILE * TILE;

const _: () = assert!(TILE == MAX_LANES && TILE_FLOATS * size_of::<f32>() == TILE_BYTES);

/// Rows in tiles of 16: each tile is a row of smaller ones of [`Tiled::INNER`] inner indices, in which index i and index i + 16 are a pair.
#[derive(Clone, Copy)]
pub(in crate::nbits) struct Tiled {
    steps: usize,
}

impl Tiled {
    /// Inner indices that are multiplied at a time.
    pub(in crate::nbits) const INNER: usize = 2 * TILE;

    /// Columns that are multiplied at a time.
    pub(in crate::nbits) const COLUMNS: usize = 2 * TILE;

    /// For `k` inner indices.
    pub(in crate::nbits) fn of(k: usize) -> Tiled {
        Tiled { steps: k.div_ceil(Tiled::INNER) }
    }

    /// Floats of a tile of 16 rows.
    pub(in crate::nbits) fn floats(self) -> usize {
        self.steps.saturating_mul(TILE_FLOATS)
    }

    /// Rounds some inner indices, a multiple of [`TILE`], of row `row` of a tile. What is left of the last step is 0. `input` returns a
    /// pointer to an inner index.
    ///
    /// # Safety
    /// The range begins at a multiple of [`Tiled::INNER`]. Its indices are valid for reading, the tile for writing. Vectors have
    /// [`TILE`] lanes.
    #[inline(always)]
    pub(in crate::nbits) unsafe fn round<I: Isa, X: Element>(
        self,
        isa: I,
        range: Range<usize>,
        tile: *mut f32,
        row: usize,
        input: impl Fn(usize) -> *const X,
    ) {
        let at = |k: usize| k / Tiled::INNER * TILE_FLOATS + row * TILE;
        let mut rest = isa.splat(0.0);
        // SAFETY: the caller's contract.
        unsafe {
            for k in range.clone().step_by(Tiled::INNER) {
                let first = isa.widen(input(k));
                let second = if k + TILE < range.end { isa.widen(input(k + TILE)) } else { isa.splat(0.0) };
                isa.store(tile.add(at(k)), isa.pair(first, second));
                rest = isa.add(rest, isa.add(isa.sub(first, first), isa.sub(second, second)));
            }
            if isa.sum(rest) == 0.0 {
                return;
            }
            // `pair` may turn NaN into a number.
            for k in range {
                let i = k % Tiled::INNER;
                let half = tile.add(at(k) + i % TILE).cast::<bf16>().add(i / TILE);
                half.write(bf16::from_f32((*input(k)).to_f32()));
            }
        }
    }
}

/// Offsets in floats.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    /// A vector of scales for each block.
    scales: usize,
    /// Scales times zero points.
    zeros: usize,
    /// Rows of pairs along the inner dimension, as the unit reads them.
    pairs: usize,
    /// Rows of the activations that are not tiles already.
    rows: usize,
    /// Sums: of two tiles of rows, or if they are kept, of two tiles of rows for all rows and then for all columns.
    sums: usize,
    kept: bool,
}

impl Layout {
    pub(super) fn new(x: &Activations<'_>, sections: &mut Sections) -> Result<Layout, Error> {
        let blocks = DEPTH / x.format.block;
        let scales = sections.add(blocks, COLUMNS)?;
        let zeros = sections.add(blocks, COLUMNS)?;
        let pairs = sections.add(DEPTH / 2, COLUMNS)?;
        let rows = sections.add(x.rows.next_multiple_of(TILE), DEPTH / 2)?;
        let kept = x.format.k > DEPTH && matches!(x.used, Used::Segments(None));
        let sums = match kept {
            true => sections.add(x.rows.min(KEPT_ROWS).next_multiple_of(ROWS), KEPT_COLUMNS)?,
            false => sections.add(ROWS, COLUMNS)?,
        };
        Ok(Layout { scales, zeros, pairs, rows, sums, kept })
    }
}

/// Adds the products of `rows` with `columns` to the rows' sums.
///
/// Contract of the constructor: as [`crate::nbits::Worker::multiply`]; the panel has the sections of [`Layout`].
pub(in crate::nbits) struct Halves<'a> {
    pub(in crate::nbits) unit: MatrixUnit,
    pub(in crate::nbits) weight: &'a NBits<'a>,
    pub(in crate::nbits) x: &'a Activations<'a>,
    pub(in crate::nbits) rows: &'a [Row],
    pub(in crate::nbits) columns: Range<usize>,
    pub(in crate::nbits) segments: Option<&'a [Segment]>,
    /// New sums only without segments.
    pub(in crate::nbits) start: Start<'a>,
    pub(in crate::nbits) panel: &'a Uncleared<'a>,
}

/// A panel: some columns of some blocks.
struct Panel {
    columns: Range<usize>,
    blocks: Range<usize>,
    scales: *mut f32,
    zeros: *mut f32,
    pairs: *mut f32,
}

/// Some blocks with the rows that use them, which are positions in [`Part::rows`].
struct Product {
    blocks: Range<usize>,
    picked: Vec<u32>,
    left: Left,
}

/// Where the tiles of a product's rows are, from its first inner index on.
#[derive(Clone, Copy)]
struct Left {
    start: *const f32,
    /// Floats between tiles.
    pitch: usize,
}

impl DotJob for Halves<'_> {
    type Output = u64;

    #[inline(always)]
    fn run<D: ByteDot>(self, dot: D) -> u64 {
        let Ok(layout) = Layout::new(self.x, &mut Sections::default()) else { return 0 };
        let multiplier = self.unit.start();
        let mut macs = 0;
        // Rows of several segments are only known by their positions among all.
        let together = if layout.kept { KEPT_ROWS } else { self.rows.len() };
        for rows in self.rows.chunks(together) {
            for column in self.columns.clone().step_by(KEPT_COLUMNS) {
                let columns = column..(column + KEPT_COLUMNS).min(self.columns.end);
                let part = Part { all: &self, layout, rows, columns };
                macs += part.run(dot, &multiplier);
            }
        }
        macs as u64
    }
}

/// Some rows and columns.
struct Part<'p, 'a> {
    all: &'p Halves<'a>,
    layout: Layout,
    rows: &'p [Row],
    columns: Range<usize>,
}

impl Part<'_, '_> {
    #[inline(always)]
    fn run<D: ByteDot>(&self, dot: D, multiplier: &Multiplier) -> usize {
        let (x, format) = (self.all.x, self.all.weight.format);
        let at = |offset: usize| self.all.panel.at(offset);
        let mut macs = 0;
        for first in (0..format.blocks()).step_by(DEPTH / format.block) {
            let blocks = first..(first + DEPTH / format.block).min(format.blocks());
            let products = products(&blocks, self.rows, x.rows, self.all.segments);
            // SAFETY: the constructor's contract; the memory has room for the rows of every product.
            let products = unsafe { self.gather(dot, products, at(self.layout.rows)) };
            if products.is_empty() {
                continue;
            }
            for column in self.columns.clone().step_by(COLUMNS) {
                let columns = column..(column + COLUMNS).min(self.columns.end);
                let [scales, zeros, pairs] = [self.layout.scales, self.layout.zeros, self.layout.pairs].map(at);
                let panel = Panel { columns, blocks: blocks.clone(), scales, zeros, pairs };
                // SAFETY: the constructor's contract; the panel's memory has room for it.
                unsafe {
                    match (format.bits, self.all.weight.zero_points.is_some()) {
                        (4, false) => self.unpack::<D, 4, false>(dot, &panel),
                        (4, true) => self.unpack::<D, 4, true>(dot, &panel),
                        (_, false) => self.unpack::<D, 8, false>(dot, &panel),
                        (_, true) => self.unpack::<D, 8, true>(dot, &panel),
                    }
                    macs += self.multiply(dot, multiplier, &panel, &products);
                }
            }
        }
        macs
    }

    /// Copies the rows of products that are not whole tiles of the activations to `output`.
    ///
    /// # Safety
    /// As the constructor's contract; `output` has room for [`DEPTH`] inner indices of each row, padded to whole tiles.
    #[inline(always)]
    unsafe fn gather<D: ByteDot>(
        &self,
        dot: D,
        products: Vec<(Range<usize>, Vec<u32>)>,
        mut output: *mut f32,
    ) -> Vec<Product> {
        let isa = dot.vectors();
        let pitch = Tiled::of(self.all.weight.format.k).floats();
        let mut gathered = Vec::with_capacity(products.len());
        for (blocks, picked) in products {
            let (start, len) =
                (blocks.start * self.all.weight.format.block, blocks.len() * self.all.weight.format.block);
            let (start, steps) = (start / Tiled::INNER * TILE_FLOATS, len.div_ceil(Tiled::INNER));
            let index = |position: u32| self.rows[position as usize].index as usize;
            let first = picked.first().map_or(0, |&position| index(position));
            let mut indices = picked.iter().map(|&position| index(position));
            let left = if first.is_multiple_of(TILE) && indices.by_ref().eq(first..first + picked.len()) {
                Left { start: self.all.x.tiles(first / TILE).wrapping_add(start), pitch }
            } else {
                for (i, &position) in picked.iter().enumerate() {
                    let row = index(position);
                    for step in 0..steps {
                        // SAFETY: the caller's contract.
                        unsafe {
                            let from = self.all.x.tiles(row / TILE).add(start + step * TILE_FLOATS + row % TILE * TILE);
                            let to = output.add((i / TILE * steps + step) * TILE_FLOATS + i % TILE * TILE);
                            isa.store(to, isa.load(from));
                        }
                    }
                }
                let left = Left { start: output, pitch: steps * TILE_FLOATS };
                output = output.wrapping_add(picked.len().div_ceil(TILE) * steps * TILE_FLOATS);
                left
            };
            gathered.push(Product { blocks, picked, left });
        }
        gathered
    }

    /// # Safety
    /// As the constructor's contract; the panel's memory has room for it.
    #[inline(always)]
    unsafe fn unpack<D: ByteDot, const BITS: usize, const Z: bool>(&self, dot: D, panel: &Panel) {
        let (isa, format) = (dot.vectors(), self.all.weight.format);
        let (start, end) = (panel.blocks.start * format.block_bytes(), panel.blocks.end * format.block_bytes());
        let subtracted = f32::from(FLOAT_SUBTRACTED[BITS / 8]);
        // Words of TILE inner indices.
        let half = TILE * BITS / 32;
        for c in [0, TILE] {
            // Lanes after the last column repeat it.
            let column = |lane: usize| (panel.columns.start + c + lane).min(panel.columns.end - 1);
            // SAFETY: the caller's contract.
            unsafe {
                let of_blocks = [panel.scales.add(c), panel.zeros.add(c)];
                self.all.weight.of_columns(dot, &column, &panel.blocks, subtracted, COLUMNS, of_blocks);
                for block in 0..panel.blocks.len() {
                    for numbers in of_blocks {
                        let numbers = numbers.add(block * COLUMNS);
                        // `pair` may turn other NaNs into numbers.
                        for number in std::slice::from_raw_parts_mut(numbers, D::Vectors::LANES) {
                            *number = if number.is_nan() { f32::NAN } else { *number };
                        }
                    }
                }
                for at in (start..end).step_by(ROW_BYTES) {
                    let mut words = [isa.splat(0.0); MAX_LANES];
                    for lane in 0..TILE {
                        let place = self.all.weight.data.as_ptr().add(column(lane) * format.row_bytes() + at);
                        words[lane] = dot.as_floats(match end - at >= ROW_BYTES {
                            true => dot.load(place),
                            false => dot.load_part(place, end - at),
                        });
                    }
                    isa.transpose(&mut words);
                    let count = ((end - at) / 4).min(MAX_LANES);
                    let of_word = |word: usize| {
                        let place = ((at - start) / 4 + word) * 4 / format.block_bytes() * COLUMNS;
                        (isa.load(of_blocks[0].add(place)), isa.load(of_blocks[1].add(place)))
                    };
                    for step in (0..count).step_by(2 * half) {
                        for word in step..step + half {
                            let inner = ((at - start) / 4 + word) / half / 2 * TILE + (word - step) * 32 / BITS;
                            let output = panel.pairs.add(inner * COLUMNS + c);
                            let (first, second) = (dot.as_words(words[word]), dot.as_words(words[word + half]));
                            let (scale, zero) = of_word(word);
                            let (scale2, zero2) = match word + half < count {
                                true => of_word(word + half),
                                false => (isa.splat(0.0), isa.splat(0.0)),
                            };
                            macro_rules! store {
                                ($method:ident, $($index:literal)*) => {$(
                                    let mut a = isa.mul(dot.$method::<$index>(first), scale);
                                    let mut b = isa.mul(dot.$method::<$index>(second), scale2);
                                    if Z {
                                        (a, b) = (isa.sub(a, zero), isa.sub(b, zero2));
                                    }
                                    isa.store(output.add($index * COLUMNS), isa.pair(a, b));
                                )*};
                            }
                            if BITS == 4 {
                                store!(nibble, 0 1 2 3 4 5 6 7);
                            } else {
                                store!(byte, 0 1 2 3);
                            }
                        }
                    }
                }
            }
        }
    }

    /// The products of all rows with a panel. Returns the number of multiply-accumulate operations.
    ///
    /// # Safety
    /// As the constructor's contract; the panel was unpacked.
    #[inline(always)]
    unsafe fn multiply<D: ByteDot>(
        &self,
        dot: D,
        multiplier: &Multiplier,
        panel: &Panel,
        products: &[Product],
    ) -> usize {
        let (format, kept) = (self.all.weight.format, self.layout.kept);
        let all = self.rows.len().next_multiple_of(ROWS);
        let sums = match kept {
            true => (panel.columns.start - self.columns.start) * all,
            false => 0,
        };
        let sums = self.all.panel.at(self.layout.sums + sums);
        let column = panel.columns.start - self.all.columns.start;
        let start = match self.all.start {
            Start::Sums => Start::Sums,
            Start::New(bias) => Start::New(bias.map(|bias| &bias[column..][..panel.columns.len()])),
        };
        // Columns of the next panel to read ahead, which another work item may have.
        let (mut ahead, mut block) = (panel.columns.end, panel.blocks.start);
        if ahead == self.columns.end && panel.blocks.end < format.blocks() {
            (ahead, block) = (self.columns.start, panel.blocks.end);
        }
        let mut ahead = ahead..(ahead + COLUMNS).min(self.all.weight.columns());
        for column in ahead.clone() {
            dot.vectors().prefetch(self.all.weight.scales.place(column * format.blocks() + block));
        }
        let bytes = (format.blocks() - block).min(DEPTH / format.block) * format.block_bytes();
        let mut macs = 0;
        for product in products {
            let steps = (product.blocks.len() * format.block).div_ceil(Tiled::INNER);
            let inner = (product.blocks.start - panel.blocks.start) * format.block;
            let b = panel.pairs.cast_const().wrapping_add(inner / 2 * COLUMNS);
            for (i, picked) in product.picked.chunks(ROWS).enumerate() {
                let tile = |i: usize| product.left.start.wrapping_add(i * product.left.pitch);
                let both = picked.len() > TILE;
                let sums = sums.wrapping_add(if kept { i * ROWS * COLUMNS } else { 0 });
                let product = TileProduct {
                    a: [tile(2 * i), tile(2 * i + usize::from(both))],
                    b,
                    b_stride: COLUMNS * size_of::<f32>(),
                    b_step: TILE * COLUMNS * size_of::<f32>(),
                    terms: 1,
                    term_strides: [0, 0],
                    steps,
                    last: TILE,
                    c: [sums, sums.wrapping_add(TILE * COLUMNS)],
                    c_stride: COLUMNS * size_of::<f32>(),
                    add: kept && panel.blocks.start > 0,
                    ahead: Lines {
                        start: self
                            .all
                            .weight
                            .data
                            .as_ptr()
                            .wrapping_add(ahead.start * format.row_bytes() + block * format.block_bytes()),
                        stride: format.row_bytes(),
                        bytes,
                        rows: usize::from(!ahead.is_empty()),
                    },
                };
                ahead.start = (ahead.start + steps).min(ahead.end);
                macs += picked.len().next_multiple_of(TILE) * steps * Tiled::INNER * COLUMNS;
                // SAFETY: the caller's contract: tiles of rows are whole, and so are those of the panel, whose inner indices are
                // padded, and of the sums.
                unsafe {
                    match both {
                        true => multiplier.multiply::<true>(&product),
                        false => multiplier.multiply::<false>(&product),
                    }
                    if kept && panel.blocks.end < format.blocks() {
                        continue;
                    }
                    for (i, &position) in picked.iter().enumerate() {
                        let output = self.rows[position as usize].output.wrapping_add(column);
                        add(dot.vectors(), sums.add(i * COLUMNS), start, output, panel.columns.len());
                    }
                }
            }
        }
        macs
    }
}

/// Adds `n` sums to `output`, which begins as `start` says.
///
/// # Safety
/// They are valid for reading, `output` for writing, and for reading with [`Start::Sums`].
#[inline(always)]
unsafe fn add<I: Isa>(isa: I, sums: *const f32, start: Start<'_>, output: *mut f32, n: usize) {
    let start = match start {
        Start::Sums => Some(output.cast_const()),
        Start::New(bias) => bias.map(<[f32]>::as_ptr),
    };
    // SAFETY: the caller's contract.
    unsafe {
        if n == COLUMNS {
            for c in (0..COLUMNS).step_by(I::LANES) {
                let sum = isa.load(sums.add(c));
                isa.store(output.add(c), start.map_or(sum, |start| isa.add(isa.load(start.add(c)), sum)));
            }
            return;
        }
        for c in (0..n).step_by(I::LANES) {
            let (n, output) = ((n - c).min(I::LANES), output.add(c));
            let load = |from: *const f32| isa.widen_part(from.add(c), n);
            let sum = start.map_or(load(sums), |start| isa.add(load(start), load(sums)));
            isa.narrow_part(output, sum, n);
        }
    }
}
