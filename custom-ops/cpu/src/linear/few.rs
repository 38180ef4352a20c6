//! A dense product of few rows: the weight is read where it lies, once for all rows, in the order of memory; or the blocks of it that were packed for a
//! matrix unit in one bfloat16 term, half the bytes of float32.

use crate::epilogue::{Becomes, Epilogue};
use crate::host::{Host, Scratch, Unwritten};
use crate::isa::unit::TILE;
use crate::isa::{Isa, Job, MAX_LANES, array};
use crate::matrix::{self, Parts, Terms, WIDTH};
use crate::workers::{Shared, share};
use moh_operators::linear::Problem;
use moh_operators::{Element, Error};
use std::ops::Range;

/// Rows at most. (On a Zen 4, five to eight rows took 0.64 to 0.79 of the time of two passes of four.)
pub(super) const ROWS: usize = 8;
/// Vectors of columns of a block.
const HALVES: usize = WIDTH / MAX_LANES;
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
    let span = span(out_width, host);
    let make = || Unwritten::new::<f32>(host, ROWS * span);
    share(host, out_width.div_ceil(span), make, |sums, item| {
        let columns = item * span..out_width.min((item + 1) * span);
        let part = Part { x, weight, bias, epilogue, width, out_width, rows, columns: columns.clone() };
        isa.vectorize(Few { part: &part, sums: sums.as_mut_ptr(), output });
        (rows * width * columns.len()) as u64
    })
}

/// What a packed weight is multiplied as.
pub(super) type One = Terms<1>;

/// As [`run`], of float32, with the weight in blocks of one term. Vectors have [`MAX_LANES`] lanes. Returns `None` if an element of x is not finite.
///
/// # Safety
/// The blocks are those of the weight.
pub(super) unsafe fn run_blocks<I: Isa, T: Element>(
    isa: I,
    problem: &Problem,
    (x, blocks): (&[T], Shared<f32>),
    (bias, epilogue): (Option<&[T]>, &Epilogue<'_, T>),
    output: Shared<T>,
    host: &dyn Host,
) -> Result<Option<u64>, Error> {
    let &Problem { rows, width, out_width, .. } = problem;
    if rows == 0 {
        return Ok(Some(0));
    }
    // With zeros for the inner indices that fill the last tile.
    let pitch = width.next_multiple_of(One::INNER);
    let mut floats = Scratch::new::<f32>(host, rows * pitch)?;
    let floats = floats.as_mut_slice::<f32>();
    for (row, floats) in x.chunks_exact(width).zip(floats.chunks_exact_mut(pitch)) {
        floats.iter_mut().zip(row).for_each(|(float, x)| *float = x.to_f32());
    }
    if !floats.iter().all(|x| x.is_finite()) {
        return Ok(None);
    }
    let span = span(out_width, host);
    let make = || Unwritten::new::<f32>(host, ROWS * span);
    let macs = share(host, out_width.div_ceil(span), make, |sums, item| {
        let columns = item * span..out_width.min((item + 1) * span);
        let part = Part { x, weight: &[], bias, epilogue, width, out_width, rows, columns: columns.clone() };
        let few = Few { part: &part, sums: sums.as_mut_ptr(), output };
        isa.vectorize(FewOfBlocks { few, x: &*floats, pitch, blocks: { blocks }.0 });
        (rows * width * columns.len()) as u64
    })?;
    Ok(Some(macs))
}

/// Columns of a work item.
fn span(out_width: usize, host: &dyn Host) -> usize {
    out_width.div_ceil(host.parallelism().max(1)).next_multiple_of(LEAST_COLUMNS).min(MOST_COLUMNS)
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
        let rows: [&[T]; N] = array(|i| {
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
                    let mut sums: [I::V; N] = array(|row| match inner {
                        0 => isa.splat(0.0),
                        _ => isa.load(self.sums.add(row * len.next_multiple_of(I::LANES) + column)),
                    });
                    for i in 0..n {
                        let at = start.wrapping_add(i * p.out_width + column);
                        let weight = isa.widen_part(at, lanes);
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

/// Computes a part of a product with a weight in blocks.
///
/// Contract of the constructor: as of [`Few`], but that `x` are the rows, `pitch` floats apart, and that the weight is in `blocks`.
struct FewOfBlocks<'a, T> {
    few: Few<'a, T>,
    x: &'a [f32],
    pitch: usize,
    blocks: *const f32,
}

impl<T: Element> Job for FewOfBlocks<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        match self.few.part.rows {
            1 => self.multiply::<I, 1>(isa),
            2 => self.multiply::<I, 2>(isa),
            3 | 4 => self.multiply::<I, 4>(isa),
            5 | 6 => self.multiply::<I, 6>(isa),
            _ => self.multiply::<I, ROWS>(isa),
        }
        self.few.store(isa);
    }
}

impl<T: Element> FewOfBlocks<'_, T> {
    /// As [`Few::multiply`].
    #[inline(always)]
    fn multiply<I: Isa, const N: usize>(&self, isa: I) {
        let Part { width, rows, ref columns, .. } = *self.few.part;
        let (steps, depth, blocks) =
            (width.div_ceil(One::INNER), matrix::depth::<One>(width), matrix::blocks::<One>(width));
        let pitch = columns.len().next_multiple_of(MAX_LANES);
        let x: [&[f32]; N] = array(|i| &self.x[i.min(rows - 1) * self.pitch..][..self.pitch]);
        for column in (0..columns.len()).step_by(WIDTH) {
            let first = (columns.start + column) / WIDTH * blocks;
            let mut sums = [[isa.splat(0.0); HALVES]; N];
            for block in 0..blocks {
                let steps = block * depth..steps.min((block + 1) * depth);
                // SAFETY: the constructor's contract: the weight has these blocks, steps and columns, or zeros in their place.
                unsafe {
                    let start = self.blocks.add((first + block) * One::COLUMNS);
                    for (step, word) in steps.clone().flat_map(|step| (0..TILE).map(move |word| (step, word))) {
                        for half in 0..HALVES {
                            let numbers = One::numbers(isa, start, step - steps.start, word, half * MAX_LANES);
                            for (i, number) in numbers.into_iter().enumerate() {
                                let inner = step * One::INNER + word + i * TILE;
                                for (sums, x) in sums.iter_mut().zip(&x) {
                                    sums[half] = isa.fma(number, isa.splat(*x.get_unchecked(inner)), sums[half]);
                                }
                            }
                        }
                    }
                }
            }
            for (row, sums) in sums.iter().enumerate() {
                for (half, sum) in sums.iter().enumerate().filter(|(half, _)| column + half * MAX_LANES < pitch) {
                    // SAFETY: there are sums for whole vectors of columns.
                    unsafe { isa.store(self.few.sums.add(row * pitch + column + half * MAX_LANES), *sum) }
                }
            }
        }
    }
}
