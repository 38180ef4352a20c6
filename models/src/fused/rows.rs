//! Rows that threads divide among them.

use rayon::prelude::*;

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

/// `f` with the vector instructions of this processor. It is in one place, so that compilers put it there as a whole.
#[inline(never)]
fn vectorised(f: &impl Fn(usize, &mut [f32]), at: usize, part: &mut [f32]) {
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || f(at, part),
    );
}

/// Sums what `f` adds up over stretches of rows (first, end), each into numbers of its own, in the order of the stretches.
pub(super) fn sum(rows: usize, width: usize, out: &mut [f32], f: impl Fn(usize, usize, &mut [f32]) + Sync) {
    let step = per_task(width);
    let f = |first: usize, sums: &mut [f32]| f(first, rows.min(first + step), sums);
    let part = |i: usize| {
        let mut sums = vec![0f32; out.len()];
        vectorised(&f, i * step, &mut sums);
        sums
    };
    let parts: Vec<Vec<f32>> = (0..rows.div_ceil(step)).into_par_iter().map(part).collect();
    for part in parts {
        for (sum, part) in out.iter_mut().zip(part) {
            *sum += part;
        }
    }
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
