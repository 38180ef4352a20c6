//! Products of rows with a weight on a matrix unit.
//!
//! Numbers are split into [`Parts`]: [`Terms`] of bf16, as many as their type needs, or [`Digits`] of base 256. A worker splits blocks of 32
//! columns of the weight and some inner indices, which stay in the first-level cache while all rows are multiplied with them, 32 at a
//! time; the sums stay in the second-level cache.

mod digits;
mod pack;
mod store;
mod terms;
mod worker;

use crate::isa::unit::{Lines, ROW_BYTES, TILE, TILE_BYTES};
use crate::isa::{Isa, MatrixUnit, Multiplier};
pub(crate) use digits::Digits;
use moh_operators::Element;
use pack::PackColumns;
pub(crate) use pack::{PackRows, floats, pack_all};
use std::ops::Range;
pub(crate) use terms::Terms;
pub(crate) use worker::{Left, Product, Right, Worker};

/// Columns of a block of the product.
pub(crate) const WIDTH: usize = 2 * TILE;
/// Tiles of all parts along the inner dimension of a block of the weight, at most: they take half of a first-level cache. (Measured with 256 rows
/// and three bf16 terms, nanoseconds a tile product: 8.3, 7.5, 7.4, 8.9, 8.2, 7.8 for 2, 3, 4, 6, 8, 12 of each; 6.2 without reading and writing
/// sums. With digits: 11.9, 11.1, 11.2 for 2, 4, 8. With one term and 384 inner indices: 12.0, 10.4, 10.3 for 4, 8, 12; with 1152: 13.4, 11.2,
/// 12.7 for 4, 8, 12.)
const TILES: usize = 12;
/// Rows that a worker multiplies at a time: their terms are read again for every block of columns.
pub(crate) const ROWS: usize = 512;
/// Floats of a tile.
const TILE_FLOATS: usize = TILE_BYTES / size_of::<f32>();
/// Bytes between rows of a block of the weight, or of sums; and of a part of a step of the weight.
const STRIDE: usize = 2 * ROW_BYTES;
const STEP: usize = TILE * STRIDE;
/// Floats of a worker's sums, which stay in the second-level cache; and columns of a span at most.
const SUMS: usize = 256 << 10;
const SPAN: usize = 2048;

/// Columns of a span, a multiple of [`WIDTH`], for cutting `columns` columns into work items, `others` of which have the same columns and
/// other rows: `rows`, at most. An item takes as long as its blocks of columns and `fixed` more.
pub(crate) fn span(columns: usize, rows: usize, others: usize, workers: usize, fixed: f32) -> usize {
    let blocks = columns.div_ceil(WIDTH).max(1);
    let most = ((SUMS / rows.next_multiple_of(2 * TILE).max(1)).clamp(WIDTH, SPAN) / WIDTH).min(blocks);
    // Until the last worker ends; workers are not equally fast, so the last item may begin late.
    let time = |span: usize| {
        let rounds = (others * blocks.div_ceil(span)).div_ceil(workers.max(1));
        let late = if workers > 1 { span as f32 / 4.0 } else { 0.0 };
        rounds as f32 * (span as f32 + fixed) + late
    };
    let best = (1..=most).rev().min_by(|&a, &b| time(a).total_cmp(&time(b)));
    best.unwrap_or(1) * WIDTH
}

/// How numbers are split for a matrix unit.
pub(crate) trait Parts: Sized {
    /// Parts of a number.
    const COUNT: usize;
    /// Bytes of a number of a packed weight.
    const BYTES: usize;
    /// Inner indices of a tile.
    const INNER: usize;
    /// Tiles along the inner dimension of a block of the weight, at most.
    const DEPTH: usize = TILES / Self::COUNT;
    /// Floats of a tile of rows in one block of inner indices.
    const ROWS: usize;
    /// Floats of a block of the weight.
    const COLUMNS: usize;
    /// Floats of the sums of two tiles of rows, on their way.
    const SUMS: usize;

    /// See [`PackRows`].
    fn pack_rows<I: Isa, T: Element, F: Fn(usize) -> *const T>(isa: I, rows: &PackRows<T, F, Self>) -> bool;
    /// See [`PackColumns`].
    fn pack_columns<I: Isa, T: Element>(isa: I, columns: &PackColumns<T, Self>) -> bool;

    /// Multiplies one or two tiles of rows with a block of the weight.
    ///
    /// # Safety
    /// The tiles are those that [`PackRows`] and [`PackColumns`] have made of `T`; `on_the_way` has room for [`Parts::SUMS`] floats, and
    /// there are sums for all rows.
    unsafe fn multiply<I: Isa, T: Element>(
        isa: I,
        multiplier: &Multiplier,
        tiles: &Tiles,
        on_the_way: *mut f32,
        sums: &Sums<'_>,
    );
}

/// Whether a unit multiplies few rows, as it does many, with packed blocks in less time than vectors multiply them with the weight: where a tile of one row
/// takes as long as of sixteen, what counts are bytes. (Of a LLaMA's step, by the time of vectors: 0.73 at one term, 0.85 at two digits. Three digits took 1.1
/// of the time of float32 that lay in large pages, less than half of it in pages of a file.)
pub(crate) fn is_for_few<T: Element, P: Parts>(unit: MatrixUnit) -> bool {
    unit.most_terms() > 1 && P::BYTES <= size_of::<T>()
}

/// Evaluates `body` with the type `P` of the parts that numbers of `T` are split into at a precision.
macro_rules! with_parts {
    ($T:ty, $precision:expr, |$P:ident| $body:expr) => {{
        use crate::matrix::{Digits, Terms};
        match (<$T>::FLOAT, crate::terms::terms_at($precision, <$T>::FLOAT)) {
            (_, 1) => {
                type $P = Terms<1>;
                $body
            }
            (moh_operators::Float::F32, 2) => {
                type $P = Digits<2>;
                $body
            }
            (_, 2) => {
                type $P = Terms<2>;
                $body
            }
            _ => {
                type $P = Digits<3>;
                $body
            }
        }
    }};
}
pub(crate) use with_parts;

/// Tiles for all of a block of inner indices.
pub(crate) struct Tiles {
    /// Of the rows; the second may be the first again.
    rows: [*const f32; 2],
    /// A block of the weight, and its tiles along the inner dimension that are multiplied: of the rows there are no others.
    columns: *const f32,
    steps: Range<usize>,
    ahead: Lines,
}

impl Tiles {
    fn are_two(&self) -> bool {
        self.rows[0] != self.rows[1]
    }

    /// The weight's tiles from the first step on.
    fn first<P: Parts>(&self) -> *const f32 {
        self.columns.wrapping_add(self.steps.start * P::COUNT * TILE * WIDTH)
    }
}

/// Where a product of two tiles of rows goes.
pub(crate) struct Sums<'a> {
    /// [`WIDTH`] floats for every row of the tiles, those that pad them included, or for every one that can be picked.
    start: *mut f32,
    rows: usize,
    picked: Option<&'a [u32]>,
    add: bool,
}

/// Tiles along the inner dimension of blocks of `inner` inner indices: blocks are of equal depth.
pub(crate) fn depth<P: Parts>(inner: usize) -> usize {
    let steps = inner.div_ceil(P::INNER);
    steps.div_ceil(steps.div_ceil(P::DEPTH).max(1)).max(1)
}

/// Blocks that `inner` inner indices are cut into.
pub(crate) fn blocks<P: Parts>(inner: usize) -> usize {
    inner.div_ceil(P::INNER).div_ceil(depth::<P>(inner))
}

#[cfg(test)]
mod tests {
    use super::{WIDTH, span};

    /// Of `workers` workers, how many items of equal length keep busy on average.
    fn busy(columns: usize, rows: usize, others: usize, workers: usize) -> f32 {
        let items = others * columns.div_ceil(span(columns, rows, others, workers, 0.5));
        items as f32 / items.div_ceil(workers) as f32
    }

    #[test]
    fn few_and_many_workers_are_kept_busy() {
        assert_eq!(span(1024, 256, 1, 1, 0.5), 1024, "as wide as the sums permit");
        assert_eq!(span(1152, 256, 1, 1, 0.5), 576, "of two spans, none is short");
        for (columns, rows, others) in [(4608, 256, 1), (1152, 512, 32), (2048, 16, 1), (384, 256, 1)] {
            assert_eq!(busy(columns, rows, others, 2), 2.0, "{columns} columns");
            for workers in [16, 64, 128] {
                let most = (columns / WIDTH * others).min(workers) as f32;
                let busy = busy(columns, rows, others, workers);
                assert!(busy >= 0.5 * most, "{columns} columns, {others} others: {busy} of {workers}");
            }
        }
    }
}
