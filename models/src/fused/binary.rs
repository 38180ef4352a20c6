//! Sums, differences and products of two tensors, with broadcasting.

use super::rows::{each, made};
use super::{numbers, numbers_mut, packed};
use candle_core::{CpuStorage, CustomOp2, Device, InplaceOp2, Layout, Result, Shape, Storage, Tensor, bail};

/// What two numbers become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arithmetic {
    Sum,
    Difference,
    Product,
}

/// `op` of every number of `a` and of `b`, which broadcast to one shape.
pub(crate) fn binary(op: Arithmetic, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let shape = a.shape().broadcast_shape_binary_op(b.shape(), "binary")?;
    packed(a)?.broadcast_as(&shape)?.apply_op2_no_bwd(&packed(b)?.broadcast_as(&shape)?, &op)
}

/// Adds `b` to `a`, which has its shape and nobody else reads.
pub(crate) fn add_in_place(a: &Tensor, b: &Tensor) -> Result<()> {
    a.inplace_op2(&packed(b)?, &AddInPlace)
}

/// A tensor of that shape: the sum of `parts`, which begin at these rows of it, and 0 elsewhere.
pub(crate) fn joined(dims: &[usize], parts: &[(usize, Tensor)]) -> Result<Tensor> {
    let mut out = vec![0f32; dims.iter().product()];
    let row: usize = dims.iter().skip(1).product();
    for (first, part) in parts {
        let part = packed(part)?;
        let (storage, layout) = part.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else { bail!("a tensor that is not on the CPU") };
        let x = numbers(storage, layout)?;
        let Some(out) = out.get_mut(first * row..first * row + x.len()) else {
            bail!("{:?} from row {first} of {dims:?} on", part.dims());
        };
        add_to(out, x);
    }
    Tensor::from_vec(out, dims, &Device::Cpu)
}

fn add_to(out: &mut [f32], x: &[f32]) {
    each(
        out,
        1,
        #[inline(always)]
        |first, part| part.iter_mut().zip(&x[first..]).for_each(|(out, x)| *out += x),
    );
}

/// Numbers of a tensor without broadcast axes that are taken as one row.
const ROW: usize = 1 << 12;

/// An axis of the result, or several that lie in memory as one: its length, and the steps of both inputs along it.
#[derive(Clone, Copy)]
struct Axis {
    length: usize,
    steps: [usize; 2],
}

/// The axes, from the last to the first; at least one. The inputs are contiguous where they are not broadcast.
fn axes(dims: &[usize], strides: [&[usize]; 2]) -> Vec<Axis> {
    let mut axes: Vec<Axis> = Vec::new();
    for (i, &length) in dims.iter().enumerate().rev().filter(|(_, length)| **length != 1) {
        let steps = strides.map(|strides| strides[i]);
        match axes.last_mut() {
            Some(inner) if [0, 1].iter().all(|&of| steps[of] == inner.length * inner.steps[of]) => {
                inner.length *= length
            }
            _ => axes.push(Axis { length, steps }),
        }
    }
    if axes.is_empty() {
        axes.push(Axis { length: 1, steps: [1, 1] });
    }
    axes
}

impl CustomOp2 for Arithmetic {
    fn name(&self) -> &'static str {
        "binary"
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> Result<(CpuStorage, Shape)> {
        let (CpuStorage::F32(a), CpuStorage::F32(b)) = (s1, s2) else { bail!("tensors that are not in float32") };
        let (a, b) = (&a[l1.start_offset()..], &b[l2.start_offset()..]);
        let axes = axes(l1.dims(), [l1.stride(), l2.stride()]);
        let count = l1.shape().elem_count();
        let out = match self {
            Arithmetic::Sum => combine(
                &axes,
                a,
                b,
                count,
                #[inline(always)]
                |a, b| a + b,
            ),
            Arithmetic::Difference => combine(
                &axes,
                a,
                b,
                count,
                #[inline(always)]
                |a, b| a - b,
            ),
            Arithmetic::Product => combine(
                &axes,
                a,
                b,
                count,
                #[inline(always)]
                |a, b| a * b,
            ),
        };
        Ok((CpuStorage::F32(out), l1.shape().clone()))
    }
}

fn combine(axes: &[Axis], a: &[f32], b: &[f32], count: usize, f: impl Fn(f32, f32) -> f32 + Sync) -> Vec<f32> {
    let (inner, outer) = (axes[0], &axes[1..]);
    let width = if outer.is_empty() { ROW } else { inner.length };
    let begins = |row: usize| match outer {
        [] => inner.steps.map(|step| row * ROW * step),
        _ => {
            let (mut rest, mut at) = (row, [0, 0]);
            for axis in outer {
                let i = rest % axis.length;
                rest /= axis.length;
                at = [at[0] + i * axis.steps[0], at[1] + i * axis.steps[1]];
            }
            at
        }
    };
    made(
        count,
        width,
        #[inline(always)]
        |first, part| {
            for (i, out) in part.chunks_mut(width).enumerate() {
                let [of_a, of_b] = begins(first + i);
                let (a, b) = (&a[of_a..], &b[of_b..]);
                match inner.steps {
                    [0, _] => out.iter_mut().zip(b).for_each(|(out, b)| *out = f(a[0], *b)),
                    [_, 0] => out.iter_mut().zip(a).for_each(|(out, a)| *out = f(*a, b[0])),
                    _ => out.iter_mut().zip(a).zip(b).for_each(|((out, a), b)| *out = f(*a, *b)),
                }
            }
        },
    )
}

struct AddInPlace;

impl InplaceOp2 for AddInPlace {
    fn name(&self) -> &'static str {
        "add-in-place"
    }

    fn cpu_fwd(&self, s1: &mut CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> Result<()> {
        let (a, b) = (numbers_mut(s1, l1)?, numbers(s2, l2)?);
        if l1.dims() != l2.dims() {
            bail!("{:?} added to {:?}", l2.dims(), l1.dims());
        }
        add_to(a, b);
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn broadcasts_as_candle_does() {
        let tensor = |shape: &[usize], by: usize| {
            let count = shape.iter().product::<usize>();
            let x = Tensor::from_iter((0..count).map(|i| (i * by % 101) as f32 - 50.0), &Device::Cpu).unwrap();
            x.reshape(shape).unwrap()
        };
        let flat = |x: Tensor| (x.dims().to_vec(), x.flatten_all().unwrap().to_vec1::<f32>().unwrap());
        for (a, b) in [
            (&[2, 3, 5, 7][..], &[2, 3, 5, 7][..]),
            (&[3, 70, 50], &[3, 1, 50]),
            (&[3, 1, 50], &[3, 70, 50]),
            (&[4, 6, 9], &[9]),
            (&[4, 6, 9], &[1]),
            (&[], &[4, 6]),
            (&[2, 5, 4, 1], &[2, 5, 4, 8]),
            (&[2, 6, 5, 5], &[1, 6, 1, 1]),
            (&[4, 1, 3], &[1, 5, 1]),
            (&[3, 0, 2], &[1, 1, 2]),
            (&[300, 41], &[300, 41]),
        ] {
            let (a, b) = (tensor(a, 37), tensor(b, 53));
            assert_eq!(flat(binary(Arithmetic::Sum, &a, &b).unwrap()), flat(a.broadcast_add(&b).unwrap()));
            assert_eq!(flat(binary(Arithmetic::Difference, &a, &b).unwrap()), flat(a.broadcast_sub(&b).unwrap()));
            assert_eq!(flat(binary(Arithmetic::Product, &a, &b).unwrap()), flat(a.broadcast_mul(&b).unwrap()));
        }
        let (a, b) = (tensor(&[70, 80], 3), tensor(&[80, 70], 5).t().unwrap());
        let expected = flat((&a + &b).unwrap());
        assert_eq!(flat(binary(Arithmetic::Sum, &b, &a).unwrap()), expected);
        add_in_place(&a, &b).unwrap();
        assert_eq!(flat(a), expected);
        let parts = [(1, tensor(&[2, 3], 7)), (2, tensor(&[1, 3], 5))];
        let rows = [parts[0].1.pad_with_zeros(0, 1, 1).unwrap(), parts[1].1.pad_with_zeros(0, 2, 1).unwrap()];
        assert_eq!(flat(joined(&[4, 3], &parts).unwrap()), flat((&rows[0] + &rows[1]).unwrap()));
        assert!(joined(&[2, 3], &parts).is_err());
        let a = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
        assert!(add_in_place(&a, &a.t().unwrap()).is_err());
    }
}
