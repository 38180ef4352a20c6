//! RoutedMLP in f64, following its documentation step by step.

use super::{Activation, Problem};
use crate::tensor::Tensor;

/// The output. `fc1` and `fc2` give an expert's weight by input and output.
pub(crate) fn reference(
    p: &Problem,
    x: &Tensor<'_>,
    gates: &Tensor<'_>,
    [fc1_bias, fc2_bias]: [Option<Tensor<'_>>; 2],
    fc1: impl Fn(usize, usize, usize) -> f64,
    fc2: impl Fn(usize, usize, usize) -> f64,
) -> Vec<f64> {
    let columns = p.hidden * p.activation.columns();
    let mut output = vec![0.0; p.tokens * p.out_width];
    for t in 0..p.tokens {
        for e in 0..p.num_experts {
            let gate = gates.data.at(t * p.num_experts + e);
            if gate == 0.0 {
                continue;
            }
            let first = |j: usize| {
                let products = (0..p.width).map(|c| x.data.at(t * p.width + c) * fc1(e, c, j));
                products.sum::<f64>() + fc1_bias.map_or(0.0, |bias| bias.data.at(e * columns + j))
            };
            let hidden: Vec<f64> = (0..p.hidden)
                .map(|j| match p.activation {
                    Activation::SwiGlu => p.activation.of(first(j)) * first(p.hidden + j),
                    _ => p.activation.of(first(j)),
                })
                .collect();
            for c in 0..p.out_width {
                let sum: f64 = hidden.iter().enumerate().map(|(j, h)| h * fc2(e, j, c)).sum();
                output[t * p.out_width + c] +=
                    gate * (sum + fc2_bias.map_or(0.0, |bias| bias.data.at(e * p.out_width + c)));
            }
        }
    }
    output
}

impl Activation {
    /// The function of a number; for SwiGLU that of the gate.
    pub(crate) fn of(self, x: f64) -> f64 {
        match self {
            Activation::Relu => x.max(0.0),
            Activation::Silu | Activation::SwiGlu => silu(x),
            Activation::Gelu => gelu(x),
            // 0.5 * x * (1 + tanh(u)), without the difference of two numbers near 1.
            Activation::GeluTanh => {
                let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
                x / (1.0 + (-2.0 * u).exp())
            }
        }
    }
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// x * Phi(x), Phi being the normal distribution function.
fn gelu(x: f64) -> f64 {
    let y = x / std::f64::consts::SQRT_2;
    x * 0.5 * if y < -3.0 { erfc(-y) } else { 1.0 + erf(y) }
}

/// The error function: Maclaurin series up to 3, continued fraction of erfc above (Abramowitz and Stegun 7.1.5,
/// 7.1.14).
pub fn erf(x: f64) -> f64 {
    let magnitude = x.abs();
    let value = if magnitude < 3.0 {
        let mut term = magnitude;
        let mut sum = magnitude;
        for n in 1..100 {
            term *= -magnitude * magnitude / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        sum * 2.0 / std::f64::consts::PI.sqrt()
    } else {
        1.0 - erfc(magnitude)
    };
    value.copysign(x)
}

/// 1 - erf(x), of x from 3 on.
fn erfc(x: f64) -> f64 {
    let mut fraction = x;
    for n in (1..=60).rev() {
        fraction = x + f64::from(n) / 2.0 / fraction;
    }
    (-x * x).exp() / (fraction * std::f64::consts::PI.sqrt())
}

#[cfg(test)]
mod tests {
    #[test]
    fn erf_equals_tabulated_values() {
        for (x, value) in [
            (0.0, 0.0),
            (0.5, 0.520_499_877_813_046_5),
            (-1.0, -0.842_700_792_949_714_9),
            (2.9, 0.999_958_902_121_900_5),
            (3.1, 0.999_988_351_342_632_8),
            (6.0, 1.0),
        ] {
            assert!((super::erf(x) - value).abs() < 1e-12, "erf({x}) = {}", super::erf(x));
        }
    }

    /// Far below 0 the functions are small, not 0.
    #[test]
    fn gelu_of_large_negative_numbers() {
        use super::Activation;
        for (x, value) in [(-4.0, -1.266_849_673_3e-4), (-9.0, -1.015_729_565e-18)] {
            let found = Activation::Gelu.of(x);
            assert!((found / value - 1.0).abs() < 1e-6, "gelu({x}) = {found}");
            let smooth = Activation::GeluTanh.of(x);
            assert!(smooth < 0.0 && smooth > -1e-3, "gelu({x}) by tanh = {smooth}");
        }
    }
}
