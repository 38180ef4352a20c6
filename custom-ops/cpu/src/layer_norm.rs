//! LayerNorm on a CPU. What a row is multiplied by and what is added, whether weights or a modulation, is one factor and one offset a
//! column, made once for the rows in turn that share them.

use crate::host::{Host, Scratch};
use crate::isa::{Isa, Job};
use crate::kernel::{self, CpuOperator, Work};
use crate::workers::{Shared, share};
use moh_operators::layer_norm::{Inputs, Problem};
use moh_operators::{Element, Error, LayerNorm};
use std::ops::Range;

/// Numbers per work item: enough to be worth a thread.
const NUMBERS: usize = 1 << 13;
/// Sums that are added up side by side: one would have to wait for each addition.
const SUMS: usize = 4;

impl CpuOperator for LayerNorm {
    type Output<T: Element> = T;

    fn run<I: Isa, T: Element>(call: kernel::Call<'_, Self, I, T>) -> Result<Work, Error> {
        let kernel::Call { isa, problem, inputs, output, host, .. } = call;
        normalise(isa, problem, &inputs, output, host)
    }
}

/// The tensors of a call. Their lengths match the problem.
type Tensors<'a, T> = Inputs<kernel::Slices<'a, T>>;

fn normalise<I: Isa, T: Element>(
    isa: I,
    problem: &Problem,
    tensors: &Tensors<'_, T>,
    output: &mut [T],
    host: &dyn Host,
) -> Result<Work, Error> {
    let &Problem { rows, width, .. } = problem;
    let at_once = (NUMBERS / width).max(1);
    let output = Shared(output.as_mut_ptr());
    let pitch = width.next_multiple_of(I::LANES);
    let work = |memory: &mut Scratch<'_>, item: usize| {
        let rows = item * at_once..((item + 1) * at_once).min(rows);
        // SAFETY: the output has `width` elements for every row, and no row is in two items.
        let output = unsafe { output.slice(rows.start * width, rows.len() * width) };
        let (factors, offsets) = memory.as_mut_slice().split_at_mut(pitch);
        isa.vectorize(Rows { problem, tensors, rows, output, factors, offsets });
        0
    };
    share(host, rows.div_ceil(at_once), || Scratch::new::<f32>(host, 2 * pitch), work)?;
    Ok(Work::default())
}

/// The rows of a work item.
struct Rows<'a, 't, T: Element> {
    problem: &'a Problem,
    tensors: &'a Tensors<'t, T>,
    rows: Range<usize>,
    output: &'a mut [T],
    /// What each column is multiplied by, and then what is added: `width` floats and the rest of a vector.
    factors: &'a mut [f32],
    offsets: &'a mut [f32],
}

impl<T: Element> Job for Rows<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I) {
        let &Problem { width, rows_per_scale, rows_per_shift, epsilon, .. } = self.problem;
        let mut prepared = None;
        let outputs = std::mem::take(&mut self.output);
        for (row, output) in self.rows.clone().zip(outputs.chunks_exact_mut(width)) {
            let modulation = [row / rows_per_scale, row / rows_per_shift];
            let used = [self.tensors.scale.map(|_| modulation[0]), self.tensors.shift.map(|_| modulation[1])];
            if prepared != Some(used) {
                self.prepare(isa, used);
                prepared = Some(used);
            }
            let x = &self.tensors.x[row * width..][..width];
            let mean = sum(isa, x, |sum, x| isa.add(sum, x), |x| x) / width as f32;
            let mean_vector = isa.splat(mean);
            let square = |sum, x| {
                let x = isa.sub(x, mean_vector);
                isa.fma(x, x, sum)
            };
            let variance = sum(isa, x, square, |x| (x - mean) * (x - mean)) / width as f32;
            let scale = isa.splat(1.0 / (variance + epsilon).sqrt());
            let (x, y) = (x.as_ptr(), output.as_mut_ptr());
            let (factors, offsets) = (self.factors.as_ptr(), self.offsets.as_ptr());
            // SAFETY: of the floats at `at`, which are padded to whole vectors.
            let of = |x, at: usize| unsafe {
                isa.fma(isa.mul(isa.sub(x, mean_vector), scale), isa.load(factors.add(at)), isa.load(offsets.add(at)))
            };
            let whole = width - width % I::LANES;
            for at in (0..whole).step_by(I::LANES) {
                // SAFETY: a row of either has LANES elements there.
                unsafe { isa.narrow(y.add(at), of(isa.widen(x.add(at)), at)) }
            }
            if whole < width {
                let rest = width - whole;
                // SAFETY: so many are left of a row.
                unsafe { isa.narrow_part(y.add(whole), of(isa.widen_part(x.add(whole), rest), whole), rest) }
            }
        }
    }
}

impl<T: Element> Rows<'_, '_, T> {
    /// Makes factors and offsets for the rows of scale and shift that there are.
    #[inline(always)]
    fn prepare<I: Isa>(&mut self, isa: I, [scale, shift]: [Option<usize>; 2]) {
        let (tensors, width) = (self.tensors, self.problem.width);
        let one = isa.splat(1.0);
        let row = |tensor: Option<&'_ [T]>, row: usize| tensor.map(|tensor| tensor[row * width..].as_ptr());
        let (bias, scale) = (row(tensors.bias, 0), row(tensors.scale, scale.unwrap_or(0)));
        let shift = row(tensors.shift, shift.unwrap_or(0));
        for at in (0..width).step_by(I::LANES) {
            let n = I::LANES.min(width - at);
            // SAFETY: n numbers of a row are left from there on.
            let of = |start: *const T| unsafe { isa.widen_part(start.add(at), n) };
            let mut factor = of(tensors.weight.as_ptr());
            let mut offset = bias.map_or(isa.splat(0.0), of);
            if let Some(scale) = scale {
                let scale = isa.add(of(scale), one);
                (factor, offset) = (isa.mul(factor, scale), isa.mul(offset, scale));
            }
            if let Some(shift) = shift {
                offset = isa.add(offset, of(shift));
            }
            // SAFETY: both are padded to whole vectors.
            unsafe {
                isa.store(self.factors[at..].as_mut_ptr(), factor);
                isa.store(self.offsets[at..].as_mut_ptr(), offset);
            }
        }
    }
}

/// The sum over a row: `add` adds whole vectors to sums, `of` is what is added of a number of the last, partial one.
#[inline(always)]
fn sum<I: Isa, T: Element>(isa: I, row: &[T], add: impl Fn(I::V, I::V) -> I::V, of: impl Fn(f32) -> f32) -> f32 {
    let mut sums = [isa.splat(0.0); SUMS];
    let mut blocks = row.chunks_exact(SUMS * I::LANES);
    for block in &mut blocks {
        for (sum, x) in sums.iter_mut().zip(block.chunks_exact(I::LANES)) {
            // SAFETY: LANES elements.
            *sum = add(*sum, unsafe { isa.widen(x.as_ptr()) });
        }
    }
    let mut vectors = blocks.remainder().chunks_exact(I::LANES);
    for (sum, x) in sums.iter_mut().zip(&mut vectors) {
        // SAFETY: LANES elements.
        *sum = add(*sum, unsafe { isa.widen(x.as_ptr()) });
    }
    let [a, b, c, d] = sums;
    let whole = isa.sum(isa.add(isa.add(a, b), isa.add(c, d)));
    whole + vectors.remainder().iter().map(|x| of(x.to_f32())).sum::<f32>()
}
