//! Products of 8-bit activations with unpacked weights of 8 bits.

use super::products;
use crate::isa::{Isa, MAX_LANES, array};
use crate::memory::{Sections, Uncleared};
use crate::nbits::activations::Segment;
use crate::nbits::isa::{ByteDot, DotJob, NARROW_SUBTRACTED, Words16};
use crate::nbits::{Activations, NBits, Row, Start};
use moh_operators::Error;
use std::ops::Range;

/// Offsets in floats, for panels of at most [`COLUMNS`] columns.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    /// A vector of scales a block.
    scales: usize,
    /// Scales times what the products have not subtracted from the weights.
    zeros: usize,
    /// Words, in order: for weights of 4 bits, first the low halves of a word's bytes, then the high ones. Widened bytes are two words.
    words: usize,
}

/// Inner indices of a panel: a multiple of every block and of the values in a vector of any weight. Sums are read and written once for each.
const DEPTH: usize = 2048;
/// The same for widened bytes, of which more do not fit into the first-level cache beside rows that are widened as well.
const WIDENED_DEPTH: usize = 512;
/// Vectors of columns of a panel, at most.
const VECTORS: usize = 2;
const COLUMNS: usize = VECTORS * MAX_LANES;
/// What sums begin with that have no bias.
static ZEROS: [f32; COLUMNS] = [0.0; COLUMNS];

impl Layout {
    pub(super) fn new(x: &Activations<'_>, sections: &mut Sections) -> Result<Layout, Error> {
        let blocks = DEPTH / x.format.block;
        let scales = sections.add(blocks, COLUMNS)?;
        let zeros = sections.add(blocks, COLUMNS)?;
        // Enough for widened bytes, which are twice as many.
        let words = sections.add(DEPTH / 4, COLUMNS)?;
        Ok(Layout { scales, zeros, words })
    }
}

/// Adds the products of `rows` with `columns` to the rows' sums.
///
/// Contract of the constructor: as [`crate::nbits::Worker::multiply`]; the panel has the sections of [`Layout`].
pub(in crate::nbits) struct Bytes<'a> {
    pub(in crate::nbits) weight: &'a NBits<'a>,
    pub(in crate::nbits) x: &'a Activations<'a>,
    pub(in crate::nbits) rows: &'a [Row],
    pub(in crate::nbits) columns: Range<usize>,
    pub(in crate::nbits) segments: Option<&'a [Segment]>,
    /// What the sums begin with: their own numbers, unless all rows use all blocks.
    pub(in crate::nbits) start: Start<'a>,
    pub(in crate::nbits) panel: &'a Uncleared<'a>,
}

/// A panel: some columns of some blocks.
pub(super) struct Panel {
    pub(super) columns: Range<usize>,
    pub(super) blocks: Range<usize>,
    pub(super) scales: *mut f32,
    pub(super) zeros: *mut f32,
    pub(super) words: *mut f32,
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Lines of columns to prefetch, some at a time. They may be anywhere: they are never dereferenced.
struct Ahead {
    /// The next line, and how many of its column are left from it on.
    next: *const u8,
    left: usize,
    /// Columns that are left, of so many lines each.
    columns: usize,
    lines: usize,
    /// Bytes from the last line of a column to the first one of the next.
    skip: usize,
    at_once: usize,
}

impl Ahead {
    #[inline(always)]
    fn fetch<I: Isa>(&mut self, isa: I) {
        for _ in 0..self.at_once {
            if self.columns == 0 {
                return;
            }
            isa.prefetch(self.next);
            self.left -= 1;
            let is_last = self.left == 0;
            self.next = self.next.wrapping_add(if is_last { self.skip } else { LINE });
            if is_last {
                self.columns -= 1;
                self.left = self.lines;
            }
        }
    }
}

impl DotJob for Bytes<'_> {
    type Output = u64;

    #[inline(always)]
    fn run<D: ByteDot>(self, dot: D) -> u64 {
        match self.weight.format.bits {
            8 if self.weight.format.narrow && dot.parts().is_some() => self.all::<D, NARROW, 4, 2>(dot),
            8 => self.all::<D, 1, 6, 2>(dot),
            // Sums of 16 bits need registers before they are added.
            _ if D::Vectors::REGISTERS < 32 && dot.parts().is_some() => self.all::<D, 2, 4, 2>(dot),
            _ => self.all::<D, 2, 6, 2>(dot),
        }
    }
}

/// Instead of a number of values in each byte: one, of a weight that is known to be narrow.
const NARROW: usize = 3;

/// Words that a panel has for each word of a weight with `H` values in each byte.
#[inline(always)]
fn words_of<D: ByteDot, const H: usize>(dot: D) -> usize {
    if H == NARROW || H == 1 && dot.parts().is_none() { 1 } else { 2 }
}

impl Bytes<'_> {
    /// `H` values in each byte of the weight, tiles of `R` rows and `C` vectors.
    #[inline(always)]
    fn all<D: ByteDot, const H: usize, const R: usize, const C: usize>(&self, dot: D) -> u64 {
        let format = self.weight.format;
        let layout = Layout::new(self.x, &mut Sections::default());
        let Ok(Layout { scales, zeros, words }) = layout else { return 0 };
        let [scales, zeros, words] = [scales, zeros, words].map(|offset| self.panel.at(offset));
        let mut macs = 0;
        let width = C * D::Vectors::LANES;
        let is_widened = H == 1 && words_of::<D, H>(dot) > 1;
        let depth = (if is_widened { WIDENED_DEPTH } else { DEPTH }) / format.block;
        for first in (0..format.blocks()).step_by(depth) {
            let blocks = first..(first + depth).min(format.blocks());
            let products = products(&blocks, self.rows, self.x.rows, self.segments);
            if products.is_empty() {
                continue;
            }
            for column in self.columns.clone().step_by(width) {
                let columns = column..(column + width).min(self.columns.end);
                let panel = Panel { columns, blocks: blocks.clone(), scales, zeros, words };
                // SAFETY: the constructor's contract; the panel's memory has room for it.
                unsafe {
                    self.unpack::<D, H, C>(dot, &panel);
                    let tiles = products.iter().map(|(_, picked)| picked.len().div_ceil(R)).sum();
                    let mut ahead = self.ahead::<D>(dot, &panel, width, depth, tiles);
                    for (blocks, picked) in &products {
                        self.multiply::<D, H, R, C>(dot, &panel, blocks, picked, &mut ahead);
                        macs += picked.len() * blocks.len() * format.block * width;
                    }
                }
            }
        }
        macs as u64
    }

    /// What to read ahead while `tiles` tiles are multiplied with a panel: the next one's weights.
    #[inline(always)]
    fn ahead<D: ByteDot>(&self, dot: D, panel: &Panel, width: usize, depth: usize, tiles: usize) -> Ahead {
        let format = self.weight.format;
        let (mut column, mut block) = (panel.columns.end, panel.blocks.start);
        if column == self.columns.end && panel.blocks.end < format.blocks() {
            (column, block) = (self.columns.start, panel.blocks.end);
        }
        // The columns after the last one belong to the next work item.
        let columns = (self.weight.n - column).min(width);
        let bytes = (format.blocks() - block).min(depth) * format.block_bytes();
        for column in column..column + columns {
            dot.vectors().prefetch(self.weight.scales.place(column * format.blocks() + block));
        }
        let start = self.weight.data.as_ptr().wrapping_add(column * format.row_bytes() + block * format.block_bytes());
        let lines = bytes.div_ceil(LINE);
        Ahead {
            next: start,
            left: lines,
            columns: if lines > 0 { columns } else { 0 },
            lines,
            // A column may end within a line.
            skip: format.row_bytes().wrapping_sub(lines.saturating_sub(1) * LINE),
            at_once: (columns * lines).div_ceil(tiles.max(1)),
        }
    }

    /// # Safety
    /// As the constructor's contract; the panel's memory has room for it.
    #[inline(always)]
    unsafe fn unpack<D: ByteDot, const H: usize, const C: usize>(&self, dot: D, panel: &Panel) {
        let (isa, lanes, format) = (dot.vectors(), D::Vectors::LANES, self.weight.format);
        let (columns, blocks) = (&panel.columns, &panel.blocks);
        let (start, end) = (blocks.start * format.block_bytes(), blocks.end * format.block_bytes());
        let subtracted = f32::from(if H == NARROW { NARROW_SUBTRACTED } else { D::SUBTRACTED[usize::from(H == 1)] });
        // SAFETY: the caller's contract. Lanes after the last column repeat it.
        unsafe {
            for c in 0..C {
                let column = |lane: usize| (columns.start + c * lanes + lane).min(columns.end - 1);
                for at in (start..end).step_by(4 * lanes) {
                    let mut words = [isa.splat(0.0); MAX_LANES];
                    for lane in 0..lanes {
                        let place = self.weight.data.as_ptr().add(column(lane) * format.row_bytes() + at);
                        words[lane] = dot.as_floats(match end - at >= 4 * lanes {
                            true => dot.load(place),
                            false => dot.load_part(place, end - at),
                        });
                    }
                    isa.transpose(&mut words);
                    for word in 0..lanes {
                        let words = dot.as_words(words[word]);
                        let parts = match dot.parts().filter(|_| H != 2) {
                            Some(words16) if H == NARROW => [words16.narrow(words); 2],
                            Some(words16) => words16.widen(words),
                            None if H == 1 => [words; 2],
                            None => [dot.low(words), dot.high(words)],
                        };
                        let in_word = words_of::<D, H>(dot);
                        let output = panel.words.add((((at - start) / 4 + word) * in_word * C + c) * lanes);
                        for (i, part) in parts.into_iter().enumerate().take(in_word) {
                            isa.store(output.add(i * C * lanes), dot.as_floats(part));
                        }
                    }
                }
                self.weight.of_columns(
                    dot,
                    &column,
                    blocks,
                    subtracted,
                    C * lanes,
                    [panel.scales, panel.zeros].map(|start| start.add(c * lanes)),
                );
            }
        }
    }

    /// # Safety
    /// As the constructor's contract; the panel was unpacked, and its blocks include `blocks`.
    #[inline(always)]
    unsafe fn multiply<D: ByteDot, const H: usize, const R: usize, const C: usize>(
        &self,
        dot: D,
        panel: &Panel,
        blocks: &Range<usize>,
        picked: &[u32],
        ahead: &mut Ahead,
    ) {
        let (tiles, rest) = picked.split_at(picked.len() / R * R);
        let (twos, one) = rest.split_at(rest.len() / 2 * 2);
        // SAFETY: the caller's contract.
        unsafe {
            self.tiles::<D, H, R, C>(dot, panel, blocks, tiles, ahead);
            self.tiles::<D, H, 2, C>(dot, panel, blocks, twos, ahead);
            self.tiles::<D, H, 1, C>(dot, panel, blocks, one, ahead);
        }
    }

    /// Tiles of `R` rows, whose number is a multiple of it.
    ///
    /// # Safety
    /// As [`Bytes::multiply`].
    #[inline(always)]
    unsafe fn tiles<D: ByteDot, const H: usize, const R: usize, const C: usize>(
        &self,
        dot: D,
        panel: &Panel,
        blocks: &Range<usize>,
        picked: &[u32],
        ahead: &mut Ahead,
    ) {
        if picked.is_empty() {
            return;
        }
        match self.weight.zero_points.is_some() {
            false => dot.vectorize(Tiles::<H, R, C, false> { all: self, panel, blocks, picked, ahead }),
            true => dot.vectorize(Tiles::<H, R, C, true> { all: self, panel, blocks, picked, ahead }),
        }
    }

    /// A tile of `R` rows and `C` vectors of columns. With `Z`, the weight has zero points.
    ///
    /// # Safety
    /// As [`Bytes::multiply`]; there are `R` rows.
    #[inline(always)]
    unsafe fn tile<D: ByteDot, const H: usize, const R: usize, const C: usize, const Z: bool>(
        &self,
        dot: D,
        panel: &Panel,
        blocks: &Range<usize>,
        picked: &[u32],
    ) {
        let (isa, lanes) = (dot.vectors(), D::Vectors::LANES);
        let row: [Row; R] = array(|r| self.rows[picked[r] as usize]);
        let x: [*const f32; R] = array(|r| self.x.row(row[r].index as usize).values);
        let layout = self.x.layout;
        let words = self.weight.format.block_bytes() / 4;
        // SAFETY: the caller's contract.
        unsafe {
            let column = panel.columns.start - self.columns.start;
            let width = |c: usize| panel.columns.len().saturating_sub(c * lanes).min(lanes);
            let output: [*mut f32; R] = array(|r| row[r].output.add(column));
            let before: [*const f32; R] = match self.start {
                Start::New(bias) if blocks.start == 0 => {
                    for r in 0..R {
                        isa.prefetch_output(output[r].cast_const().cast());
                    }
                    [bias.map_or(ZEROS.as_ptr(), |bias| bias[column..].as_ptr()); R]
                }
                _ => output.map(<*mut f32>::cast_const),
            };
            let mut sums = [[isa.splat(0.0); C]; R];
            for c in 0..C {
                for r in 0..R {
                    sums[r][c] = isa.widen_part(before[r].wrapping_add(c * lanes), width(c));
                }
            }
            let first = blocks.start - panel.blocks.start;
            let in_block = words * words_of::<D, H>(dot) * C * lanes;
            let mut w = panel.words.cast_const().add(first * in_block).cast();
            let of_panel = |start: *mut f32| start.cast_const().add(first * C * lanes);
            let [mut scales, mut zeros] = [panel.scales, panel.zeros].map(of_panel);
            for block in blocks.clone() {
                let start = |r: usize| match Z {
                    true => dot.zero(),
                    false => dot.broadcast(x[r].add(layout.starts + block).cast()),
                };
                let products: [[D::W; C]; R] = products_of_block::<D, H, R, C>(dot, w, &x, block, words, start);
                // With few registers the products need all of them, and the sums are in memory. Left alone, the compiler copies them there
                // and back twice.
                let sums = if D::Vectors::REGISTERS >= 32 { &mut sums } else { std::hint::black_box(&mut sums) };
                let of_columns: [_; C] = array(|c| isa.load(scales.add(c * lanes)));
                for r in 0..R {
                    let step = isa.splat(*x[r].add(layout.scales + block));
                    for c in 0..C {
                        sums[r][c] = isa.fma(dot.to_float(products[r][c]), isa.mul(of_columns[c], step), sums[r][c]);
                        if Z {
                            let correction = isa.splat(*x[r].add(layout.corrections + block));
                            sums[r][c] = isa.fma(isa.load(zeros.add(c * lanes)), correction, sums[r][c]);
                        }
                    }
                }
                w = w.add(4 * in_block);
                scales = scales.add(C * lanes);
                zeros = zeros.add(C * lanes);
            }
            for c in 0..C {
                for r in 0..R {
                    isa.narrow_part(output[r].wrapping_add(c * lanes), sums[r][c], width(c));
                }
            }
        }
    }
}

/// Tiles of `R` rows and `C` vectors of columns, in a function of their own, which has registers for nothing else.
///
/// Contract of the constructor: as [`Bytes::multiply`]; the number of rows is a multiple of `R`.
struct Tiles<'a, const H: usize, const R: usize, const C: usize, const Z: bool> {
    all: &'a Bytes<'a>,
    panel: &'a Panel,
    blocks: &'a Range<usize>,
    picked: &'a [u32],
    ahead: &'a mut Ahead,
}

impl<const H: usize, const R: usize, const C: usize, const Z: bool> DotJob for Tiles<'_, H, R, C, Z> {
    type Output = ();

    #[inline(always)]
    fn run<D: ByteDot>(self, dot: D) {
        for tile in self.picked.chunks_exact(R) {
            self.ahead.fetch(dot.vectors());
            // SAFETY: the constructor's contract.
            unsafe { self.all.tile::<D, H, R, C, Z>(dot, self.panel, self.blocks, tile) }
        }
    }
}

/// A block's products with `R` rows: sums that begin with each row's `start`. A block has `words` words of the weight.
///
/// # Safety
/// `w` is valid for reading the block's words in `C` vectors of columns, and `x` for reading all rows' words.
#[inline(always)]
unsafe fn products_of_block<D: ByteDot, const H: usize, const R: usize, const C: usize>(
    dot: D,
    mut w: *const u8,
    x: &[*const f32; R],
    block: usize,
    words: usize,
    start: impl Fn(usize) -> D::W,
) -> [[D::W; C]; R] {
    let lanes = D::Vectors::LANES;
    let (mut word, end) = (block * words, (block + 1) * words);
    // SAFETY: the caller's contract.
    unsafe {
        if H == 1
            && let Some(words16) = dot.parts()
        {
            // Nothing is left to subtract from a weight without zero points. The first products are no sums.
            let mut products = [[dot.zero(); C]; R];
            step(dot, w, x, 2 * word, &mut products, |_, w, x| words16.multiply2(w, x));
            for place in 2 * word + 1..2 * end {
                w = w.add(4 * lanes * C);
                step(dot, w, x, place, &mut products, |sum, w, x| words16.add2(sum, words16.multiply2(w, x)));
            }
            return products;
        }
        if H == NARROW
            && let Some(words16) = dot.parts()
        {
            let mut products = [[dot.zero(); C]; R];
            let next = |sum, w, x| words16.add2(sum, words16.multiply_narrow(w, x));
            let at = |w: *const u8, i: usize| w.add(i * C * 4 * lanes);
            step(dot, w, x, word, &mut products, |_, w, x| words16.multiply_narrow(w, x));
            for i in 1..FOUR {
                step(dot, at(w, i), x, word + i, &mut products, next);
            }
            while end - word > FOUR {
                word += FOUR;
                w = at(w, FOUR);
                for i in 0..FOUR {
                    step(dot, at(w, i), x, word + i, &mut products, next);
                }
            }
            return array(|r| {
                let start = start(r);
                array(|c| words16.add2(products[r][c], start))
            });
        }
        if H == 2
            && words == FOUR
            && let Some(words16) = dot.parts()
        {
            // Sums of 16 bits take the registers of those of 32, which begin after them.
            let parts: [[D::W; C]; R] = four_words(dot, words16, w, x, word);
            return array(|r| {
                let start = start(r);
                array(|c| words16.add(start, parts[r][c]))
            });
        }
        let mut products = array(|r| [start(r); C]);
        if H == 2
            && let Some(words16) = dot.parts()
        {
            while end - word >= FOUR {
                let parts: [[D::W; C]; R] = four_words(dot, words16, w, x, word);
                for r in 0..R {
                    for c in 0..C {
                        products[r][c] = words16.add(products[r][c], parts[r][c]);
                    }
                }
                w = w.add(FOUR * H * C * 4 * lanes);
                word += FOUR;
            }
        }
        // Words of a block come in fours, or in twos with two values in each byte, inside a vector of the weight.
        while word < end {
            let first = word / lanes * H * lanes + word % lanes;
            for place in first..first + 4 / H {
                for h in 0..H {
                    let product = |sum, w, x| if H == 1 { dot.dot8(sum, w, x) } else { dot.dot4(sum, w, x) };
                    step(dot, w, x, place + h * lanes, &mut products, product);
                    w = w.add(4 * lanes * C);
                }
            }
            word += 4 / H;
        }
        products
    }
}

/// Words with whose halves sums of 16 bits can be made.
const FOUR: usize = 4;

/// The products of [`FOUR`] words of each row, from `word` on, with both halves of the weight's bytes, in sums of 16 bits.
///
/// # Safety
/// As [`products_of_block`].
#[inline(always)]
unsafe fn four_words<D: ByteDot, const R: usize, const C: usize>(
    dot: D,
    words16: D::Parts,
    w: *const u8,
    x: &[*const f32; R],
    word: usize,
) -> [[D::W; C]; R] {
    let lanes = D::Vectors::LANES;
    let place = word / lanes * 2 * lanes + word % lanes;
    let mut parts = [[dot.zero(); C]; R];
    // SAFETY: the caller's contract.
    unsafe {
        let next = |sum, w, x| words16.add4(sum, words16.multiply4(w, x));
        let half = |i: usize| w.add(i * C * 4 * lanes);
        step(dot, half(0), x, place, &mut parts, |_, w, x| words16.multiply4(w, x));
        step(dot, half(1), x, place + lanes, &mut parts, next);
        for i in 1..FOUR {
            step(dot, half(2 * i), x, place + i, &mut parts, next);
            step(dot, half(2 * i + 1), x, place + lanes + i, &mut parts, next);
        }
    }
    parts
}

/// Adds the products of a word in each of `C` vectors' columns with word `place` of each row.
///
/// # Safety
/// `w` is valid for reading `C` vectors, and `x` for reading these words.
#[inline(always)]
unsafe fn step<D: ByteDot, const R: usize, const C: usize>(
    dot: D,
    w: *const u8,
    x: &[*const f32; R],
    place: usize,
    sums: &mut [[D::W; C]; R],
    product: impl Fn(D::W, D::W, D::W) -> D::W,
) {
    // SAFETY: the caller's contract.
    unsafe {
        let weights: [D::W; C] = array(|c| dot.load(w.add(4 * D::Vectors::LANES * c)));
        for r in 0..R {
            let values = dot.broadcast(x[r].add(place).cast());
            for c in 0..C {
                sums[r][c] = product(sums[r][c], weights[c], values);
            }
        }
    }
}
