//! What becomes of sums.

use super::WIDTH;
use crate::epilogue::OfRow;
use crate::isa::{Isa, Job};
use crate::terms::part;
use moh_operators::Element;

/// Writes what becomes of rows of sums, plus the bias, to an output. Returns false if such a sum is not finite.
///
/// Contract of the constructor: the sums are valid for reading `rows` rows of [`WIDTH`] floats for every block of columns, blocks
/// `block` floats apart; the bias and what `epilogue(row)` has for reading and `output(row)` for writing `columns` elements.
pub(super) struct StoreRows<T, E, F> {
    pub(super) sums: *const f32,
    pub(super) block: usize,
    pub(super) bias: Option<*const T>,
    pub(super) epilogue: E,
    pub(super) output: F,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

impl<T: Element, E: Fn(usize) -> OfRow<T>, F: Fn(usize) -> *mut T> Job for StoreRows<T, E, F> {
    type Output = bool;

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> bool {
        let mut zero = isa.splat(0.0);
        for row in 0..self.rows {
            let (epilogue, output) = ((self.epilogue)(row), (self.output)(row));
            for column in (0..self.columns).step_by(I::LANES) {
                let n = (self.columns - column).min(I::LANES);
                // SAFETY: the constructor's contract; column + n <= columns.
                unsafe {
                    let mut sum = isa.load(self.sums.add(column / WIDTH * self.block + row * WIDTH + column % WIDTH));
                    if let Some(bias) = self.bias {
                        sum = isa.add(sum, part(isa, bias.add(column), n));
                    }
                    zero = isa.add(zero, isa.sub(sum, sum));
                    let sum = epilogue.apply(isa, sum, column, n);
                    let output = output.add(column);
                    match n == I::LANES {
                        true => isa.narrow(output, sum),
                        false => isa.narrow_part(output, sum, n),
                    }
                }
            }
        }
        isa.sum(zero) == 0.0
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
