//! Rows that threads divide among them.

use rayon::prelude::*;
use std::mem::MaybeUninit;

/// Numbers that are worth a task.
const TASK: usize = 1 << 15;

/// Rows of `width` in a task.
pub(super) fn per_task(width: usize) -> usize {
    TASK.div_ceil(width.max(1)).max(1)
}

/// Calls `f` with the index of a stretch's first row and the stretch of `out`, whose rows have `width` numbers.
pub(super) fn each(out: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    if out.is_empty() {
        return;
    }
    let rows = per_task(width);
    match out.len() <= rows * width {
        true => vectorised(&f, 0, out),
        false => out.par_chunks_mut(rows * width).enumerate().for_each(|(i, part)| vectorised(&f, i * rows, part)),
    }
}

/// `count` numbers: what `f` makes of rows of `width` zeros, as in [`each`].
pub(super) fn made(count: usize, width: usize, f: impl Fn(usize, &mut [f32]) + Sync) -> Vec<f32> {
    made_of(count, width, per_task(width), f)
}

/// The same with so many rows in a task: few where a row is much work.
///
/// A task writes its zeros itself: threads share that, too, and the zeros are in the cache of who needs them.
#[allow(unsafe_code)]
pub(super) fn made_of(count: usize, width: usize, rows: usize, f: impl Fn(usize, &mut [f32]) + Sync) -> Vec<f32> {
    if count == 0 {
        return Vec::new();
    }
    let mut out = Vec::with_capacity(count);
    let task = |(i, part): (usize, &mut [MaybeUninit<f32>])| {
        part.fill(MaybeUninit::new(0.0));
        // SAFETY: these numbers were written just now.
        let part = unsafe { std::slice::from_raw_parts_mut(part.as_mut_ptr().cast::<f32>(), part.len()) };
        vectorised(&f, i * rows, part);
    };
    let room = &mut out.spare_capacity_mut()[..count];
    match count <= rows * width {
        true => task((0, room)),
        false => room.par_chunks_mut(rows * width).enumerate().for_each(task),
    }
    // SAFETY: the tasks have written that many numbers.
    unsafe { out.set_len(count) };
    out
}

/// `f` with the vector instructions of this processor. It is in one place, so that compilers put it there as a whole.
#[inline(never)]
fn vectorised(f: &impl Fn(usize, &mut [f32]), at: usize, part: &mut [f32]) {
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || f(at, part),
    );
}

/// `count` sums of what `f` adds up over stretches of rows (first, end), each into numbers of its own, in the order of the stretches.
pub(super) fn sum(rows: usize, width: usize, count: usize, f: impl Fn(usize, usize, &mut [f32]) + Sync) -> Vec<f32> {
    let step = per_task(width);
    let f = |first: usize, sums: &mut [f32]| f(first, rows.min(first + step), sums);
    let part = |i: usize| {
        let mut sums = vec![0f32; count];
        vectorised(&f, i * step, &mut sums);
        sums
    };
    let mut parts = (0..rows.div_ceil(step)).into_par_iter().map(part).collect::<Vec<_>>().into_iter();
    let mut sums = parts.next().unwrap_or_else(|| vec![0f32; count]);
    for part in parts {
        sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
    }
    sums
}

/// e^x to 2 units in the last place, for compilers to vectorise: 0 or infinity beyond float32's exponents are not needed, x is bounded.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // The nearest integer to x / ln 2, as the last bits of a number near 1.5 * 2^23.
    const MAGIC: f32 = 12_582_912.0;
    let x = x.clamp(-87.0, 88.0);
    let shifted = x * std::f32::consts::LOG2_E + MAGIC;
    let n = shifted - MAGIC;
    // ln 2 in two parts, the first with few digits.
    let r = (x - n * 0.693_359_4) + n * 2.121_944_4e-4;
    let p =
        1.0 + r * (1.0 + r * (0.5 + r * (0.166_666_55 + r * (0.041_665_795 + r * (0.008_333_91 + r * 0.001_392_6)))));
    p * f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0f32.to_bits()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials() {
        for i in -8600..8700 {
            let x = i as f32 / 100.0;
            let expected = f64::from(x).exp();
            assert!((f64::from(exp(x)) / expected - 1.0).abs() < 4e-7, "{x}: {} {expected}", exp(x));
        }
    }
}
