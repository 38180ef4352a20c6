//! float32 in fixed point: the numbers of a row, or of a column, in a block of inner indices have a scale of their own, by which the largest has
//! as many bits as the digits, of base 256. Products of digits are exact, in integers of 32 bits, and are added up in places. With three digits,
//! what is left out of a sum and what rounding to fixed point changes is less than float32 multiply-adds lose, unless one number of a block is
//! larger than the others by orders of magnitude and meets one that is as much smaller.

use super::{PackColumns, PackRows, Parts, STEP, STRIDE, Sums, TILE_FLOATS, Tiles, WIDTH};
use crate::isa::unit::{DigitProduct, TILE, TILE_BYTES};
use crate::isa::{Isa, LARGEST_OF_DIGITS, MAX_LANES, Multiplier, array};
use crate::terms::part;
use moh_operators::Element;

/// `N` digits of base 256, of -128 to 127: 2 or 3.
pub(crate) struct Digits<const N: usize>;

/// Vectors of a row in a tile: lane i of each is multiplied in the same word.
const QUARTERS: usize = 4;
/// Numbers of a row or column that are all smaller are rounded as if one was as large: its scale is finite.
const SMALLEST: f32 = 1.0 / (1u128 << 102) as f32;
/// What is between places.
const NEXT_PLACE: f32 = 1.0 / 256.0;

impl<const N: usize> Digits<N> {
    /// Digits that [`Isa::digits`] finds and that are 0.
    const NONE: usize = 3 - N;
    /// Less than the largest number of `N` digits by more than rounding adds.
    const LARGEST: f32 = ((LARGEST_OF_DIGITS >> (8 * Self::NONE)) - 7) as f32;
    /// A first digit's last bit.
    const FIRST_PLACE: f32 = (1 << (8 * (N - 1))) as f32;

    /// Of the largest magnitudes: what numbers are multiplied by, and what digits of the first place are.
    #[inline(always)]
    fn scales<I: Isa>(isa: I, largest: I::V) -> [I::V; 2] {
        let largest = isa.max(largest, isa.splat(SMALLEST));
        let of_first_place = isa.mul(largest, isa.splat(Self::FIRST_PLACE / Self::LARGEST));
        [isa.div(isa.splat(Self::LARGEST), largest), of_first_place]
    }
}

impl<const N: usize> Parts for Digits<N> {
    const COUNT: usize = N;
    const BYTES: usize = N;
    const INNER: usize = QUARTERS * TILE;
    /// Tiles, and the rows' scales.
    const ROWS: usize = Self::COUNT * Self::DEPTH * TILE_FLOATS + TILE;
    /// Tiles, and the columns' scales.
    const COLUMNS: usize = Self::COUNT * Self::DEPTH * TILE * WIDTH + WIDTH;
    const SUMS: usize = N * 2 * TILE * WIDTH;

    #[inline(always)]
    fn pack_rows<I: Isa, T: Element, F: Fn(usize) -> *const T>(isa: I, rows: &PackRows<T, F, Self>) -> bool {
        let depth = super::depth::<Self>(rows.width);
        let mut zero = isa.splat(0.0);
        for (block, start) in (0..rows.width).step_by(depth * Self::INNER).enumerate() {
            let inner = (rows.width - start).min(depth * Self::INNER);
            let steps = inner.div_ceil(Self::INNER);
            // SAFETY: there is room for the block.
            let output = unsafe { rows.output.add(block * rows.block) };
            for row in 0..TILE {
                let input = if row < rows.rows { (rows.input)(row) } else { std::ptr::null() };
                let (from, inner) = (input.wrapping_add(start), if input.is_null() { 0 } else { inner });
                // SAFETY: the constructor's contract.
                let x = |i: usize| unsafe { part(isa, from.wrapping_add(i), inner.saturating_sub(i).min(MAX_LANES)) };
                let x = |i: usize| match block == 0 && i < rows.lead {
                    true => rows.behind_lead(isa, i, x(i)),
                    false => x(i),
                };
                let mut largest = isa.splat(0.0);
                for i in (0..inner).step_by(MAX_LANES) {
                    largest = isa.larger_magnitude(largest, x(i));
                }
                let largest = isa.splat(largest_of(isa, largest));
                zero = isa.add(zero, isa.sub(largest, largest));
                let [scale, of_first_place] = Self::scales(isa, largest);
                for step in 0..steps {
                    let quarters = array(|i| x(step * Self::INNER + i * MAX_LANES));
                    for (digit, vector) in isa.digits(quarters, scale).into_iter().skip(Self::NONE).enumerate() {
                        let place = (digit * Self::DEPTH + step) * TILE_FLOATS + row * TILE;
                        // SAFETY: a tile has this row.
                        unsafe { isa.store(output.add(place), vector) }
                    }
                }
                // SAFETY: there is room for the rows' scales.
                unsafe { output.add(Self::COUNT * Self::DEPTH * TILE_FLOATS + row).write(first(isa, of_first_place)) }
            }
        }
        isa.sum(zero) == 0.0
    }

    #[inline(always)]
    fn pack_columns<I: Isa, T: Element>(isa: I, columns: &PackColumns<T, Self>) -> bool {
        let mut largest = [isa.splat(0.0); 2];
        for inner in 0..columns.inner {
            for (i, largest) in largest.iter_mut().enumerate() {
                *largest = isa.larger_magnitude(*largest, columns.at(isa, inner, i * MAX_LANES));
            }
        }
        let mut zero = isa.splat(0.0);
        for (i, largest) in largest.into_iter().enumerate() {
            let column = i * MAX_LANES;
            zero = isa.add(zero, isa.sub(largest, largest));
            let [scale, of_first_place] = Self::scales(isa, largest);
            for step in 0..columns.inner.div_ceil(Self::INNER) {
                for word in 0..TILE {
                    let inner = step * Self::INNER + word;
                    let quarters = array(|i| columns.at(isa, inner + i * TILE, column));
                    for (digit, vector) in isa.digits(quarters, scale).into_iter().skip(Self::NONE).enumerate() {
                        let place = ((step * N + digit) * TILE + word) * WIDTH + column;
                        // SAFETY: the constructor's contract.
                        unsafe { isa.store(columns.output.add(place), vector) }
                    }
                }
            }
            let place = Self::COUNT * Self::DEPTH * TILE * WIDTH + column;
            // SAFETY: there is room for the columns' scales.
            unsafe { isa.store(columns.output.add(place), of_first_place) }
        }
        isa.sum(zero) == 0.0
    }

    #[inline(always)]
    unsafe fn multiply<I: Isa, T: Element>(
        isa: I,
        multiplier: &Multiplier,
        tiles: &Tiles,
        on_the_way: *mut f32,
        sums: &Sums<'_>,
    ) {
        let product = DigitProduct {
            a: tiles.rows,
            b: tiles.first::<Self>(),
            b_stride: STRIDE,
            b_step: N * STEP,
            digit_strides: [Self::DEPTH * TILE_BYTES, STEP],
            digits: N,
            steps: tiles.steps.len(),
            c: on_the_way.cast(),
            ahead: tiles.ahead,
        };
        // SAFETY: the caller's contract; scales follow the tiles, and lanes are as many as a tile has columns.
        unsafe {
            match tiles.are_two() {
                true => multiplier.multiply_digits::<true>(&product),
                false => multiplier.multiply_digits::<false>(&product),
            }
            let of_columns = tiles.columns.add(Self::COUNT * Self::DEPTH * TILE * WIDTH);
            let of_columns = [isa.load(of_columns), isa.load(of_columns.add(TILE))];
            for row in 0..sums.rows {
                let of_row = tiles.rows[row / TILE].add(Self::COUNT * Self::DEPTH * TILE_FLOATS + row % TILE).read();
                let to = sums.start.add(sums.picked.map_or(row, |picked| picked[row] as usize) * WIDTH);
                for (i, of_column) in of_columns.into_iter().enumerate() {
                    let place = |place: usize| {
                        isa.widen_integers(isa.load(on_the_way.add((place * 2 * TILE + row) * WIDTH + i * TILE)))
                    };
                    let sum =
                        (0..N - 1).rev().fold(place(N - 1), |sum, i| isa.fma(sum, isa.splat(NEXT_PLACE), place(i)));
                    let sum = isa.mul(sum, isa.splat(of_row));
                    let to = to.add(i * TILE);
                    let sum = match sums.add {
                        true => isa.fma(sum, of_column, isa.load(to)),
                        false => isa.mul(sum, of_column),
                    };
                    isa.store(to, sum);
                }
            }
        }
    }
}

/// The largest lane; NaN or infinite if one is.
#[inline(always)]
fn largest_of<I: Isa>(isa: I, magnitudes: I::V) -> f32 {
    let mut lanes = [0.0f32; MAX_LANES];
    // SAFETY: the array holds MAX_LANES floats.
    unsafe { isa.store(lanes.as_mut_ptr(), magnitudes) }
    f32::from_bits(lanes.into_iter().fold(0, |largest, lane| largest.max(lane.to_bits())))
}

/// The first lane.
#[inline(always)]
fn first<I: Isa>(isa: I, x: I::V) -> f32 {
    let mut lanes = [0.0f32; MAX_LANES];
    // SAFETY: the array holds MAX_LANES floats.
    unsafe { isa.store(lanes.as_mut_ptr(), x) }
    lanes[0]
}
