//! The activation functions.

use crate::isa::{EXP2_MOST, Isa, Job};
use moh_operators::Element;
use moh_operators::routed_mlp::Activation;
use std::f32::consts::LOG2_E;

/// Applies the activation to rows of `columns` sums, plus the bias.
///
/// Contract of the constructor: whole vectors of the sums (for SwiGLU also those `other` floats further) are valid for
/// reading, of the outputs for writing; `columns` elements of the biases are valid for reading.
pub(crate) struct Activate<'a, T> {
    pub(crate) activation: Activation,
    pub(crate) rows: &'a [(*const f32, *mut f32)],
    pub(crate) columns: usize,
    pub(crate) other: usize,
    pub(crate) bias: Option<[*const T; 2]>,
}

impl<T: Element> Job for Activate<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let two = self.activation.columns() == 2;
        for column in (0..self.columns).step_by(I::LANES) {
            let n = (self.columns - column).min(I::LANES);
            let (mut bias, mut other_bias) = (isa.splat(0.0), isa.splat(0.0));
            // SAFETY: the constructor's contract; column + n <= columns.
            unsafe {
                if let Some([first, second]) = self.bias {
                    bias = isa.widen_part(first.add(column), n);
                    if two {
                        other_bias = isa.widen_part(second.add(column), n);
                    }
                }
                for &(sums, output) in self.rows {
                    let x = isa.add(isa.load(sums.add(column)), bias);
                    let mut y = activate(isa, self.activation, x);
                    if two {
                        y = isa.mul(y, isa.add(isa.load(sums.add(self.other + column)), other_bias));
                    }
                    isa.store(output.add(column), y);
                }
            }
        }
    }
}

/// The function of each number; for SwiGLU that of the gate.
#[inline(always)]
pub(crate) fn activate<I: Isa>(isa: I, activation: Activation, x: I::V) -> I::V {
    match activation {
        Activation::Relu => isa.max(isa.splat(0.0), x),
        Activation::Gelu => gelu(isa, x),
        Activation::GeluTanh => gelu_tanh(isa, x),
        Activation::Silu | Activation::SwiGlu => silu(isa, x),
    }
}

/// x / (1 + 2^v), v at most [`EXP2_MOST`], which is for a quotient of 0 (NaN if x is -inf).
#[inline(always)]
fn gated<I: Isa>(isa: I, x: I::V, v: I::V) -> I::V {
    isa.quotient(x, isa.add(isa.splat(1.0), isa.exp2(v)))
}

/// x / (1 + e^-x).
#[inline(always)]
fn silu<I: Isa>(isa: I, x: I::V) -> I::V {
    let v = isa.mul(isa.max(isa.splat(-EXP2_MOST / LOG2_E), x), isa.splat(-LOG2_E));
    gated(isa, x, v)
}

/// 0.5 x (1 + tanh(u)) = x / (1 + e^-2u), with u = sqrt(2/pi) (x + 0.044715 x^3).
#[inline(always)]
fn gelu_tanh<I: Isa>(isa: I, x: I::V) -> I::V {
    const SCALE: f32 = -1.595_769 * LOG2_E;
    /// For which v is [`EXP2_MOST`].
    const LEAST: f32 = -10.0684;
    let y = isa.max(isa.splat(LEAST), x);
    let factor = isa.fma(isa.mul(y, y), isa.splat(SCALE * 0.044_715), isa.splat(SCALE));
    gated(isa, x, isa.mul(y, factor))
}

/// Upper tail of the normal distribution, a >= 0: e^(-a^2/2) t p(t) with t = 1 / (1 + a/4), the form of Abramowitz and
/// Stegun 26.2.17. The polynomial p is fitted here, lowest power first; its error times 1 + a is below 4e-9.
const TAIL: [f32; 7] = [0.099_849, 0.104_798_96, 0.046_739_16, 0.246_746_97, -0.236_824_11, 0.327_593_7, -0.088_903_7];

/// The positive and the negative part of x, both >= 0. If x is NaN, both are NaN.
#[inline(always)]
fn parts<I: Isa>(isa: I, x: I::V) -> [I::V; 2] {
    let zero = isa.splat(0.0);
    [isa.max(zero, x), isa.max(zero, isa.sub(zero, x))]
}

/// x * Phi(x), Phi being the normal distribution function.
#[inline(always)]
fn gelu<I: Isa>(isa: I, x: I::V) -> I::V {
    let one = isa.splat(1.0);
    let [positive, negative] = parts(isa, x);
    let a = isa.add(positive, negative);
    let t = isa.div(one, isa.fma(a, isa.splat(0.25), one));
    let mut p = isa.splat(TAIL[6]);
    for &c in TAIL[..6].iter().rev() {
        p = isa.fma(p, t, isa.splat(c));
    }
    let decay = isa.exp2(isa.mul(isa.mul(a, a), isa.splat(-0.5 * LOG2_E)));
    let tail = isa.mul(isa.mul(p, t), decay);
    isa.sub(isa.mul(positive, isa.sub(one, tail)), isa.mul(negative, tail))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::portable::Portable;
    use moh_operators::routed_mlp::erf;

    fn apply<I: Isa>(isa: Option<I>, activation: Activation, x: &[f32]) -> Option<Vec<f32>> {
        let mut y = vec![f32::NAN; x.len()];
        let rows = &[(x.as_ptr(), y.as_mut_ptr())];
        isa?.vectorize(Activate::<f32> { activation, rows, columns: x.len(), other: 0, bias: None });
        Some(y)
    }

    /// Maximum absolute error over -12 to 12 on every instruction set, against f64.
    fn error(activation: Activation, expected: impl Fn(f64) -> f64) -> f64 {
        let x: Vec<f32> = (-1_200_000..1_200_000).map(|i| i as f32 * 1e-5).collect();
        let x = x.as_slice();
        macro_rules! apply_each {
            ($(#[$cfg:meta] $module:ident::$token:ident,)*) => {
                [$(#[$cfg] apply(<crate::isa::$module::$token as Isa>::detect(), activation, x),)*]
            };
        }
        let found = crate::isa::each_isa!(apply_each);
        let errors = found.iter().flatten().flat_map(|y| {
            x.iter().zip(y).map(|(&x, &y)| (f64::from(y) - expected(f64::from(x))).abs()).collect::<Vec<_>>()
        });
        errors.fold(0.0, f64::max)
    }

    // Half a unit in the last place is 5e-7 for values up to 12.
    #[test]
    fn gelu_is_accurate() {
        let error = error(Activation::Gelu, |x| 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2)));
        assert!(error < 1e-6, "{error}");
    }

    #[test]
    fn gelu_tanh_is_accurate() {
        let scale = (2.0 / std::f64::consts::PI).sqrt();
        let error = error(Activation::GeluTanh, |x| 0.5 * x * (1.0 + (scale * (x + 0.044715 * x * x * x)).tanh()));
        assert!(error < 1.5e-6, "{error}");
    }

    #[test]
    fn silu_is_accurate() {
        let error = error(Activation::Silu, |x| x / (1.0 + (-x).exp()));
        assert!(error < 1.5e-6, "{error}");
    }

    #[test]
    fn activations_of_infinity_nan_and_large_numbers() {
        for &activation in Activation::ALL {
            let x = [f32::INFINITY, f32::NAN, -1e30, 1e30, 1.0, 1.0, 1.0, 1.0];
            let mut y = [0.0; 4];
            let rows = &[(x.as_ptr(), y.as_mut_ptr())];
            Portable.vectorize(Activate::<f32> { activation, rows, columns: 4, other: 4, bias: None });
            assert_eq!(y[0], f32::INFINITY, "{activation:?}");
            assert!(y[1].is_nan(), "{activation:?}");
            assert_eq!(y[2..], [0.0, 1e30], "{activation:?}");
        }
    }
}
