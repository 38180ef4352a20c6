//! What becomes of sums.

use super::WIDTH;
use crate::epilogue::{Becomes, OfRow, Same};
use crate::isa::{Isa, Job, MAX_LANES};
use crate::terms::part;
use moh_operators::Element;

/// Rows from the one that is written to the one whose lines are fetched. (A DiT took 0.94 to 0.99 of the time.)
const AHEAD: usize = 2;

/// Writes what becomes of rows of sums, plus the bias, to an output. Returns false if such a sum is not finite. Rows are written from end to end:
/// to write the columns of a block when they are complete takes longer, for stores wait for the memory's lines one after the other.
///
/// Contract of the constructor: vectors have [`MAX_LANES`] lanes; the sums are valid for reading `rows` rows of [`WIDTH`] floats for every block
/// of columns, blocks `block` floats apart, for the columns and `lead` before them; the bias and what `epilogue(row)` has for reading and `output(row)` for writing `columns` elements.
pub(super) struct StoreRows<T, E, F> {
    pub(super) sums: *const f32,
    pub(super) block: usize,
    pub(super) bias: Option<*const T>,
    pub(super) epilogue: E,
    pub(super) output: F,
    pub(super) rows: usize,
    pub(super) lead: usize,
    pub(super) columns: usize,
}

impl<T: Element, E: Fn(usize) -> OfRow<T>, F: Fn(usize) -> *mut T> Job for StoreRows<T, E, F> {
    type Output = bool;

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> bool {
        // Of every other vector, so that they need not wait for each other.
        let mut zero = [isa.splat(0.0); 2];
        let full = self.lead == 0 && self.columns.is_multiple_of(WIDTH);
        for row in 0..self.rows {
            let (epilogue, output) = ((self.epilogue)(row), (self.output)(row));
            let ahead = (self.output)((row + AHEAD).min(self.rows - 1));
            // SAFETY: the constructor's contract.
            unsafe {
                let (to, zero) = ([output, ahead], &mut zero);
                match epilogue {
                    OfRow::Nothing if full => self.row::<I, true>(isa, row, Same, to, zero),
                    OfRow::Activation(function) if full => self.row::<I, true>(isa, row, function, to, zero),
                    OfRow::Sum(sum) if full => self.row::<I, true>(isa, row, sum, to, zero),
                    any => self.row::<I, false>(isa, row, any, to, zero),
                }
            }
        }
        isa.sum(isa.add(zero[0], zero[1])) == 0.0
    }
}

impl<T: Element, E, F> StoreRows<T, E, F> {
    /// A row. `FULL`: columns fill all blocks, for a loop without branches.
    ///
    /// # Safety
    /// The constructor's contract; there is such a row, and `output` has its columns; `ahead` is what is written later.
    #[inline(always)]
    unsafe fn row<I: Isa, const FULL: bool>(
        &self,
        isa: I,
        row: usize,
        becomes: impl Becomes<T>,
        [output, ahead]: [*mut T; 2],
        zero: &mut [I::V; 2],
    ) {
        let mut sums = self.sums.wrapping_add(row * WIDTH);
        let (lead, end) = if FULL { (0, self.columns) } else { (self.lead, self.lead + self.columns) };
        for start in (0..end).step_by(WIDTH) {
            for (i, zero) in zero.iter_mut().enumerate() {
                let place = start + i * MAX_LANES;
                let first = if FULL { place } else { place.max(lead) };
                let n = if FULL { MAX_LANES } else { end.min(place + MAX_LANES).saturating_sub(first) };
                if n == 0 {
                    continue;
                }
                let column = first - lead;
                isa.prefetch_output(ahead.wrapping_add(column).cast_const().cast());
                // SAFETY: the caller's contract; column + n <= columns.
                unsafe {
                    let mut sum = part(isa, sums.add(first - start), n);
                    if let Some(bias) = self.bias {
                        sum = isa.add(sum, part(isa, bias.add(column), n));
                    }
                    *zero = isa.add(*zero, isa.sub(sum, sum));
                    isa.narrow_part(output.add(column), becomes.apply(isa, sum, column, n), n);
                }
            }
            sums = sums.wrapping_add(self.block);
        }
    }
}

/// Adds rows of [`WIDTH`] floats to rows of sums.
///
/// Contract of the constructor: `input` is valid for reading as many rows as are picked, `sums` for reading and writing those; lanes divide
/// [`WIDTH`].
pub(super) struct AddRows<'a> {
    pub(super) input: *const f32,
    pub(super) picked: &'a [u32],
    pub(super) sums: *mut f32,
}

impl Job for AddRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        for (i, &row) in self.picked.iter().enumerate() {
            for column in (0..WIDTH).step_by(I::LANES) {
                // SAFETY: the constructor's contract.
                unsafe {
                    let sum = self.sums.add(row as usize * WIDTH + column);
                    isa.store(sum, isa.add(isa.load(sum), isa.load(self.input.add(i * WIDTH + column))));
                }
            }
        }
    }
}
