//! Products of f32 activations with panels that are unpacked to f32.

use super::{DEPTH, products};
use crate::gemm::{self, Ahead, Tiles};
use crate::isa::{Isa, MAX_LANES};
use crate::memory::{Sections, Uncleared};
use crate::nbits::activations::Segment;
use crate::nbits::isa::{ByteDot, DotJob, FLOAT_SUBTRACTED};
use crate::nbits::{Activations, NBits, Row, Start};
use moh_operators::Error;
use std::ops::Range;

/// Vectors of columns of a panel, at most.
const VECTORS: usize = 5;

/// Offsets in floats.
pub(super) struct Layout {
    /// [`DEPTH`] rows of columns.
    panel: usize,
    /// A row of sums for each row of the activations.
    sums: usize,
}

impl Layout {
    pub(super) fn new(x: &Activations<'_>, sections: &mut Sections) -> Result<Layout, Error> {
        let panel = sections.add(DEPTH, VECTORS * MAX_LANES)?;
        let sums = sections.add(x.rows, VECTORS * MAX_LANES)?;
        Ok(Layout { panel, sums })
    }
}

/// Adds the products of `rows` with `columns` to the rows' sums.
///
/// Contract of the constructor: as [`crate::nbits::Worker::multiply`]; the panel has the sections of [`Layout`].
pub(in crate::nbits) struct Floats<'a> {
    pub(in crate::nbits) weight: &'a NBits<'a>,
    pub(in crate::nbits) x: &'a Activations<'a>,
    pub(in crate::nbits) rows: &'a [Row],
    pub(in crate::nbits) columns: Range<usize>,
    pub(in crate::nbits) segments: Option<&'a [Segment]>,
    pub(in crate::nbits) panel: &'a Uncleared<'a>,
}

impl DotJob for Floats<'_> {
    type Output = u64;

    #[inline(always)]
    fn run<D: ByteDot>(self, dot: D) -> u64 {
        let (isa, format, x) = (dot.vectors(), self.weight.format, self.x);
        let Ok(Layout { panel, sums }) = Layout::new(x, &mut Sections::default()) else { return 0 };
        let (panel, sums) = (self.panel.at(panel), self.panel.at(sums));
        // Panels of nearly equal width: a narrow one would wait for each addition.
        let lanes = D::Vectors::LANES;
        let vectors = self.columns.len().div_ceil(lanes);
        let panels = vectors.div_ceil(gemm::vectors::<D::Vectors>());
        let edge = |panel: usize| (self.columns.start + vectors * panel / panels * lanes).min(self.columns.end);
        let mut macs = 0;
        for first in (0..format.blocks()).step_by(DEPTH / format.block) {
            let blocks = first..(first + DEPTH / format.block).min(format.blocks());
            let products = products(&blocks, self.rows, x.rows, self.segments);
            if products.is_empty() {
                continue;
            }
            for index in 0..panels {
                let columns = edge(index)..edge(index + 1);
                let column = columns.start;
                let vectors = columns.len().div_ceil(lanes);
                let width = vectors * lanes;
                let in_place = columns.len() == width;
                // SAFETY: the constructor's contract; the panel has room for DEPTH rows of VECTORS vectors, and for as many sums
                // for each row.
                unsafe {
                    self.unpack(dot, columns.clone(), &blocks, panel, width);
                    let row = |(i, row): (usize, &Row)| gemm::Row {
                        input: x.row(row.index as usize).values,
                        output: match in_place {
                            true => row.output.add(column - self.columns.start),
                            false => sums.add(i * width),
                        },
                    };
                    let rows: Vec<gemm::Row> = self.rows.iter().enumerate().map(row).collect();
                    // From the sums so far, so that rounding is the same in place and here.
                    let copied = if in_place { &[][..] } else { self.rows };
                    for (row, sums) in copied.iter().zip(&rows) {
                        let place = row.output.add(column - self.columns.start);
                        std::ptr::copy_nonoverlapping(place, sums.output, columns.len());
                        std::slice::from_raw_parts_mut(sums.output.add(columns.len()), width - columns.len()).fill(0.0);
                    }
                    for (range, picked) in &products {
                        let k = range.start * format.block..range.end * format.block;
                        let b = panel.cast_const().add((k.start - blocks.start * format.block) * width);
                        macs += picked.len() * k.len() * width;
                        let ahead = Ahead::default();
                        let tiles = Tiles { rows: &rows, picked, k, b, vectors, column: 0, begin: Start::Sums, ahead };
                        crate::isa::Job::run(tiles, isa);
                    }
                    for (row, sums) in copied.iter().zip(&rows) {
                        let place = row.output.add(column - self.columns.start);
                        std::ptr::copy_nonoverlapping(sums.output, place, columns.len());
                    }
                }
            }
        }
        macs as u64
    }
}

impl Floats<'_> {
    /// Unpacks `columns` of `blocks` to rows of `width` floats. Columns after the last repeat it.
    ///
    /// # Safety
    /// As the constructor's contract; `panel` has room.
    #[inline(always)]
    unsafe fn unpack<D: ByteDot>(
        &self,
        dot: D,
        columns: Range<usize>,
        blocks: &Range<usize>,
        panel: *mut f32,
        width: usize,
    ) {
        let (isa, lanes, format) = (dot.vectors(), D::Vectors::LANES, self.weight.format);
        let in_word = 32 / format.bits;
        let (start, end) = (blocks.start * format.block_bytes(), blocks.end * format.block_bytes());
        let subtracted = f32::from(FLOAT_SUBTRACTED[format.bits / 8]);
        for c in (0..width).step_by(lanes) {
            let column = |lane: usize| (columns.start + c + lane).min(columns.end - 1);
            let mut block = usize::MAX;
            let (mut scale, mut zero) = (isa.splat(0.0), isa.splat(0.0));
            for at in (start..end).step_by(4 * lanes) {
                // SAFETY: the caller's contract.
                unsafe {
                    let mut words = [isa.splat(0.0); MAX_LANES];
                    for lane in 0..lanes {
                        let place = self.weight.data.as_ptr().add(column(lane) * format.row_bytes() + at);
                        words[lane] = dot.as_floats(match end - at >= 4 * lanes {
                            true => dot.load(place),
                            false => dot.load_part(place, end - at),
                        });
                    }
                    isa.transpose(&mut words);
                    for word in 0..lanes.min((end - at) / 4) {
                        let byte = at + 4 * word;
                        if byte / format.block_bytes() != block {
                            block = byte / format.block_bytes();
                            (scale, zero) = self.of_block(isa, block, &column, subtracted);
                        }
                        let output = panel.add((byte - start) / 4 * in_word * width + c);
                        let words = dot.as_words(words[word]);
                        macro_rules! store {
                            ($method:ident, $($index:literal)*) => {$(
                                let value = isa.mul(isa.sub(dot.$method::<$index>(words), zero), scale);
                                isa.store(output.add($index * width), value);
                            )*};
                        }
                        match format.bits {
                            4 => {
                                store!(nibble, 0 1 2 3 4 5 6 7);
                            }
                            _ => {
                                store!(byte, 0 1 2 3);
                            }
                        }
                    }
                }
            }
        }
    }

    /// The scales of a block of a vector of columns, and the zero points less `subtracted`.
    #[inline(always)]
    unsafe fn of_block<I: Isa>(
        &self,
        isa: I,
        block: usize,
        column: &impl Fn(usize) -> usize,
        subtracted: f32,
    ) -> (I::V, I::V) {
        let (mut scales, mut zeros) = ([0.0f32; MAX_LANES], [0.0f32; MAX_LANES]);
        for lane in 0..I::LANES {
            let n = column(lane);
            scales[lane] = self.weight.scales.at(n * self.weight.format.blocks() + block);
            zeros[lane] = f32::from(self.weight.zero_point(n, block)) - subtracted;
        }
        // SAFETY: the arrays hold MAX_LANES floats.
        unsafe { (isa.load(scales.as_ptr()), isa.load(zeros.as_ptr())) }
    }
}
