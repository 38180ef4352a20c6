//! Products of many rows by a matrix unit, in tiles of bytes.
//!
//! A block's sums are integers, exact in any order, and the floating-point operations on them are those of [`Bytes::tile`] in the
//! same order. So results are the same, bit by bit, and either way may be taken.

use super::DEPTH;
use super::bytes::{Bytes, COLUMNS, Panel};
use crate::isa::unit::{BYTE_COLUMNS, ByteProduct, MultiplyBytes, TILE};
use crate::isa::{Isa, MAX_LANES};
use crate::memory::Sections;
use crate::nbits::isa::ByteDot;
use moh_operators::{Element, Error};
use std::ops::Range;

/// Rows of two tiles.
const ROWS: usize = 2 * TILE;

const _: () = assert!(COLUMNS == BYTE_COLUMNS && MAX_LANES == TILE);

/// Offsets in floats.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    /// Rows of bytes, for each product those of its blocks, in the order of the panel's words.
    pub(super) rows: usize,
    /// The sums of two blocks, so that the unit computes the next one's while vectors scale this one's.
    pub(super) products: usize,
    /// Sums of all blocks.
    pub(super) sums: usize,
}

impl Layout {
    pub(super) fn new(rows: usize, sections: &mut Sections) -> Result<Layout, Error> {
        let rows = sections.add(rows.next_multiple_of(TILE), DEPTH / size_of::<f32>())?;
        let products = sections.add(2 * ROWS, COLUMNS)?;
        let sums = sections.add(ROWS, COLUMNS)?;
        Ok(Layout { rows, products, sums })
    }
}

/// Whether at least half of the rows of tiles would be rows of `products`: blocks and the rows that use them.
pub(super) fn are_filled(products: &[(Range<usize>, Vec<u32>)]) -> bool {
    let all = |rows: fn(usize) -> usize| -> usize {
        products.iter().map(|(blocks, picked)| blocks.len() * rows(picked.len())).sum()
    };
    all(padded) <= 2 * all(|rows| rows)
}

/// Rows of whole tiles.
pub(super) fn padded(rows: usize) -> usize {
    rows.next_multiple_of(TILE)
}

/// Rows of the activations, packed for some blocks.
#[derive(Clone, Copy)]
struct Packed {
    start: *const u8,
    /// Bytes of a row.
    pitch: usize,
}

/// Where sums are.
#[derive(Clone, Copy)]
pub(super) struct Scratch {
    pub(super) products: *mut f32,
    pub(super) sums: *mut f32,
}

impl<T: Element> Bytes<'_, T> {
    /// Packs the rows of all products, one product after the other.
    ///
    /// # Safety
    /// As the constructor's contract; `output` has room for [`DEPTH`] bytes of each row, padded to whole tiles.
    #[inline(always)]
    pub(super) unsafe fn pack<D: ByteDot, const H: usize>(
        &self,
        products: &[(Range<usize>, Vec<u32>)],
        mut output: *mut u8,
    ) {
        let (lanes, words) = (D::Vectors::LANES, self.weight.format.block_bytes() / 4);
        for (blocks, picked) in products {
            let pitch = blocks.len() * self.weight.format.block;
            for (i, &position) in picked.iter().enumerate() {
                let x = self.x.row(self.rows[position as usize].index as usize).values.cast::<u32>();
                // SAFETY: the caller's contract: a row has all words of its chunks, and the product's rows have room.
                unsafe {
                    let mut place = output.add(i * pitch).cast::<u32>();
                    let (mut word, end) = (blocks.start * words, blocks.end * words);
                    while word < end {
                        let input = x.add(word / lanes * H * lanes + word % lanes);
                        let run = (end - word).min(lanes - word % lanes);
                        match (H, run) {
                            (1, _) => std::ptr::copy_nonoverlapping(input, place, run),
                            (_, MAX_LANES) => {
                                let [even, odd] = input.cast::<[[u32; MAX_LANES]; 2]>().read_unaligned();
                                let both: [[u32; 2]; MAX_LANES] = std::array::from_fn(|i| [even[i], odd[i]]);
                                place.cast::<[[u32; 2]; MAX_LANES]>().write_unaligned(both);
                            }
                            _ => {
                                for i in 0..run {
                                    *place.add(2 * i) = *input.add(i);
                                    *place.add(2 * i + 1) = *input.add(lanes + i);
                                }
                            }
                        }
                        place = place.add(H * run);
                        word += run;
                    }
                }
            }
            output = output.wrapping_add(padded(picked.len()) * pitch);
        }
    }

    /// Makes the unpacked weights signed. Without zero points their products then need no correction, as in the kernel of vectors,
    /// whose sums start with it.
    ///
    /// # Safety
    /// The panel was unpacked.
    #[inline(always)]
    pub(super) unsafe fn subtract(&self, panel: &Panel) {
        let len = panel.blocks.len() * self.weight.format.block * COLUMNS;
        // SAFETY: the caller's contract: a byte for each value of each column; floats may have any bits.
        let bytes = unsafe { std::slice::from_raw_parts_mut(panel.words.cast::<u8>(), len) };
        let zero = self.weight.format.default_zero();
        bytes.iter_mut().for_each(|byte| *byte = byte.wrapping_sub(zero));
    }

    /// Adds the products of all rows with a panel.
    ///
    /// # Safety
    /// As the constructor's contract; the panel was unpacked, and `packed` has the rows of `products`. `multiplier` was prepared for
    /// blocks.
    #[inline(always)]
    pub(super) unsafe fn multiply_tiles<D: ByteDot, M: MultiplyBytes>(
        &self,
        dot: D,
        multiplier: &M,
        panel: &Panel,
        products: &[(Range<usize>, Vec<u32>)],
        packed: *const u8,
        scratch: Scratch,
    ) {
        let mut start = packed;
        for (blocks, picked) in products {
            let pitch = blocks.len() * self.weight.format.block;
            for (i, picked) in picked.chunks(ROWS).enumerate() {
                let packed = Packed { start: start.wrapping_add(i * ROWS * pitch), pitch };
                // SAFETY: the caller's contract.
                unsafe {
                    match (picked.len() > TILE, self.weight.zero_points.is_some()) {
                        (true, false) => self.rows_of_tiles::<D, M, true, false>(
                            dot, multiplier, panel, blocks, picked, packed, scratch,
                        ),
                        (true, true) => self
                            .rows_of_tiles::<D, M, true, true>(dot, multiplier, panel, blocks, picked, packed, scratch),
                        (false, false) => self.rows_of_tiles::<D, M, false, false>(
                            dot, multiplier, panel, blocks, picked, packed, scratch,
                        ),
                        (false, true) => self.rows_of_tiles::<D, M, false, true>(
                            dot, multiplier, panel, blocks, picked, packed, scratch,
                        ),
                    }
                }
            }
            start = start.wrapping_add(padded(picked.len()) * pitch);
        }
    }

    /// The products of up to [`ROWS`] rows. With `Z`, the weight has zero points.
    ///
    /// # Safety
    /// As [`Bytes::multiply_tiles`]; there are more rows than those of a tile only with `BOTH`.
    #[inline(always)]
    unsafe fn rows_of_tiles<D: ByteDot, M: MultiplyBytes, const BOTH: bool, const Z: bool>(
        &self,
        dot: D,
        multiplier: &M,
        panel: &Panel,
        blocks: &Range<usize>,
        picked: &[u32],
        packed: Packed,
        scratch: Scratch,
    ) {
        let (isa, lanes, block) = (dot.vectors(), D::Vectors::LANES, self.weight.format.block);
        let first = blocks.start - panel.blocks.start;
        let product = |i: usize| {
            let a = packed.start.wrapping_add(i * block);
            ByteProduct {
                a: [a, a.wrapping_add(TILE * packed.pitch)],
                a_stride: packed.pitch,
                b: panel.words.cast_const().cast::<u8>().wrapping_add((first + i) * block * COLUMNS),
                c: scratch.products.wrapping_add(i % 2 * ROWS * COLUMNS).cast(),
            }
        };
        let mut scales = [std::ptr::null::<f32>(); ROWS];
        let mut corrections = [std::ptr::null::<f32>(); ROWS];
        for (i, &position) in picked.iter().enumerate() {
            let x = self.x.row(self.rows[position as usize].index as usize);
            (scales[i], corrections[i]) = (x.scales, x.corrections);
        }
        // SAFETY: the caller's contract; the scratch has room for the sums of two blocks and of all.
        unsafe {
            scratch.sums.write_bytes(0, picked.len() * COLUMNS);
            let multiply = |i: usize| match Z {
                true => multiplier.multiply::<BOTH, false>(&product(i)),
                false => multiplier.multiply::<BOTH, true>(&product(i)),
            };
            multiply(0);
            for (i, block) in blocks.clone().enumerate() {
                if i + 1 < blocks.len() {
                    multiply(i + 1);
                }
                let products = product(i).c.cast_const().cast::<u8>();
                let of_block = |values: *mut f32| [0, lanes].map(|c| isa.load(values.add((first + i) * COLUMNS + c)));
                let (scale, zero) = (of_block(panel.scales), of_block(panel.zeros));
                for r in 0..picked.len() {
                    let step = isa.splat(*scales[r].add(block));
                    for c in 0..2 {
                        let place = r * COLUMNS + c * lanes;
                        let product = dot.to_float(dot.load(products.add(4 * place)));
                        let sum = scratch.sums.add(place);
                        let mut total = isa.fma(product, isa.mul(scale[c], step), isa.load(sum));
                        if Z {
                            total = isa.fma(zero[c], isa.splat(*corrections[r].add(block)), total);
                        }
                        isa.store(sum, total);
                    }
                }
            }
            let column = panel.columns.start - self.columns.start;
            for (r, &position) in picked.iter().enumerate() {
                for c in 0..2 {
                    let n = panel.columns.len().saturating_sub(c * lanes).min(lanes);
                    let sum = isa.load(scratch.sums.add(r * COLUMNS + c * lanes));
                    let output = self.rows[position as usize].output.wrapping_add(column + c * lanes);
                    if n == lanes {
                        isa.store(output, isa.add(isa.load(output), sum));
                    } else if n > 0 {
                        isa.narrow_part(output, isa.add(isa.widen_part(output, n), sum), n);
                    }
                }
            }
        }
    }
}
