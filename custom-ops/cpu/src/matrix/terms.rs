//! Numbers as sums of bf16 terms.

use super::store::AddRows;
use super::{PackColumns, PackRows, Parts, STEP, STRIDE, Sums, TILE_FLOATS, Tiles, WIDTH};
use crate::isa::unit::{TILE, TILE_BYTES, TileProduct};
use crate::isa::{Isa, Job, MAX_LANES, Multiplier};
use crate::terms::{load, part, split, terms};
use moh_operators::{Element, Float};

/// `N` bf16 terms: of a type that needs no more, or one, to which numbers are rounded.
pub(crate) struct Terms<const N: usize>;

/// Terms of two vectors, and what is 0 unless terms of a number that is not finite may be.
#[inline(always)]
fn terms_of<I: Isa, T: Element, const N: usize>(isa: I, a: I::V, b: I::V) -> ([I::V; N], I::V) {
    match N {
        1 if terms(T::FLOAT) > 1 => ([isa.pair(a, b); N], isa.add(isa.sub(a, a), isa.sub(b, b))),
        // Numbers of a type that needs no more, though they may be float32 on the way.
        _ => (split(isa, a, b), isa.splat(0.0)),
    }
}

impl Terms<1> {
    /// Numbers of a block of a float32 weight, in a vector of columns from `column` on: of inner index `word` of a step, and of the one [`TILE`] after it.
    ///
    /// # Safety
    /// [`PackColumns`] has made the block; it has the step and the columns. Vectors have [`MAX_LANES`] lanes.
    #[inline(always)]
    pub(crate) unsafe fn numbers<I: Isa>(
        isa: I,
        block: *const f32,
        step: usize,
        word: usize,
        column: usize,
    ) -> [I::V; 2] {
        // SAFETY: the caller's contract.
        isa.unpair(unsafe { isa.load(block.add((step * TILE + word) * WIDTH + column)) })
    }
}

/// Neighbours form pairs if they are bf16; else inner index i and i + [`TILE`].
impl<const N: usize> Parts for Terms<N> {
    const COUNT: usize = N;
    const BYTES: usize = 2 * N;
    const INNER: usize = 2 * TILE;
    const ROWS: usize = N * Self::DEPTH * TILE_FLOATS;
    const COLUMNS: usize = N * Self::DEPTH * TILE * WIDTH;
    const SUMS: usize = 2 * TILE * WIDTH;

    #[inline(always)]
    fn pack_rows<I: Isa, T: Element, F: Fn(usize) -> *const T>(isa: I, rows: &PackRows<T, F, Self>) -> bool {
        let depth = super::depth::<Self>(rows.width);
        let mut zero = isa.splat(0.0);
        for row in 0..TILE {
            let x = if row < rows.rows { (rows.input)(row) } else { std::ptr::null() };
            for step in 0..rows.width.div_ceil(Self::INNER) {
                let place = step / depth * rows.block + step % depth * TILE_FLOATS + row * TILE;
                let mut terms = [isa.splat(0.0); N];
                // SAFETY: the constructor's contract; there are `n` elements from the step's first on.
                unsafe {
                    if !x.is_null() {
                        let x = x.add(step * Self::INNER);
                        let n = rows.width - step * Self::INNER;
                        let leads = step == 0 && rows.lead > 0;
                        if T::FLOAT == Float::BF16 {
                            terms = match leads {
                                true => {
                                    let mut behind = [T::from_f32(0.0); 2 * TILE];
                                    for i in rows.lead..n.min(2 * TILE) {
                                        behind[i] = x.add(i).read();
                                    }
                                    load(isa, behind.as_ptr(), behind.len())
                                }
                                false => load(isa, x, n),
                            };
                        } else {
                            let (mut a, mut b) = match n >= Self::INNER {
                                true => (isa.widen(x), isa.widen(x.add(TILE))),
                                false => {
                                    let second = n.saturating_sub(TILE);
                                    (part(isa, x, n.min(TILE)), part(isa, x.wrapping_add(TILE), second))
                                }
                            };
                            if leads {
                                (a, b) = (rows.behind_lead(isa, 0, a), rows.behind_lead(isa, TILE, b));
                            }
                            let found;
                            (terms, found) = terms_of::<I, T, N>(isa, a, b);
                            zero = isa.add(zero, found);
                        }
                    }
                    for (term, vector) in terms.into_iter().enumerate() {
                        isa.store(rows.output.add(place + term * Self::DEPTH * TILE_FLOATS), vector);
                    }
                }
            }
        }
        isa.sum(zero) == 0.0
    }

    #[inline(always)]
    fn pack_columns<I: Isa, T: Element>(isa: I, columns: &PackColumns<T, Self>) -> bool {
        let mut zero = isa.splat(0.0);
        for step in 0..columns.inner.div_ceil(Self::INNER) {
            for pair in 0..TILE {
                let first = step * Self::INNER + if columns.neighbours { 2 * pair } else { pair };
                let second = first + if columns.neighbours { 1 } else { TILE };
                for column in [0, MAX_LANES] {
                    let (terms, found) =
                        terms_of::<I, T, N>(isa, columns.at(isa, first, column), columns.at(isa, second, column));
                    zero = isa.add(zero, found);
                    if N == 1 && self::terms(T::FLOAT) > 1 {
                        // Rounded, the largest numbers are infinite.
                        let [low, high] = isa.unpair(terms[0]);
                        zero = isa.add(zero, isa.add(isa.sub(low, low), isa.sub(high, high)));
                    }
                    for (term, vector) in terms.into_iter().enumerate() {
                        let place = ((step * N + term) * TILE + pair) * WIDTH + column;
                        // SAFETY: the constructor's contract.
                        unsafe { isa.store(columns.output.add(place), vector) }
                    }
                }
            }
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
        let first = if sums.picked.is_some() { on_the_way } else { sums.start };
        let product = TileProduct {
            a: tiles.rows,
            b: tiles.first::<Self>(),
            b_stride: STRIDE,
            b_step: N * STEP,
            terms: N,
            term_strides: [Self::DEPTH * TILE_BYTES, STEP],
            steps: tiles.steps.len(),
            last: TILE,
            // The second is not written if there is one tile.
            c: [first, first.wrapping_add(TILE * WIDTH)],
            c_stride: STRIDE,
            add: sums.picked.is_none() && sums.add,
            ahead: tiles.ahead,
        };
        // SAFETY: the caller's contract; inner indices, rows and columns are padded to whole tiles.
        unsafe {
            match tiles.are_two() {
                true => multiplier.multiply::<true>(&product),
                false => multiplier.multiply::<false>(&product),
            }
        }
        if let Some(picked) = sums.picked {
            AddRows { input: on_the_way, picked, sums: sums.start }.run(isa);
        }
    }
}
