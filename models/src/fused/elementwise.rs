//! Activations.

use super::rows::{exp, made};
use super::{numbers, of2};
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};

/// A function of one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Activation {
    Silu,
    Gelu,
    GeluTanh,
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// The normal distribution function, and its density.
#[inline(always)]
fn normal(x: f32) -> (f32, f32) {
    // Abramowitz and Stegun, 7.1.26: an error of 1.5e-7.
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / (1.0 + 0.327_591_1 * z);
    let bell = exp(-z * z);
    let poly = t * (0.254_829_6 + t * (-0.284_496_74 + t * (1.421_413_7 + t * (-1.453_152 + t * 1.061_405_4))));
    let upper = 0.5 * poly * bell;
    (if x < 0.0 { upper } else { 1.0 - upper }, bell * 0.398_942_3)
}

const C: f32 = 0.797_884_6;
const CUBE: f32 = 0.044_715;

impl Activation {
    #[inline(always)]
    fn value(self, x: f32) -> f32 {
        match self {
            Activation::Silu => x * sigmoid(x),
            Activation::Gelu => x * normal(x).0,
            // 0.5 (1 + tanh u) = sigmoid(2 u).
            Activation::GeluTanh => x * sigmoid(2.0 * C * (x + CUBE * x * x * x)),
        }
    }

    #[inline(always)]
    fn slope(self, x: f32) -> f32 {
        match self {
            Activation::Silu => {
                let s = sigmoid(x);
                s * (1.0 + x * (1.0 - s))
            }
            Activation::Gelu => {
                let (below, density) = normal(x);
                below + x * density
            }
            Activation::GeluTanh => {
                let s = sigmoid(2.0 * C * (x + CUBE * x * x * x));
                s + x * s * (1.0 - s) * 2.0 * C * (1.0 + 3.0 * CUBE * x * x)
            }
        }
    }
}

/// The function of every number, with the choice outside of the loop.
fn map(of: Activation, x: &[f32]) -> Vec<f32> {
    macro_rules! of {
        ($kind:expr) => {
            made(
                x.len(),
                1,
                #[inline(always)]
                |first, part| {
                    part.iter_mut().zip(&x[first..]).for_each(|(out, x)| *out = $kind.value(*x));
                },
            )
        };
    }
    match of {
        Activation::Silu => of!(Activation::Silu),
        Activation::Gelu => of!(Activation::Gelu),
        Activation::GeluTanh => of!(Activation::GeluTanh),
    }
}

impl CustomOp1 for Activation {
    fn name(&self) -> &'static str {
        "activation"
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = numbers(s1, l1)?;
        Ok((CpuStorage::F32(map(*self, x)), l1.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let found = of2("activation-backward", x.shape(), (x, gradient), |x, gradient| {
            macro_rules! of {
                ($kind:expr) => {
                    made(
                        x.len(),
                        1,
                        #[inline(always)]
                        |first, part| {
                            let numbers = x[first..].iter().zip(&gradient[first..]);
                            part.iter_mut().zip(numbers).for_each(|(out, (x, g))| *out = g * $kind.slope(*x));
                        },
                    )
                };
            }
            match self {
                Activation::Silu => of!(Activation::Silu),
                Activation::Gelu => of!(Activation::Gelu),
                Activation::GeluTanh => of!(Activation::GeluTanh),
            }
        })?;
        Ok(Some(found))
    }
}
