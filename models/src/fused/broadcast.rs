//! Sums over the axes that a smaller tensor was broadcast along: its gradient.

use super::rows::{made_of, per_task, sum};
use super::{Arithmetic, binary, of1, of2};
use candle_core::{Result, Shape, Tensor};

/// `x` summed over the axes where `dims`, which broadcasts to its shape, has 1 or nothing.
pub(crate) fn reduced(x: &Tensor, dims: &[usize]) -> Result<Tensor> {
    let mut shape = x.dims().to_vec();
    let mut x = x.clone();
    while let Some((block, [a, b, c])) = last_block(&shape, dims) {
        shape[block].fill(1);
        x = of1("reduced", &Shape::from(shape.as_slice()), &x, |x| add_up([a, b, c], x))?;
    }
    if x.dims() == dims { Ok(x) } else { x.contiguous()?.reshape(dims) }
}

/// The same of `x * y`, where `y` broadcasts to the shape of `x`.
pub(crate) fn reduced_product(x: &Tensor, y: &Tensor, dims: &[usize]) -> Result<Tensor> {
    let mut shape = x.dims().to_vec();
    match last_block(&shape, dims) {
        Some((block, [a, b, c])) if y.dims() == x.dims() => {
            shape[block].fill(1);
            let x = of2("reduced", &Shape::from(shape.as_slice()), (x, y), |x, y| add_up_products([a, b, c], x, y))?;
            reduced(&x, dims)
        }
        _ => reduced(&binary(Arithmetic::Product, x, y)?, dims),
    }
}

/// The last run of axes to sum over, with the product of the dimensions before, in and after it.
fn last_block(shape: &[usize], dims: &[usize]) -> Option<(std::ops::Range<usize>, [usize; 3])> {
    let missing = shape.len() - dims.len();
    let summed = |axis: usize| shape[axis] != 1 && (axis < missing || dims[axis - missing] == 1);
    let end = 1 + (0..shape.len()).rev().find(|&axis| summed(axis))?;
    let start = (0..end).rev().take_while(|&axis| shape[axis] == 1 || summed(axis)).last().unwrap_or(end);
    let product = |range: std::ops::Range<usize>| shape[range].iter().product::<usize>();
    Some((start..end, [product(0..start), product(start..end), product(end..shape.len())]))
}

/// out (a, c) = the sum of x (a, b, c) over b.
fn add_up([a, b, c]: [usize; 3], x: &[f32]) -> Vec<f32> {
    if a * c == 0 {
        return Vec::new();
    }
    let rows = |x: &[f32], out: &mut [f32]| {
        for row in x.chunks(c) {
            out.iter_mut().zip(row).for_each(|(out, x)| *out += x);
        }
    };
    match (a, c) {
        (_, 1) => made_of(
            a,
            1,
            per_task(b),
            #[inline(always)]
            |first, part| {
                for (i, out) in part.iter_mut().enumerate() {
                    *out = super::softmax::sum(&x[(first + i) * b..][..b]);
                }
            },
        ),
        (1, _) => sum(
            b,
            c,
            c,
            #[inline(always)]
            |first, end, sums| rows(&x[first * c..end * c], sums),
        ),
        _ => made_of(
            a * c,
            c,
            per_task(b * c),
            #[inline(always)]
            |first, part| {
                for (i, out) in part.chunks_mut(c).enumerate() {
                    rows(&x[(first + i) * b * c..][..b * c], out);
                }
            },
        ),
    }
}

/// out (a, c) = the sum of x * y, (a, b, c) both, over b.
fn add_up_products([a, b, c]: [usize; 3], x: &[f32], y: &[f32]) -> Vec<f32> {
    if a * c == 0 {
        return Vec::new();
    }
    let rows = |x: &[f32], y: &[f32], out: &mut [f32]| {
        for (x, y) in x.chunks(c).zip(y.chunks(c)) {
            out.iter_mut().zip(x).zip(y).for_each(|((out, x), y)| *out += x * y);
        }
    };
    match (a, c) {
        (_, 1) => made_of(
            a,
            1,
            per_task(b),
            #[inline(always)]
            |first, part| {
                for (i, out) in part.iter_mut().enumerate() {
                    let from = (first + i) * b;
                    *out = super::softmax::dot(&x[from..][..b], &y[from..][..b]);
                }
            },
        ),
        (1, _) => sum(
            b,
            c,
            c,
            #[inline(always)]
            |first, end, sums| rows(&x[first * c..end * c], &y[first * c..end * c], sums),
        ),
        _ => made_of(
            a * c,
            c,
            per_task(b * c),
            #[inline(always)]
            |first, part| {
                for (i, out) in part.chunks_mut(c).enumerate() {
                    let from = (first + i) * b * c;
                    rows(&x[from..][..b * c], &y[from..][..b * c], out);
                }
            },
        ),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn sums_over_any_axes() {
        let count = 2 * 3 * 4 * 5;
        let x = Tensor::from_iter((0..count).map(|i| (i * 37 % 19) as f32), &Device::Cpu).unwrap();
        let x = x.reshape((2, 3, 1, 4, 5)).unwrap();
        let y = (&x * 0.5).unwrap();
        let flat = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for dims in [
            &[2, 3, 1, 4, 5][..],
            &[2, 3, 1, 1, 5],
            &[2, 1, 1, 4, 5],
            &[1, 3, 1, 4, 1],
            &[2, 1, 1, 1, 1],
            &[2, 1, 1, 4, 1],
            &[1, 1, 1, 4, 5],
            &[4, 5],
            &[5],
            &[4, 1],
            &[1],
            &[],
        ] {
            let padded = [vec![1; 5 - dims.len()], dims.to_vec()].concat();
            let expected = |x: &Tensor| {
                let axes: Vec<usize> = (0..5).filter(|&axis| padded[axis] == 1).collect();
                let x = if axes.is_empty() { x.clone() } else { x.sum_keepdim(axes).unwrap() };
                (flat(&x), dims.to_vec())
            };
            let found = |x: Tensor| (flat(&x), x.dims().to_vec());
            assert_eq!(found(reduced(&x, dims).unwrap()), expected(&x), "{dims:?}");
            assert_eq!(found(reduced_product(&x, &y, dims).unwrap()), expected(&(&x * &y).unwrap()), "{dims:?}");
            let row = y.narrow(1, 0, 1).unwrap();
            let product = x.broadcast_mul(&row).unwrap();
            assert_eq!(found(reduced_product(&x, &row, dims).unwrap()), expected(&product), "{dims:?}");
        }
    }
    #[test]
    fn sums_of_nothing() {
        let x = Tensor::zeros((3, 0), candle_core::DType::F32, &Device::Cpu).unwrap();
        assert_eq!(reduced(&x, &[1, 0]).unwrap().dims(), [1, 0]);
        assert_eq!(reduced_product(&x, &x, &[1, 0]).unwrap().dims(), [1, 0]);
        assert_eq!(reduced(&x, &[3, 1]).unwrap().to_vec2::<f32>().unwrap(), [[0.0], [0.0], [0.0]]);
    }
}
