//! Tensors on the CPU as the numbers that they are.

use candle_core::{CpuStorage, Layout, Result, bail};
use rayon::prelude::*;

/// Numbers that a thread takes at a time.
pub(crate) const TASK: usize = 1 << 15;

/// `f` with the vector instructions of this processor.
#[inline(always)]
pub(crate) fn vectorised<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}

/// The sum of the squares, in an order that does not depend on the number of threads.
pub(crate) fn squares(x: &[f32]) -> f64 {
    let part = |x: &[f32]| {
        vectorised(|| {
            let mut sums = [0f64; 8];
            let (chunks, rest) = x.as_chunks::<8>();
            for chunk in chunks {
                sums.iter_mut().zip(chunk).for_each(|(sum, x)| *sum += f64::from(*x) * f64::from(*x));
            }
            sums.iter().sum::<f64>() + rest.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>()
        })
    };
    x.par_chunks(TASK).map(part).collect::<Vec<f64>>().iter().sum()
}

/// The numbers of a contiguous tensor in float32.
pub(crate) fn of<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    let Some((start, end)) = layout.contiguous_offsets() else { bail!("a tensor that is not contiguous") };
    match storage {
        CpuStorage::F32(numbers) => Ok(&numbers[start..end]),
        _ => bail!("a tensor that is not in float32"),
    }
}

/// As [`of`], to be changed.
pub(crate) fn of_mut<'a>(storage: &'a mut CpuStorage, layout: &Layout) -> Result<&'a mut [f32]> {
    let Some((start, end)) = layout.contiguous_offsets() else { bail!("a tensor that is not contiguous") };
    match storage {
        CpuStorage::F32(numbers) => Ok(&mut numbers[start..end]),
        _ => bail!("a tensor that is not in float32"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_of_all_numbers_are_added() {
        for count in [0, 1, 7, 8, 9, 1000, TASK - 1, TASK + 3, 3 * TASK + 5] {
            let x: Vec<f32> = (0..count).map(|i| (i % 5) as f32).collect();
            let expected: f64 = x.iter().map(|x| f64::from(x * x)).sum();
            assert_eq!(squares(&x), expected, "{count}");
        }
    }
}
