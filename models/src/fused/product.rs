//! Matrix products in float32, of matrices with any strides, that threads share.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};
use gemm::Parallelism;
use rayon::prelude::*;

/// a b over the last two axes, (.., m, k) and (.., k, n); the axes before them are the same.
pub(crate) fn product(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    a.apply_op2_no_bwd(b, &Product { joins_heads: false })
}

/// (batch, m, heads * n): the same of (batch, heads, m, k) and (batch, heads, k, n), with the heads of a token side by side.
pub(crate) fn product_of_heads(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    a.apply_op2_no_bwd(b, &Product { joins_heads: true })
}

struct Product {
    joins_heads: bool,
}

/// Multiplications that are worth a task.
const TASK: usize = 1 << 18;
/// Rows and columns are given to threads in multiples of it.
const TILE: usize = 64;

/// Matrices in memory.
struct Matrices<'a> {
    numbers: &'a [f32],
    /// The axes before the matrices: lengths and strides.
    outer: Vec<(usize, usize)>,
    strides: [usize; 2],
}

impl<'a> Matrices<'a> {
    fn of(storage: &'a CpuStorage, layout: &Layout) -> Result<Matrices<'a>> {
        let CpuStorage::F32(numbers) = storage else { bail!("a tensor that is not in float32") };
        let (dims, strides) = (layout.dims(), layout.stride());
        let Some(rank) = dims.len().checked_sub(2) else { bail!("a matrix of shape {dims:?}") };
        let last: usize = dims.iter().zip(strides).map(|(n, stride)| n.saturating_sub(1) * stride).sum();
        if !dims.contains(&0) && layout.start_offset() + last >= numbers.len() {
            bail!("matrices {layout:?} beyond {} numbers", numbers.len());
        }
        let outer = dims.iter().copied().zip(strides.iter().copied()).take(rank).collect();
        Ok(Matrices { numbers: &numbers[layout.start_offset()..], outer, strides: [strides[rank], strides[rank + 1]] })
    }

    /// Where matrix `i` begins.
    fn at(&self, i: usize) -> usize {
        let step = |(rest, at): (usize, usize), (n, stride): &(usize, usize)| (rest / n, at + rest % n * stride);
        self.outer.iter().rev().fold((i, 0), step).1
    }
}

/// What tasks write to, each at other places.
struct Output(*mut f32);

// SAFETY: it is only an address; `Product` says who writes where.
unsafe impl Sync for Output {}

impl Output {
    fn at(&self, i: usize) -> *mut f32 {
        self.0.wrapping_add(i)
    }
}

impl CustomOp2 for Product {
    fn name(&self) -> &'static str {
        "product"
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> Result<(CpuStorage, Shape)> {
        let (a, b) = (Matrices::of(s1, l1)?, Matrices::of(s2, l2)?);
        let (&[ref outer @ .., m, k], &[ref other @ .., rows, n]) = (l1.dims(), l2.dims()) else {
            bail!("matrices {:?} and {:?}", l1.dims(), l2.dims());
        };
        if outer != other || k != rows || (self.joins_heads && outer.len() != 2) {
            bail!("a product of {:?} and {:?}", l1.dims(), l2.dims());
        }
        let (count, heads) = (outer.iter().product::<usize>(), if self.joins_heads { outer[1] } else { 1 });
        let shape = match self.joins_heads {
            true => vec![outer[0], m, heads * n],
            false => [outer, &[m, n]].concat(),
        };
        let total = count * m * n;
        if total == 0 || k == 0 {
            return Ok((CpuStorage::F32(vec![0.0; total]), Shape::from(shape)));
        }
        let mut numbers: Vec<f32> = Vec::with_capacity(total);
        let to = Output(numbers.as_mut_ptr());
        // Rows or columns of a matrix that are a task's.
        let cuts = rayon::current_num_threads().div_ceil(count);
        let part = m.max(n).div_ceil(cuts).next_multiple_of(TILE);
        let task = |i: usize| {
            let (i, from) = (i / cuts, i % cuts * part);
            let (top, left) = if m > n { (from.min(m), 0) } else { (0, from.min(n)) };
            let (height, width) = if m > n { (part.min(m - top), n) } else { (m, part.min(n - left)) };
            if height == 0 || width == 0 {
                return;
            }
            let of_a = a.numbers[a.at(i) + top * a.strides[0]..].as_ptr();
            let of_b = b.numbers[b.at(i) + left * b.strides[1]..].as_ptr();
            let at = (i / heads * m + top) * heads * n + i % heads * n + left;
            let [step_a, step_b] = [&a, &b].map(|x| x.strides.map(|stride| stride as isize));
            // SAFETY: `Matrices::of` has checked that all elements lie in the slices. The tasks' parts of the output, which has `total` numbers,
            // do not overlap; nothing is read from it.
            unsafe {
                gemm::gemm(
                    height,
                    width,
                    k,
                    to.at(at),
                    1,
                    (heads * n) as isize,
                    false,
                    of_a,
                    step_a[1],
                    step_a[0],
                    of_b,
                    step_b[1],
                    step_b[0],
                    0.0,
                    1.0,
                    false,
                    false,
                    false,
                    Parallelism::None,
                );
            }
        };
        (0..count * cuts).into_par_iter().with_min_len(TASK.div_ceil(m * n * k / cuts + 1)).for_each(task);
        // SAFETY: the tasks have written every element of every matrix, which are all of the output.
        unsafe { numbers.set_len(total) };
        Ok((CpuStorage::F32(numbers), Shape::from(shape)))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::sample::Rng;
    use candle_core::{DType, Device};

    fn random(seed: u64, shape: &[usize]) -> Tensor {
        let mut rng = Rng::new(seed);
        let count = shape.iter().product::<usize>();
        Tensor::from_vec((0..count).map(|_| rng.normal()).collect::<Vec<f32>>(), shape, &Device::Cpu).unwrap()
    }

    fn near(found: &Tensor, expected: &Tensor) {
        assert_eq!(found.dims(), expected.dims());
        let [a, b] = [found, expected].map(|x| x.flatten_all().unwrap().to_vec1::<f32>().unwrap());
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= 1e-4), "{:?}", found.dims());
    }

    #[test]
    fn as_candle_multiplies() {
        for (m, k, n) in [(1, 7, 300), (300, 5, 1), (130, 33, 70), (70, 33, 130), (1, 1, 1), (3, 2, 400)] {
            let (a, b) = (random(1, &[m, k]), random(2, &[k, n]));
            let expected = a.matmul(&b).unwrap();
            near(&product(&a, &b).unwrap(), &expected);
            let turned = b.t().unwrap().contiguous().unwrap();
            near(&product(&a, &turned.t().unwrap()).unwrap(), &expected);
            let turned = a.t().unwrap().contiguous().unwrap();
            near(&product(&turned.t().unwrap(), &b).unwrap(), &expected);
        }
    }

    #[test]
    fn heads_of_tokens() {
        let (batch, heads, m, n, dim) = (2, 3, 9, 70, 5);
        let (q, k) = (random(1, &[batch, m, heads * dim]), random(2, &[batch, n, heads * dim]));
        let per_head = |x: &Tensor, length| x.reshape((batch, length, heads, dim)).unwrap().transpose(1, 2).unwrap();
        let (q, k) = (per_head(&q, m), per_head(&k, n).narrow(2, 1, n - 1).unwrap());
        let scores = q.contiguous().unwrap().matmul(&k.contiguous().unwrap().t().unwrap()).unwrap();
        near(&product(&q, &k.t().unwrap()).unwrap(), &scores);
        let expected = scores.matmul(&k.contiguous().unwrap()).unwrap().transpose(1, 2).unwrap();
        near(&product_of_heads(&scores, &k).unwrap(), &expected.reshape((batch, m, heads * dim)).unwrap());
    }

    #[test]
    fn of_nothing_and_of_what_does_not_fit() {
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
        assert_eq!(product(&zeros(&[2, 0]), &zeros(&[0, 3])).unwrap().to_vec2::<f32>().unwrap(), [[0.0; 3]; 2]);
        assert_eq!(product(&zeros(&[0, 4, 2]), &zeros(&[0, 2, 3])).unwrap().dims(), [0, 4, 3]);
        assert!(product(&zeros(&[2, 3]), &zeros(&[2, 3])).is_err());
        assert!(product(&zeros(&[1, 2, 3]), &zeros(&[2, 3, 2])).is_err());
        assert!(product(&zeros(&[3]), &zeros(&[3])).is_err());
        assert!(product_of_heads(&zeros(&[2, 3]), &zeros(&[3, 2])).is_err());
    }
}
