//! Tensors on the CPU as the numbers that they are.

use candle_core::{CpuStorage, Layout, Result, bail};

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
