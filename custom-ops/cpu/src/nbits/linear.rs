//! A dense layer.

use super::worker::floats;
use super::{Activations, Engine, Level, NBits, Row, Start, Worker};
use crate::epilogue::{Epilogue, Finish};
use crate::host::Host;
use crate::isa::{Isa, Job, MatrixUnit, matrix_unit, vectorize};
use crate::memory::{Memory, Sections, pitch};
use crate::settings::forced_isa;
use crate::workers::{Shared, share, span};
use moh_operators::{DType, Element, Error};
use std::ops::Range;

/// Rows that are converted at a time, which bounds the working memory.
pub(super) const ROWS: usize = 2048;
/// Columns of a work item at most, and for few rows.
const SPAN: usize = 256;
const FEW_SPAN: usize = 1024;

/// Computes `out = x * weight + bias` for a dense layer: `x` is (rows, k), `bias` (n), `out` (rows, n).
///
/// The instruction set is the best one that the processor has, or that [`crate::ISA_VARIABLE`] names.
///
/// # Errors
/// [`Error::Length`], naming `operator`, if lengths and shapes do not agree; [`Error::OutOfMemory`].
pub fn linear<T: Linear>(
    operator: &'static str,
    x: &[T],
    weight: &NBits<'_>,
    bias: Option<&[T]>,
    out: &mut [T],
    level: Level,
    host: &dyn Host,
) -> Result<(), Error> {
    T::linear(operator, x, weight, bias, out, level, host)
}

/// The types that [`linear`] takes. Its code is compiled here for each: as a generic function it would be compiled again, for all
/// instruction sets, in every crate that calls it.
pub trait Linear: Element {
    /// As the function [`linear`].
    ///
    /// # Errors
    /// Those of [`linear`].
    fn linear(
        operator: &'static str,
        x: &[Self],
        weight: &NBits<'_>,
        bias: Option<&[Self]>,
        out: &mut [Self],
        level: Level,
        host: &dyn Host,
    ) -> Result<(), Error>;
}

macro_rules! linears {
    ($($element:ty),+) => {$(
        impl Linear for $element {
            #[inline(never)]
            fn linear(
                operator: &'static str,
                x: &[Self],
                weight: &NBits<'_>,
                bias: Option<&[Self]>,
                out: &mut [Self],
                level: Level,
                host: &dyn Host,
            ) -> Result<(), Error> {
                let engine = vectorize(forced_isa(), Best { unit: matrix_unit(forced_isa()) });
                let after = (bias, &Epilogue::nothing(weight.columns()));
                layer(engine, operator, x, weight, after, out, level, host).map(|_| ())
            }
        }
    )+};
}
linears!(f32, half::f16, half::bf16);

/// The engine that belongs to the vectors on which it runs, and to a matrix unit.
struct Best {
    unit: Option<MatrixUnit>,
}

impl Job for Best {
    type Output = Engine;

    #[inline(always)]
    fn run<I: Isa>(self, _: I) -> Engine {
        Engine::of::<I>(self.unit)
    }
}

/// As [`linear`], on a given instruction set, with what becomes of the sums. Returns the number of multiply-accumulate operations.
pub(crate) fn layer<X: Element>(
    engine: Engine,
    operator: &'static str,
    x: &[X],
    weight: &NBits<'_>,
    (bias, epilogue): (Option<&[X]>, &Epilogue<'_, X>),
    out: &mut [X],
    level: Level,
    host: &dyn Host,
) -> Result<u64, Error> {
    let [n, k] = [weight.columns(), weight.inner()];
    // Without inner indices, the number of rows is that of the output.
    let rows = x.len().checked_div(k).unwrap_or(out.len() / n.max(1));
    let lengths = [
        ("x", rows * k, x.len()),
        ("bias", n, bias.map_or(n, <[X]>::len)),
        ("output", rows.saturating_mul(n), out.len()),
    ];
    for (tensor, expected, found) in lengths {
        if expected != found {
            return Err(Error::Length { operator, tensor, expected, found });
        }
    }
    let output = Shared(out.as_mut_ptr());
    let weight = &weight.narrowed(engine, level, rows, host);
    let mut macs = 0;
    for start in (0..rows).step_by(ROWS) {
        let rows = start..(start + ROWS).min(rows);
        let input = |row: usize| x[(rows.start + row) * k..].as_ptr();
        // SAFETY: x has `k` elements for every row.
        let activations = unsafe { Activations::new(engine, host, weight.format, level, rows.len(), &input, None) }?;
        macs += Rows { activations: &activations, weight, bias, epilogue, output, rows }.run(host)?;
    }
    Ok(macs)
}

/// Rows of a dense layer.
struct Rows<'a, X> {
    activations: &'a Activations<'a>,
    weight: &'a NBits<'a>,
    bias: Option<&'a [X]>,
    epilogue: &'a Epilogue<'a, X>,
    output: Shared<X>,
    rows: Range<usize>,
}

/// A worker's memory.
struct Workspace<'h, X> {
    worker: Worker<'h>,
    sums: Memory<'h>,
    rows: Vec<Row>,
    pairs: Vec<(*const f32, *mut X)>,
}

impl<X: Element> Rows<'_, X> {
    fn run(&self, host: &dyn Host) -> Result<u64, Error> {
        let n = self.weight.columns();
        let most = if self.rows.len() <= super::FEW { FEW_SPAN } else { SPAN };
        let span = span(n, self.activations.columns(), most, 1, host.parallelism());
        let make = || {
            let mut sums = Sections::default();
            if X::DTYPE != DType::F32 {
                sums.add(self.rows.len(), pitch(span))?;
            }
            let worker = Worker::new(self.activations, host)?;
            Ok(Workspace { worker, sums: sums.allocate(host)?, rows: Vec::new(), pairs: Vec::new() })
        };
        let work = |workspace: &mut Workspace<'_, X>, item: usize| {
            self.item(item * span..((item + 1) * span).min(n), workspace)
        };
        share(host, n.div_ceil(span), make, work)
    }

    /// The columns of a work item.
    fn item(&self, columns: Range<usize>, workspace: &mut Workspace<'_, X>) -> u64 {
        let Workspace { worker, sums, rows, pairs } = workspace;
        let in_place = X::DTYPE == DType::F32;
        rows.clear();
        pairs.clear();
        for i in 0..self.rows.len() {
            let start = (self.rows.start + i) * self.weight.columns() + columns.start;
            // SAFETY: the output has these columns for every row, and they belong to this work item alone.
            let output = unsafe { { self.output }.0.add(start) };
            let place = if in_place { output.cast() } else { sums.at(i * pitch(columns.len())) };
            rows.push(Row { index: i as u32, output: place });
            pairs.push((place.cast_const(), output));
        }
        let bias = self.bias.map(|bias| &bias[columns.clone()]);
        let start = Start::New(bias.and_then(floats));
        // SAFETY: the rows' sums have room for the columns, and do not overlap; an output that is used in place is f32.
        let macs = unsafe { worker.multiply(self.weight, self.activations, rows, columns.clone(), start) };
        if !in_place || !self.epilogue.is_nothing() {
            let Rows { epilogue, rows: Range { start: first, .. }, .. } = *self;
            vectorize(forced_isa(), Finish { epilogue, rows: pairs, first, columns, bias });
        }
        macs
    }
}
