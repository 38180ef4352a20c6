//! Operations of a training on the CPU in one pass each, with their gradients.
//!
//! candle's graph of the composed formulas is right and slow: every step of a formula is a pass over memory, and three in the backward
//! pass. These do the same for contiguous float32 on the CPU. Sums are in an order that does not depend on the number of threads.
//! Tests compare values and gradients with the composed formulas, which [`crate::eager`] uses everywhere else.

mod convolution;
mod elementwise;
mod gates;
mod norm;
mod rows;
mod softmax;

pub(crate) use convolution::{conv2d, depthwise};
pub(crate) use elementwise::{Activation, activation, add_bias};
pub(crate) use gates::gate_heads;
pub(crate) use norm::{layer_norm, rms_norm};
pub(crate) use softmax::attention_weights;

use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Tensor, bail};

/// The numbers of a contiguous tensor.
fn numbers<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    let Some((start, end)) = layout.contiguous_offsets() else { bail!("a tensor that is not contiguous") };
    match storage {
        CpuStorage::F32(numbers) => Ok(&numbers[start..end]),
        _ => bail!("a tensor that is not in float32"),
    }
}

/// A function of one contiguous tensor's numbers, without a gradient.
struct Of1<F>(&'static str, Shape, F);

impl<F: Fn(&[f32], &mut [f32])> CustomOp1 for Of1<F> {
    fn name(&self) -> &'static str {
        self.0
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout) -> Result<(CpuStorage, Shape)> {
        let mut out = vec![0f32; self.1.elem_count()];
        (self.2)(numbers(s1, l1)?, &mut out);
        Ok((CpuStorage::F32(out), self.1.clone()))
    }
}

/// A function of two contiguous tensors' numbers, without a gradient.
struct Of2<F>(&'static str, Shape, F);

impl<F: Fn(&[f32], &[f32], &mut [f32])> CustomOp2 for Of2<F> {
    fn name(&self) -> &'static str {
        self.0
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> Result<(CpuStorage, Shape)> {
        let mut out = vec![0f32; self.1.elem_count()];
        (self.2)(numbers(s1, l1)?, numbers(s2, l2)?, &mut out);
        Ok((CpuStorage::F32(out), self.1.clone()))
    }
}

/// `f` of the numbers of `a`, of that shape.
fn of1(name: &'static str, shape: &Shape, a: &Tensor, f: impl Fn(&[f32], &mut [f32])) -> Result<Tensor> {
    a.contiguous()?.apply_op1_no_bwd(&Of1(name, shape.clone(), f))
}

/// `f` of the numbers of `a` and `b`, of that shape.
fn of2(
    name: &'static str,
    shape: &Shape,
    (a, b): (&Tensor, &Tensor),
    f: impl Fn(&[f32], &[f32], &mut [f32]),
) -> Result<Tensor> {
    a.contiguous()?.apply_op2_no_bwd(&b.contiguous()?, &Of2(name, shape.clone(), f))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::algebra::{mask_heads, softmax};
    use crate::sample::Rng;
    use candle_core::{D, Device, Var};

    fn random(seed: u64, shape: &[usize]) -> Var {
        let mut rng = Rng::new(seed);
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| 1.5 * rng.normal()).collect();
        Var::from_vec(values, shape, &Device::Cpu).unwrap()
    }

    fn flat(x: &Tensor) -> Vec<f32> {
        x.flatten_all().unwrap().to_vec1().unwrap()
    }

    /// Values and gradients of two formulas of the same variables.
    fn compare(what: &str, vars: &[&Var], fused: &Tensor, composed: &Tensor) {
        assert_eq!(fused.dims(), composed.dims(), "{what}");
        let near = |a: &Tensor, b: &Tensor, of: &str| {
            let (a, b) = (flat(a), flat(b));
            let size = b.iter().fold(1f32, |m, x| m.max(x.abs()));
            let worst = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            assert!(worst <= 2e-5 * size, "{what}: {of} differs by {worst} of {size}");
        };
        near(fused, composed, "the value");
        let weights = random(99, fused.dims()).as_detached_tensor();
        let gradients = |y: &Tensor| (y * &weights).unwrap().sum_all().unwrap().backward().unwrap();
        let (found, expected) = (gradients(fused), gradients(composed));
        for (i, var) in vars.iter().enumerate() {
            near(found.get(var).unwrap(), expected.get(var).unwrap(), &format!("gradient {i}"));
        }
    }

    #[test]
    fn activations() {
        let x = random(1, &[5, 333]);
        let t = x.as_tensor();
        compare("silu", &[&x], &activation(t, Activation::Silu).unwrap(), &crate::algebra::silu(t).unwrap());
        compare("gelu", &[&x], &activation(t, Activation::Gelu).unwrap(), &t.gelu_erf().unwrap());
        compare("gelu tanh", &[&x], &activation(t, Activation::GeluTanh).unwrap(), &t.gelu().unwrap());
        let b = random(2, &[333]);
        compare("bias", &[&x, &b], &add_bias(t, &b).unwrap(), &t.broadcast_add(&b).unwrap());
    }

    #[test]
    fn norms() {
        let (x, w, b) = (random(1, &[2, 300, 24]), random(2, &[24]), random(3, &[24]));
        let t = x.as_tensor();
        let mean = t.sqr().unwrap().mean_keepdim(D::Minus1).unwrap();
        let y = t.broadcast_div(&(mean + 1e-5).unwrap().sqrt().unwrap()).unwrap();
        let y = y.broadcast_mul(&w).unwrap();
        compare("rms", &[&x, &w], &rms_norm(t, &w, 1e-5).unwrap(), &y);
        let centred = t.broadcast_sub(&t.mean_keepdim(D::Minus1).unwrap()).unwrap();
        let variance = centred.sqr().unwrap().mean_keepdim(D::Minus1).unwrap();
        let y = centred.broadcast_div(&(variance + 1e-5).unwrap().sqrt().unwrap()).unwrap();
        compare("plain", &[&x], &layer_norm(t, None, 1e-5).unwrap(), &y);
        let y = y.broadcast_mul(&w).unwrap().broadcast_add(&b).unwrap();
        compare("affine", &[&x, &w, &b], &layer_norm(t, Some((&w, &b)), 1e-5).unwrap(), &y);
    }

    #[test]
    fn softmax_with_masks() {
        let (s, bias) = (random(1, &[2, 3, 5, 7]), random(2, &[2, 1, 1, 7]));
        let hidden = |i: usize, j: usize| if j + 5 <= i + 7 { 0.0 } else { f32::NEG_INFINITY };
        let mask: Vec<f32> = (0..35).map(|at| hidden(at / 7, at % 7)).collect();
        let mask = Tensor::from_vec(mask, (5, 7), &Device::Cpu).unwrap();
        let biased = (s.as_tensor() * 0.5).unwrap().broadcast_add(&bias).unwrap();
        let expected = softmax(&biased.broadcast_add(&mask).unwrap()).unwrap();
        let found = attention_weights(&s, Some(&bias), 0.5, true).unwrap();
        compare("causal", &[&s, &bias], &found, &expected);
        let plain = softmax(&(s.as_tensor() * 0.5).unwrap()).unwrap();
        compare("plain", &[&s], &attention_weights(&s, None, 0.5, false).unwrap(), &plain);
        // A row that sees nothing gives zeros.
        let nothing = Tensor::full(f32::NEG_INFINITY, (1, 1, 1, 7), &Device::Cpu).unwrap();
        let dead = attention_weights(&s, Some(&nothing), 0.5, false).unwrap();
        assert!(flat(&dead).iter().all(|w| *w == 0.0));
    }

    #[test]
    fn gates_of_heads() {
        let (x, gates) = (random(1, &[2, 3, 4, 6]), random(2, &[2, 4, 3]));
        let gated = x.broadcast_mul(&gates.transpose(1, 2).unwrap().unsqueeze(3).unwrap()).unwrap();
        let gated = gated.transpose(1, 2).unwrap().reshape((2, 4, 18)).unwrap();
        let expected = mask_heads(&gated, &gates).unwrap();
        compare("gates", &[&x, &gates], &gate_heads(&x, &gates).unwrap(), &expected);
    }

    #[test]
    fn convolutions() {
        let w = random(2, &[5, 3, 3, 3]);
        for (padding, stride) in [(1, 2), (0, 3), (2, 1)] {
            let x = random(1, &[2, 3, 9, 9]);
            let expected = x.conv2d(&w, padding, stride, 1, 1).unwrap();
            let found = conv2d(&x, &w, None, padding, stride).unwrap();
            compare("square", &[&x, &w], &found, &expected);
            // candle cannot differentiate where windows leave more columns over than rows: values only.
            let x = random(1, &[2, 3, 9, 8]);
            let expected = flat(&x.conv2d(&w, padding, stride, 1, 1).unwrap());
            let found = flat(&conv2d(&x, &w, None, padding, stride).unwrap());
            assert_eq!(found.len(), expected.len());
            assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-4), "{padding} {stride}");
        }
        let (x, w) = (random(3, &[2, 4, 5, 6]), random(4, &[4, 1, 3, 3]));
        let expected = x.conv2d(&w, 1, 1, 1, 4).unwrap();
        compare("depthwise", &[&x, &w], &depthwise(&x, &w).unwrap(), &expected);
    }
}
