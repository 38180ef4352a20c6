//! What becomes of a dense layer's sums before they are written: an activation function, or a gate and a residual.

use crate::activation::activate;
use crate::isa::{Isa, Job, MAX_LANES};
use moh_operators::routed_mlp::Activation;
use moh_operators::{DType, Element};
use std::ops::Range;

/// Another operand of a sum. A product with 1 and a sum with -0 are exact, so that an operand that is missing is such a number.
#[derive(Debug, Clone, Copy)]
enum Operand<'a, T> {
    /// The same for all.
    Number([T; MAX_LANES]),
    /// A row of the operand for so many rows of sums.
    Rows(&'a [T], usize),
}

impl<'a, T: Element> Operand<'a, T> {
    /// The operand in `data`, each row of which is for `shared` rows of sums; `neutral` if there is none.
    fn new(data: Option<&'a [T]>, shared: usize, neutral: f32) -> Operand<'a, T> {
        match data {
            None => Operand::Number([T::from_f32(neutral); MAX_LANES]),
            Some(&[number]) => Operand::Number([number; MAX_LANES]),
            Some(data) => Operand::Rows(data, shared),
        }
    }

    /// Whether it is this number for all.
    fn is(&self, neutral: f32) -> bool {
        matches!(self, Operand::Number([number, ..]) if number.to_f32() == neutral)
    }

    /// From `column` on, for a row of `width` sums.
    #[inline(always)]
    fn of_row(&self, width: usize, row: usize, column: usize) -> RowOperand<T> {
        match *self {
            Operand::Number(ref numbers) => RowOperand { start: numbers.as_ptr(), step: 0 },
            Operand::Rows(data, shared) => {
                // (Without a division, which takes as long as some vectors.)
                let row = if shared == 1 { row } else { row / shared };
                RowOperand { start: data[row * width + column..].as_ptr(), step: 1 }
            }
        }
    }
}

/// What becomes of sums.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Epilogue<'a, T> {
    width: usize,
    then: Then<'a, T>,
}

#[derive(Debug, Clone, Copy)]
enum Then<'a, T> {
    Nothing,
    Activation(Activation),
    Sum { gate: Operand<'a, T>, residual: Operand<'a, T> },
}

impl<'a, T: Element> Epilogue<'a, T> {
    /// Rows of `width` sums stay as they are.
    pub(crate) fn nothing(width: usize) -> Epilogue<'a, T> {
        Epilogue { width, then: Then::Nothing }
    }

    /// An activation function, of one column, of rows of `width` sums.
    pub(crate) fn activation(width: usize, activation: Activation) -> Epilogue<'a, T> {
        Epilogue { width, then: Then::Activation(activation) }
    }

    /// Rows of `width` sums are multiplied by the gate, whose rows are for `rows_per_gate` rows each, and the residual is added. Both have as
    /// many elements as that needs, or one.
    pub(crate) fn sum(
        width: usize,
        (gate, rows_per_gate): (Option<&'a [T]>, usize),
        residual: Option<&'a [T]>,
    ) -> Epilogue<'a, T> {
        let (gate, residual) = (Operand::new(gate, rows_per_gate, 1.0), Operand::new(residual, 1, -0.0));
        let then = if gate.is(1.0) && residual.is(0.0) { Then::Nothing } else { Then::Sum { gate, residual } };
        Epilogue { width, then }
    }

    /// What becomes of the sums of a row from `column` on; valid as long as this is.
    #[inline(always)]
    pub(crate) fn of_row(&self, row: usize, column: usize) -> OfRow<T> {
        match &self.then {
            Then::Nothing => OfRow::Nothing,
            Then::Activation(activation) => OfRow::Activation(Function(*activation)),
            Then::Sum { gate, residual } => OfRow::Sum(Sum {
                gate: gate.of_row(self.width, row, column),
                residual: residual.of_row(self.width, row, column),
            }),
        }
    }

    /// Has `loops` go over its rows, knowing what becomes of the sums from `column` on: each function has a loop of its own, without branches.
    #[inline(always)]
    fn each<I: Isa>(&self, isa: I, column: usize, loops: &impl Loop<T>) {
        match &self.then {
            Then::Nothing => loops.each(isa, |_| Same),
            Then::Activation(Activation::Relu) => loops.each(isa, |_| Function(Activation::Relu)),
            Then::Activation(Activation::Gelu) => loops.each(isa, |_| Function(Activation::Gelu)),
            Then::Activation(Activation::GeluTanh) => loops.each(isa, |_| Function(Activation::GeluTanh)),
            Then::Activation(Activation::Silu | Activation::SwiGlu) => {
                loops.each(isa, |_| Function(Activation::Silu));
            }
            Then::Sum { gate, residual } => loops.each(isa, |row| Sum {
                gate: gate.of_row(self.width, row, column),
                residual: residual.of_row(self.width, row, column),
            }),
        }
    }

    /// Whether sums stay as they are.
    pub(crate) fn is_nothing(&self) -> bool {
        matches!(self.then, Then::Nothing)
    }
}

/// Another operand of a row's sums: its first number, and the distance of the next.
#[derive(Debug, Clone, Copy)]
struct RowOperand<T> {
    start: *const T,
    step: usize,
}

impl<T: Element> RowOperand<T> {
    fn at(self, column: usize) -> *const T {
        self.start.wrapping_add(column * self.step)
    }
}

/// What becomes of a row's sums.
pub(crate) trait Becomes<T>: Copy {
    /// What becomes of `n` sums from `column` on.
    ///
    /// # Safety
    /// The row has so many, at most a vector's.
    unsafe fn apply<I: Isa>(self, isa: I, sums: I::V, column: usize, n: usize) -> I::V;

    /// Prefetches what that reads.
    #[inline(always)]
    fn prefetch<I: Isa>(self, _isa: I, _column: usize) {}
}

/// They stay as they are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Same;

impl<T> Becomes<T> for Same {
    #[inline(always)]
    unsafe fn apply<I: Isa>(self, _isa: I, sums: I::V, _column: usize, _n: usize) -> I::V {
        sums
    }
}

/// A function of each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Function(Activation);

impl<T> Becomes<T> for Function {
    #[inline(always)]
    unsafe fn apply<I: Isa>(self, isa: I, sums: I::V, _column: usize, _n: usize) -> I::V {
        activate(isa, self.0, sums)
    }
}

/// They are multiplied by a gate, and a residual is added.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sum<T> {
    gate: RowOperand<T>,
    residual: RowOperand<T>,
}

impl<T: Element> Becomes<T> for Sum<T> {
    #[inline(always)]
    unsafe fn apply<I: Isa>(self, isa: I, sums: I::V, column: usize, n: usize) -> I::V {
        // SAFETY: the caller's contract; one number for all is there for a whole vector.
        unsafe {
            let gate = isa.widen_part(self.gate.at(column), n);
            isa.fma(sums, gate, isa.widen_part(self.residual.at(column), n))
        }
    }

    #[inline(always)]
    fn prefetch<I: Isa>(self, isa: I, column: usize) {
        isa.prefetch(self.gate.at(column).cast());
        isa.prefetch(self.residual.at(column).cast());
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum OfRow<T> {
    Nothing,
    Activation(Function),
    Sum(Sum<T>),
}

impl<T: Element> Becomes<T> for OfRow<T> {
    #[inline(always)]
    unsafe fn apply<I: Isa>(self, isa: I, sums: I::V, column: usize, n: usize) -> I::V {
        // SAFETY: the caller's contract.
        unsafe {
            match self {
                OfRow::Nothing => sums,
                OfRow::Activation(function) => Becomes::<T>::apply(function, isa, sums, column, n),
                OfRow::Sum(sum) => sum.apply(isa, sums, column, n),
            }
        }
    }
}

/// A loop over rows of sums.
trait Loop<T> {
    /// Does for each row what `of_row` says.
    fn each<I: Isa, B: Becomes<T>>(&self, isa: I, of_row: impl Fn(usize) -> B);
}

/// Replaces sums by what becomes of them: `columns` of `rows`, in rows of the epilogue's width.
///
/// Contract of the constructor: `sums`, the first row's first, is valid for reading and writing these rows and columns.
pub(crate) struct Replace<'a, T> {
    pub(crate) epilogue: &'a Epilogue<'a, T>,
    pub(crate) sums: *mut T,
    pub(crate) rows: Range<usize>,
    pub(crate) columns: Range<usize>,
}

impl<T: Element> Job for Replace<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        if !self.epilogue.is_nothing() {
            self.epilogue.each(isa, self.columns.start, &self);
        }
    }
}

impl<T: Element> Loop<T> for Replace<'_, T> {
    #[inline(always)]
    fn each<I: Isa, B: Becomes<T>>(&self, isa: I, of_row: impl Fn(usize) -> B) {
        /// Rows from the one that is replaced to the one that is prefetched.
        const AHEAD: usize = 2;
        let Replace { epilogue, sums, ref rows, ref columns } = *self;
        for row in rows.clone() {
            let (becomes, ahead) = (of_row(row), of_row((row + AHEAD).min(rows.end - 1)));
            let start = sums.wrapping_add((row - rows.start) * epilogue.width);
            let whole = columns.len() - columns.len() % I::LANES;
            // SAFETY: the constructor's contract.
            unsafe {
                // (With a branch for the last, partial vector in it, this loop took 1.2 to 1.4 of the time.)
                for column in (0..whole).step_by(I::LANES) {
                    ahead.prefetch(isa, column);
                    let sums = becomes.apply(isa, isa.widen(start.add(column)), column, I::LANES);
                    isa.narrow(start.add(column), sums);
                }
                let n = columns.len() - whole;
                if n > 0 {
                    ahead.prefetch(isa, whole);
                    let sums = becomes.apply(isa, isa.widen_part(start.add(whole), n), whole, n);
                    isa.narrow_part(start.add(whole), sums, n);
                }
            }
        }
    }
}

/// Writes what becomes of rows of sums, plus the bias, to the rows' outputs. Sums of f32 are where the output is, with the bias.
///
/// Contract of the constructor: rows that do not stay as they are are consecutive, from number `first` on; the sums are valid for reading and the outputs for writing as many
/// elements as there are columns, and the bias has as many.
pub(crate) struct Finish<'a, T> {
    pub(crate) epilogue: &'a Epilogue<'a, T>,
    pub(crate) rows: &'a [(*const f32, *mut T)],
    pub(crate) first: usize,
    pub(crate) columns: Range<usize>,
    pub(crate) bias: Option<&'a [T]>,
}

impl<T: Element> Job for Finish<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Finish { epilogue, rows, first, ref columns, .. } = self;
        let Some(&(_, output)) = rows.first() else { return };
        match T::DTYPE {
            DType::F32 => {
                let rows = first..first + rows.len();
                Replace { epilogue, sums: output, rows, columns: columns.clone() }.run(isa);
            }
            _ => epilogue.each(isa, columns.start, &self),
        }
    }
}

impl<T: Element> Loop<T> for Finish<'_, T> {
    #[inline(always)]
    fn each<I: Isa, B: Becomes<T>>(&self, isa: I, of_row: impl Fn(usize) -> B) {
        let columns = self.columns.len();
        let whole = columns - columns % I::LANES;
        let bias = self.bias.map(|bias| bias[..columns].as_ptr());
        for (i, &(sums, output)) in self.rows.iter().enumerate() {
            let becomes = of_row(self.first + i);
            // SAFETY: the constructor's contract.
            unsafe {
                for column in (0..whole).step_by(I::LANES) {
                    let mut sum = isa.load(sums.add(column));
                    if let Some(bias) = bias {
                        sum = isa.add(sum, isa.widen(bias.add(column)));
                    }
                    isa.narrow(output.add(column), becomes.apply(isa, sum, column, I::LANES));
                }
                let n = columns - whole;
                if n > 0 {
                    let mut sum = isa.widen_part(sums.add(whole), n);
                    if let Some(bias) = bias {
                        sum = isa.add(sum, isa.widen_part(bias.add(whole), n));
                    }
                    isa.narrow_part(output.add(whole), becomes.apply(isa, sum, whole, n), n);
                }
            }
        }
    }
}
