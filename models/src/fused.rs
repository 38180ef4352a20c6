//! Operations of a training on the CPU in one pass each, with their gradients.
//!
//! candle's graph of the composed formulas is right and slow: every step of a formula is a pass over memory, and three in the backward
//! pass. These do the same for contiguous float32 on the CPU, in the graph of [`crate::graph`]. Sums are in an order that does not depend on
//! the number of threads. Tests compare values and gradients with the composed formulas, which [`crate::eager`] uses everywhere else.

pub(crate) mod aggregated;
mod binary;
mod broadcast;
mod convolution;
mod elementwise;
mod gates;
mod linear;
mod norm;
mod packed;
#[allow(unsafe_code)]
mod product;
mod rows;
mod softmax;
mod table;

pub(crate) use binary::{Arithmetic, add_in_place, binary, joined};
pub(crate) use broadcast::{reduced, reduced_product};
pub(crate) use convolution::{depthwise, windows};
pub(crate) use elementwise::Activation;
pub(crate) use gates::{GateHeads, mask_heads, mask_in_place};
pub(crate) use linear::{linear, linear_gradients};
pub(crate) use norm::Norm;
pub(crate) use packed::packed;
pub(crate) use product::{product, product_of_heads};
pub(crate) use softmax::AttentionSoftmax;
pub(crate) use table::Table;

use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Tensor, bail};

/// The numbers of a contiguous tensor.
fn numbers<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    let Some((start, end)) = layout.contiguous_offsets() else { bail!("a tensor that is not contiguous") };
    match storage {
        CpuStorage::F32(numbers) => Ok(&numbers[start..end]),
        _ => bail!("a tensor that is not in float32"),
    }
}

/// The same, to be changed.
fn numbers_mut<'a>(storage: &'a mut CpuStorage, layout: &Layout) -> Result<&'a mut [f32]> {
    let Some((start, end)) = layout.contiguous_offsets() else { bail!("a tensor that is not contiguous") };
    match storage {
        CpuStorage::F32(numbers) => Ok(&mut numbers[start..end]),
        _ => bail!("a tensor that is not in float32"),
    }
}

/// A function of one contiguous tensor's numbers, without a gradient.
struct Of1<F>(&'static str, Shape, F);

impl<F: Fn(&[f32]) -> Vec<f32>> CustomOp1 for Of1<F> {
    fn name(&self) -> &'static str {
        self.0
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32((self.2)(numbers(s1, l1)?)), self.1.clone()))
    }
}

/// A function of two contiguous tensors' numbers, without a gradient.
struct Of2<F>(&'static str, Shape, F);

impl<F: Fn(&[f32], &[f32]) -> Vec<f32>> CustomOp2 for Of2<F> {
    fn name(&self) -> &'static str {
        self.0
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32((self.2)(numbers(s1, l1)?, numbers(s2, l2)?)), self.1.clone()))
    }
}

/// `f` of the numbers of `a`, of that shape.
fn of1(name: &'static str, shape: &Shape, a: &Tensor, f: impl Fn(&[f32]) -> Vec<f32>) -> Result<Tensor> {
    packed(a)?.apply_op1_no_bwd(&Of1(name, shape.clone(), f))
}

/// `f` of the numbers of `a` and `b`, of that shape.
fn of2(
    name: &'static str,
    shape: &Shape,
    (a, b): (&Tensor, &Tensor),
    f: impl Fn(&[f32], &[f32]) -> Vec<f32>,
) -> Result<Tensor> {
    packed(a)?.apply_op2_no_bwd(&packed(b)?, &Of2(name, shape.clone(), f))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::sample::Rng;
    use candle_core::{D, DType, Device, Var};

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
        compare("silu", &[&x], &t.apply_op1(Activation::Silu).unwrap(), &crate::algebra::silu(t).unwrap());
        compare("gelu", &[&x], &t.apply_op1(Activation::Gelu).unwrap(), &t.gelu_erf().unwrap());
        compare("gelu tanh", &[&x], &t.apply_op1(Activation::GeluTanh).unwrap(), &t.gelu().unwrap());
    }

    #[test]
    fn norms() {
        let (x, w, b) = (random(1, &[2, 300, 24]), random(2, &[24]), random(3, &[24]));
        let t = x.as_tensor();
        let mean = t.sqr().unwrap().mean_keepdim(D::Minus1).unwrap();
        let y = t.broadcast_div(&(mean + 1e-5).unwrap().sqrt().unwrap()).unwrap();
        let y = y.broadcast_mul(&w).unwrap();
        compare("rms", &[&x, &w], &t.apply_op2(&w, Norm { eps: 1e-5, centres: false }).unwrap(), &y);
        let centred = t.broadcast_sub(&t.mean_keepdim(D::Minus1).unwrap()).unwrap();
        let variance = centred.sqr().unwrap().mean_keepdim(D::Minus1).unwrap();
        let y = centred.broadcast_div(&(variance + 1e-5).unwrap().sqrt().unwrap()).unwrap();
        compare("plain", &[&x], &t.apply_op1(Norm { eps: 1e-5, centres: true }).unwrap(), &y);
        let y = y.broadcast_mul(&w).unwrap().broadcast_add(&b).unwrap();
        compare("affine", &[&x, &w, &b], &t.apply_op3(&w, &b, Norm { eps: 1e-5, centres: true }).unwrap(), &y);
    }

    #[test]
    fn softmax_of_rows_that_see_nothing() {
        let scores = random(1, &[2, 3, 5, 7]);
        let nothing = Tensor::full(f32::NEG_INFINITY, (1, 1, 1, 7), &Device::Cpu).unwrap();
        let softmax = AttentionSoftmax::of(&scores, 0.5, false).unwrap();
        assert!(flat(&softmax.weights(&scores, Some(&nothing)).unwrap()).iter().all(|weight| *weight == 0.0));
        let empty = Tensor::zeros((1, 2, 3, 0), DType::F32, &Device::Cpu).unwrap();
        let softmax = AttentionSoftmax::of(&empty, 0.5, false).unwrap();
        assert_eq!(softmax.weights(&empty, None).unwrap().dims(), [1, 2, 3, 0]);
    }

    /// With a scale of 0, too, a bias has the gradient of its softmax, and scores have none.
    #[test]
    fn gradients_of_a_bias_without_scores() {
        let (scores, bias) = (random(1, &[1, 2, 5, 7]), random(2, &[1, 1, 5, 7]));
        let softmax = AttentionSoftmax::of(&scores, 0.0, false).unwrap();
        let weights = softmax.weights(&scores, Some(bias.as_tensor())).unwrap();
        let gradient = random(3, &[1, 2, 5, 7]).as_detached_tensor();
        let (of_scores, of_bias) = softmax.gradients(&weights, &gradient, Some(bias.dims())).unwrap();
        assert!(flat(&of_scores).iter().all(|g| *g == 0.0));
        let y = crate::algebra::softmax(&bias.broadcast_as(gradient.shape()).unwrap()).unwrap();
        let expected = (y * gradient).unwrap().sum_all().unwrap().backward().unwrap();
        let (found, expected) = (flat(&of_bias.unwrap()), flat(expected.get(&bias).unwrap()));
        assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5), "{found:?}, expected {expected:?}");
    }

    #[test]
    fn convolutions() {
        let w = random(2, &[5, 3, 3, 3]);
        for (padding, stride) in [(1, 2), (0, 3), (2, 1)] {
            let x = random(1, &[2, 3, 9, 9]);
            let expected = x.conv2d(&w, padding, stride, 1, 1).unwrap();
            let conv2d = |x: &Tensor| {
                let windows = windows(x, &w, padding, stride).unwrap();
                let [y, z] = windows.places();
                let kernel = w.reshape((5, 27)).unwrap().t().unwrap();
                let product = x.apply_op1(windows).unwrap().matmul(&kernel).unwrap();
                product.reshape((2, y, z, 5)).unwrap().permute((0, 3, 1, 2)).unwrap()
            };
            compare("square", &[&x, &w], &conv2d(&x), &expected);
            // candle cannot differentiate where windows leave more columns over than rows: values only.
            let x = random(1, &[2, 3, 9, 8]);
            let expected = flat(&x.conv2d(&w, padding, stride, 1, 1).unwrap());
            let found = flat(&conv2d(&x));
            assert_eq!(found.len(), expected.len());
            assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-4), "{padding} {stride}");
        }
        let (x, w) = (random(3, &[2, 4, 5, 6]), random(4, &[4, 1, 3, 3]));
        let b = random(5, &[4]);
        let expected = x.conv2d(&w, 1, 1, 1, 4).unwrap().broadcast_add(&b.reshape((1, 4, 1, 1)).unwrap()).unwrap();
        let last = x.permute((0, 2, 3, 1)).unwrap().contiguous().unwrap();
        let found = last.apply_op3(&w, &b, depthwise(&last, &w).unwrap()).unwrap().permute((0, 3, 1, 2)).unwrap();
        compare("depthwise", &[&x, &w, &b], &found, &expected);
    }
}
