//! Numbers as sums of bf16 terms, for matrix units: as many as represent them exactly.

use crate::isa::{Isa, MAX_LANES, MatrixUnit};
use crate::settings::Precision;
use moh_operators::{Element, Float};

/// Elements of a vector of pairs.
pub(crate) const PAIRS: usize = 2 * MAX_LANES;

/// Number of bf16 terms (8 bits each) that represent a `dtype` of 8, 11 or 24 bits exactly.
pub(crate) const fn terms(dtype: Float) -> usize {
    match dtype {
        Float::BF16 => 1,
        Float::F16 => 2,
        Float::F32 => 3,
    }
}

/// The same at a precision: fewer for f32 where that is permitted.
pub(crate) const fn terms_at(precision: Precision, dtype: Float) -> usize {
    match (dtype, precision) {
        (Float::F32, Precision::High) => 2,
        (Float::F32, Precision::Medium) => 1,
        _ => terms(dtype),
    }
}

/// The unit, if it multiplies numbers of `T` at this precision faster than vectors do.
pub(crate) fn unit_for<T: Element>(unit: Option<MatrixUnit>, precision: Precision) -> Option<MatrixUnit> {
    unit.filter(|unit| terms_at(precision, T::FLOAT) <= unit.most_terms())
}

/// Splits both into bf16 terms and interleaves them. All terms but the last are rounded towards zero, the last to
/// nearest. An infinity yields NaN in the second term.
#[inline(always)]
pub(crate) fn split<I: Isa, const TERMS: usize>(isa: I, mut a: I::V, mut b: I::V) -> [I::V; TERMS] {
    let mut terms = [isa.splat(0.0); TERMS];
    for (i, term) in terms.iter_mut().enumerate() {
        *term = if i + 1 < TERMS { isa.halves(a, b) } else { isa.pair(a, b) };
        if i + 1 < TERMS {
            (a, b) = (isa.rest(a), isa.rest(b));
        }
    }
    terms
}

/// The terms of two vectors of numbers of `T`, interleaved: split, or rounded if one term is less than they have. NaN stays NaN.
#[inline(always)]
pub(crate) fn terms_of<I: Isa, T: Element, const TERMS: usize>(isa: I, a: I::V, b: I::V) -> [I::V; TERMS] {
    match (TERMS, T::FLOAT) {
        (1, Float::BF16) => [isa.halves(a, b); TERMS],
        (1, _) => [isa.halves(rounded(isa, a), rounded(isa, b)); TERMS],
        _ => split(isa, a, b),
    }
}

/// Rounded to the 8 bits of bf16. A number of 2^112 or more becomes NaN: the product below overflows.
#[inline(always)]
fn rounded<I: Isa>(isa: I, x: I::V) -> I::V {
    // In the large product's place there is no room for the 16 low bits (Veltkamp, Dekker 1971).
    let large = isa.mul(x, isa.splat(65_537.0));
    isa.sub(large, isa.sub(large, x))
}

/// The first [`PAIRS`] of `n` elements, padded with 0. Neighbouring bfloat16 form pairs; of numbers that are rounded or split, one of the
/// first half and one of the second.
#[inline(always)]
pub(crate) unsafe fn load<I: Isa, T: Element, const TERMS: usize>(isa: I, input: *const T, n: usize) -> [I::V; TERMS] {
    // SAFETY: the caller's contract: `n` elements, of f32 or bfloat16 if there is one term.
    unsafe {
        if TERMS > 1 || T::FLOAT == Float::F32 {
            let second = n.saturating_sub(MAX_LANES).min(MAX_LANES);
            let [first, second] =
                [part(isa, input, n.min(MAX_LANES)), part(isa, input.wrapping_add(MAX_LANES), second)];
            return terms_of::<I, T, TERMS>(isa, first, second);
        }
        if n >= PAIRS {
            return [isa.load(input.cast()); TERMS];
        }
        let mut buffer = [T::from_f32(0.0); PAIRS];
        std::ptr::copy_nonoverlapping(input, buffer.as_mut_ptr(), n);
        [isa.load(buffer.as_ptr().cast()); TERMS]
    }
}

/// `n` elements, at most [`MAX_LANES`], padded with 0.
#[inline(always)]
pub(crate) unsafe fn part<I: Isa, T: Element>(isa: I, input: *const T, n: usize) -> I::V {
    // SAFETY: the caller's contract.
    unsafe {
        match n {
            0 => isa.splat(0.0),
            _ => isa.widen_part(input, n),
        }
    }
}
