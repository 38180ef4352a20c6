//! What becomes of a dense layer's sums before they are written: an activation function, or a gate and a residual.

use crate::activation::activate;
use crate::isa::{Isa, Job};
use moh_operators::Element;
use moh_operators::routed_mlp::Activation;

/// Another operand of a sum.
#[derive(Debug, Clone, Copy)]
enum Operand<'a, T> {
    Nothing,
    /// The same for all.
    Number(f32),
    /// A row of the operand for so many rows of sums.
    Rows(&'a [T], usize),
}

impl<'a, T: Element> Operand<'a, T> {
    /// The operand in `data`, each row of which is for `shared` rows of sums; `neutral` changes nothing.
    fn new(data: Option<&'a [T]>, shared: usize, neutral: f32) -> Operand<'a, T> {
        match data {
            None => Operand::Nothing,
            Some(&[number]) if number.to_f32() == neutral => Operand::Nothing,
            Some(&[number]) => Operand::Number(number.to_f32()),
            Some(data) => Operand::Rows(data, shared),
        }
    }

    /// From `column` on, for a row of `width` sums.
    #[inline(always)]
    fn of_row(self, width: usize, row: usize, column: usize) -> RowOperand<T> {
        match self {
            Operand::Nothing => RowOperand::Nothing,
            Operand::Number(number) => RowOperand::Number(number),
            Operand::Rows(data, shared) => RowOperand::At(data[row / shared * width + column..].as_ptr()),
        }
    }
}

/// What becomes of sums.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Epilogue<'a, T> {
    width: usize,
    activation: Option<Activation>,
    gate: Operand<'a, T>,
    residual: Operand<'a, T>,
}

impl<'a, T: Element> Epilogue<'a, T> {
    /// An activation function, of one column, of rows of `width` sums.
    pub(crate) fn activation(width: usize, activation: Activation) -> Epilogue<'a, T> {
        Epilogue { width, activation: Some(activation), gate: Operand::Nothing, residual: Operand::Nothing }
    }

    /// Rows of `width` sums are multiplied by the gate, whose rows are for `rows_per_gate` rows each, and the residual is added. Both have as
    /// many elements as that needs, or one.
    pub(crate) fn sum(
        width: usize,
        (gate, rows_per_gate): (Option<&'a [T]>, usize),
        residual: Option<&'a [T]>,
    ) -> Epilogue<'a, T> {
        let (gate, residual) = (Operand::new(gate, rows_per_gate, 1.0), Operand::new(residual, 1, 0.0));
        Epilogue { width, activation: None, gate, residual }
    }

    /// What becomes of the sums of a row from `column` on.
    #[inline(always)]
    pub(crate) fn of_row(&self, row: usize, column: usize) -> OfRow<T> {
        OfRow {
            activation: self.activation,
            gate: self.gate.of_row(self.width, row, column),
            residual: self.residual.of_row(self.width, row, column),
        }
    }

    /// Whether sums stay as they are.
    pub(crate) fn is_nothing(&self) -> bool {
        self.activation.is_none() && matches!((self.gate, self.residual), (Operand::Nothing, Operand::Nothing))
    }
}

/// Another operand of a row's sums.
#[derive(Debug, Clone, Copy)]
enum RowOperand<T> {
    Nothing,
    Number(f32),
    At(*const T),
}

impl<T: Element> RowOperand<T> {
    /// `n` numbers from `column` on.
    ///
    /// # Safety
    /// There are so many.
    #[inline(always)]
    unsafe fn at<I: Isa>(self, isa: I, column: usize, n: usize) -> Option<I::V> {
        match self {
            RowOperand::Nothing => None,
            RowOperand::Number(number) => Some(isa.splat(number)),
            RowOperand::At(start) => {
                // SAFETY: the caller's contract.
                Some(unsafe { isa.widen_part(start.add(column), n) })
            }
        }
    }
}

/// What becomes of a row's sums.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OfRow<T> {
    activation: Option<Activation>,
    gate: RowOperand<T>,
    residual: RowOperand<T>,
}

impl<T: Element> OfRow<T> {
    /// They stay as they are.
    pub(crate) const NOTHING: OfRow<T> =
        OfRow { activation: None, gate: RowOperand::Nothing, residual: RowOperand::Nothing };

    /// Whether sums stay as they are.
    #[inline(always)]
    pub(crate) fn is_nothing(&self) -> bool {
        self.activation.is_none() && matches!((self.gate, self.residual), (RowOperand::Nothing, RowOperand::Nothing))
    }

    /// What becomes of `n` sums from `column` on.
    ///
    /// # Safety
    /// The row has so many, at most a vector's.
    #[inline(always)]
    pub(crate) unsafe fn apply<I: Isa>(&self, isa: I, mut sums: I::V, column: usize, n: usize) -> I::V {
        if let Some(activation) = self.activation {
            sums = activate(isa, activation, sums);
        }
        // SAFETY: the caller's contract. (In a closure the code would not have the vectors' features.)
        let (gate, residual) = unsafe { (self.gate.at(isa, column, n), self.residual.at(isa, column, n)) };
        match (gate, residual) {
            (Some(gate), Some(residual)) => isa.fma(sums, gate, residual),
            (Some(gate), None) => isa.mul(sums, gate),
            (None, Some(residual)) => isa.add(sums, residual),
            (None, None) => sums,
        }
    }
}

/// Replaces rows of sums by what becomes of them.
///
/// Contract of the constructor: the epilogues are those of the rows, from their first columns on.
pub(crate) struct Replace<R> {
    pub(crate) rows: R,
}

impl<'a, T: Element, R: Iterator<Item = (&'a mut [T], OfRow<T>)>> Job for Replace<R> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        for (sums, epilogue) in self.rows {
            for column in (0..sums.len()).step_by(I::LANES) {
                let n = (sums.len() - column).min(I::LANES);
                // SAFETY: the constructor's contract.
                unsafe {
                    let at = sums.as_mut_ptr().add(column);
                    let sums = epilogue.apply(isa, isa.widen_part(at, n), column, n);
                    isa.narrow_part(at, sums, n);
                }
            }
        }
    }
}
