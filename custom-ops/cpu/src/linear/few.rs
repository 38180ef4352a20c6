//! A dense product of few rows: the weight is read where it lies, once for all rows, in the order of memory.

use crate::epilogue::Epilogue;
use crate::host::{Host, Unwritten};
use crate::isa::{Isa, Job};
use crate::workers::{Shared, share};
use moh_operators::linear::Problem;
use moh_operators::{Element, Error};
use std::ops::Range;

/// Rows at most. (On a Zen 4, five to eight rows took 0.64 to 0.79 of the time of two passes of four.)
pub(super) const ROWS: usize = 8;
/// Inner indices at a time: as many rows of the weight are read side by side. (A LLaMA's step took 6 to 8 % less time than with 4, 3 to 6 % less
/// than with 16. With prefetches of the next ones it took 7 to 12 % more.)
const INNER: usize = 8;
/// Columns of a work item, a multiple of a vector's lanes: the longer the parts of rows, the faster memory is read, and sums of one row stay in
/// the first-level cache.
const LEAST_COLUMNS: usize = 256;
const MOST_COLUMNS: usize = 8192;

/// Computes the output of up to [`ROWS`] rows. Slice lengths have been validated against `problem`. Returns the number of multiply-accumulate operations.
pub(super) fn run<I: Isa, T: Element>(
    isa: I,
    problem: &Problem,
    [x, weight]: [&[T]; 2],
    (bias, epilogue): (Option<&[T]>, &Epilogue<'_, T>),
    output: Shared<T>,
    host: &dyn Host,
) -> Result<u64, Error> {
    let &Problem { rows, width, out_width, .. } = problem;
    if rows == 0 {
        return Ok(0);
    }
    let span = out_width.div_ceil(host.parallelism().max(1)).next_multiple_of(LEAST_COLUMNS).min(MOST_COLUMNS);
    let make = || Unwritten::new::<f32>(host, ROWS * span);
    share(host, out_width.div_ceil(span), make, |sums, item| {
        let columns = item * span..out_width.min((item + 1) * span);
        let part = Part { x, weight, bias, epilogue, width, out_width, rows, columns: columns.clone() };
        isa.vectorize(Few { part: &part, sums: sums.as_mut_ptr(), output });
        (rows * width * columns.len()) as u64
    })
}

/// Some rows and columns of a product.
struct Part<'a, T> {
    x: &'a [T],
    weight: &'a [T],
    bias: Option<&'a [T]>,
    epilogue: &'a Epilogue<'a, T>,
    width: usize,
    out_width: usize,
    rows: usize,
    columns: Range<usize>,
}

/// Computes a part of a product.
///
/// Contract of the constructor: slices have the lengths of the product; there are [`ROWS`] sums for every column; the output has
/// `out_width` elements for every row, of which this part's are nobody else's.
struct Few<'a, T> {
    part: &'a Part<'a, T>,
    sums: *mut f32,
    output: Shared<T>,
}

impl<T: Element> Job for Few<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        match self.part.rows {
            1 => self.multiply::<I, 1>(isa),
            2 => self.multiply::<I, 2>(isa),
            3 | 4 => self.multiply::<I, 4>(isa),
            5 | 6 => self.multiply::<I, 6>(isa),
            _ => self.multiply::<I, ROWS>(isa),
        }
        self.store(isa);
    }
}

impl<T: Element> Few<'_, T> {
    /// The sums of `N` rows, of which the last ones may be the same.
    #[inline(always)]
    fn multiply<I: Isa, const N: usize>(&self, isa: I) {
        let p = self.part;
        let len = p.columns.len();
        let rows: [&[T]; N] = std::array::from_fn(|i| {
            let row = i.min(p.rows - 1);
            &p.x[row * p.width..(row + 1) * p.width]
        });
        for inner in (0..p.width).step_by(INNER) {
            let n = (p.width - inner).min(INNER);
            let factors = rows.map(|row| {
                let mut factors = [0.0; INNER];
                for (factor, x) in factors.iter_mut().zip(&row[inner..inner + n]) {
                    *factor = x.to_f32();
                }
                factors
            });
            let start = p.weight.as_ptr().wrapping_add(inner * p.out_width + p.columns.start);
            for column in (0..len).step_by(I::LANES) {
                let lanes = (len - column).min(I::LANES);
                // SAFETY: the constructor's contract: the weight has these inner indices and columns, and there are sums for whole vectors,
                // which the first inner indices write.
                unsafe {
                    let mut sums: [I::V; N] = std::array::from_fn(|row| match inner {
                        0 => isa.splat(0.0),
                        _ => isa.load(self.sums.add(row * len.next_multiple_of(I::LANES) + column)),
                    });
                    for i in 0..n {
                        let at = start.wrapping_add(i * p.out_width + column);
                        let weight = match lanes == I::LANES {
                            true => isa.widen(at),
                            false => isa.widen_part(at, lanes),
                        };
                        for (sum, factors) in sums.iter_mut().zip(&factors) {
                            *sum = isa.fma(weight, isa.splat(factors[i]), *sum);
                        }
                    }
                    for (row, sum) in sums.into_iter().enumerate() {
                        isa.store(self.sums.add(row * len.next_multiple_of(I::LANES) + column), sum);
                    }
                }
            }
        }
    }

    /// Writes what becomes of the sums, plus the bias.
    #[inline(always)]
    fn store<I: Isa>(&self, isa: I) {
        let p = self.part;
        let len = p.columns.len();
        for row in 0..p.rows {
            let epilogue = p.epilogue.of_row(row, p.columns.start);
            for column in (0..len).step_by(I::LANES) {
                let lanes = (len - column).min(I::LANES);
                // SAFETY: as in `multiply`, which has written these sums; the bias has these columns.
                unsafe {
                    let mut sum = isa.load(self.sums.add(row * len.next_multiple_of(I::LANES) + column));
                    if let Some(bias) = p.bias {
                        sum = isa.add(sum, isa.widen_part(bias.as_ptr().add(p.columns.start + column), lanes));
                    }
                    let sum = epilogue.apply(isa, sum, column, lanes);
                    let output = self.output.0.add(row * p.out_width + p.columns.start + column);
                    isa.narrow_part(output, sum, lanes);
                }
            }
        }
    }
}
