//! The integers, scale and zero point of one block: those with the least squared error among candidates.
//!
//! For given integers q the best scale is sum(x q) / sum(q q), and what it leaves of sum(x x) is sum(x x) - sum(x q)^2 / sum(q q).
//! So a candidate is judged by two sums, without its scale. Loops have a fixed number of partial sums: vectorised, they give the
//! same result as if they were not.

use super::Bits;
use crate::graph::ElementType;
use half::f16;

/// Partial sums of a loop; every block has a multiple of so many numbers.
const LANES: usize = 16;

/// The largest block.
const MAX_BLOCK: usize = 256;

/// What blocks are quantised to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Grid {
    pub(crate) bits: Bits,
    pub(crate) zero_points: bool,
    /// Whether integers use the middle half of the range only.
    pub(crate) reduce_range: bool,
    /// The type of scales.
    pub(crate) scale: ElementType,
}

/// One block as stored.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Block {
    /// As the scale's type holds it.
    pub(crate) scale: f32,
    pub(crate) zero_point: u8,
    /// Sum of the squared errors, and of the squared numbers.
    pub(crate) error: f64,
    pub(crate) squares: f64,
}

/// How numbers become integers: times `inverse`, rounded, and bounded.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    inverse: f32,
    low: f32,
    high: f32,
}

impl Grid {
    /// The zero point of blocks that have none.
    pub(crate) fn middle(self) -> u8 {
        1 << (self.bits.count() - 1)
    }

    /// The first of the integers that blocks may use, and how many there are.
    fn range(self) -> (u8, u16) {
        let all = 1u16 << self.bits.count();
        if self.reduce_range { ((all / 4) as u8, all / 2) } else { (0, all) }
    }

    /// Quantises a block: its integers, counted from 0, go to `codes`.
    pub(crate) fn quantize(self, values: &[f32], codes: &mut [u8]) -> Block {
        let largest = values.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        if largest < f32::MIN_POSITIVE {
            codes.fill(self.middle());
            return Block { scale: 1.0, zero_point: self.middle(), error: 0.0, squares: 0.0 };
        }
        // Between -1 and 1, so that no sum overflows.
        let mut scaled = [0f32; MAX_BLOCK];
        let scaled = &mut scaled[..values.len()];
        for (scaled, x) in scaled.iter_mut().zip(values) {
            *scaled = x / largest;
        }
        let best = self.best(scaled);
        let (first, _) = self.range();
        let zero_point = first + (-best.low) as u8;
        let scale = self.refined(scaled, best, largest);
        let inverse = if scale == 0.0 { 0.0 } else { largest / scale };
        let last = Candidate { inverse, ..best };
        for (code, x) in codes.iter_mut().zip(&*scaled) {
            *code = first + (last.integer(*x) - best.low) as u8;
        }
        let scale = if scale == 0.0 { 1.0 } else { scale };
        let (error, squares) = errors(scaled, last, scale / largest);
        let unit = f64::from(largest) * f64::from(largest);
        Block { scale, zero_point, error: error * unit, squares: squares * unit }
    }

    /// The candidate that leaves the least error.
    fn best(self, values: &[f32]) -> Candidate {
        let (mut best, mut least) = (Candidate { inverse: 0.0, low: 0.0, high: 0.0 }, f32::NEG_INFINITY);
        self.candidates(values, |candidate| {
            let gain = candidate.gain(values);
            if gain > least {
                (best, least) = (candidate, gain);
            }
        });
        best
    }

    fn candidates(self, values: &[f32], mut try_one: impl FnMut(Candidate)) {
        let (min, max) = values.iter().fold((0f32, 0f32), |(min, max), &x| (min.min(x), max.max(x)));
        let (first, count) = self.range();
        let levels = f32::from(count) - 1.0;
        if !self.zero_points {
            // The number of the largest magnitude gets the end of the range that reaches farther, or the other one.
            let extreme = if max > -min { max } else { min };
            let low = f32::from(first) - f32::from(self.middle());
            let high = low + levels;
            for &step in self.steps() {
                try_one(Candidate { inverse: (low - step) / extreme, low, high });
                try_one(Candidate { inverse: (high + step) / extreme, low, high });
            }
            return;
        }
        let middle = (max + min) / 2.0;
        for &step in self.steps() {
            let inverse = (levels + 2.0 * step) / (max - min);
            let zero = (levels / 2.0 - middle * inverse).floor();
            for zero in [zero, zero + 1.0] {
                let zero = zero.clamp(0.0, levels);
                try_one(Candidate { inverse, low: -zero, high: levels - zero });
            }
        }
    }

    /// How far beyond the end of the range the largest number may come to lie, in integers.
    fn steps(self) -> &'static [f32] {
        match self.bits {
            Bits::Int4 => &[-1.2, -0.9, -0.6, -0.4, -0.2, 0.0, 0.2, 0.4, 0.6, 0.9, 1.2, 1.6, 2.0],
            Bits::Int8 => &[-0.4, -0.2, 0.0, 0.2, 0.4],
        }
    }

    /// The best scale of a candidate's integers, and then of the integers that follow from that scale, as the scale's type holds it.
    fn refined(self, values: &[f32], candidate: Candidate, unit: f32) -> f32 {
        let mut scale = candidate.scale(values);
        if scale != 0.0 {
            let again = Candidate { inverse: 1.0 / scale, ..candidate };
            scale = again.scale(values);
        }
        let scale = scale * unit;
        match self.scale {
            ElementType::F16 => in_f16(values, candidate, scale, unit),
            _ => scale,
        }
    }
}

/// A float16 number in the place of `scale`, of numbers that are `unit` times `values`.
fn in_f16(values: &[f32], candidate: Candidate, scale: f32, unit: f32) -> f32 {
    let of = |bits: u16| f16::from_bits(bits).to_f32().copysign(scale);
    let with = |scale: f32| Candidate { inverse: if scale == 0.0 { 0.0 } else { unit / scale }, ..candidate };
    let nearest = f16::from_f32(scale.abs());
    let mut bits = nearest.to_bits();
    if nearest < f16::MIN_POSITIVE {
        // These are so far apart that a scale which is a little too small cuts the largest numbers off, and 0 all of them.
        let below = if nearest.to_f32() > scale.abs() { bits - 1 } else { bits };
        let left = |bits: &u16| errors(values, with(of(*bits)), of(*bits) / unit).0;
        let [a, b] = [below, below + 1];
        bits = if left(&b) < left(&a) { b } else { a };
    }
    // What the block stands for has to be a number of float16, too.
    let largest = |bits: u16| {
        let (scale, by) = (of(bits), with(of(bits)));
        values.iter().map(|&x| (by.integer(x) * scale).abs()).fold(0.0, f32::max)
    };
    while bits > 0 && !f16::from_f32(largest(bits)).is_finite() {
        bits -= 1;
    }
    of(bits)
}

/// To the nearest, and of two equally near ones to the even one; for magnitudes below 2^22.
fn round(x: f32) -> f32 {
    // Numbers from here on have no fraction.
    const WHOLE: f32 = (3 << 22) as f32;
    (x + WHOLE) - WHOLE
}

impl Candidate {
    fn integer(self, x: f32) -> f32 {
        round((x * self.inverse).clamp(self.low, self.high))
    }

    /// The sums of x q and of q q.
    fn sums(self, values: &[f32]) -> (f32, f32) {
        let (mut xq, mut qq) = ([0f32; LANES], [0f32; LANES]);
        for values in values.as_chunks::<LANES>().0 {
            for lane in 0..LANES {
                let q = self.integer(values[lane]);
                xq[lane] += values[lane] * q;
                qq[lane] += q * q;
            }
        }
        (sum(xq), sum(qq))
    }

    /// How much of the squares its best scale explains.
    fn gain(self, values: &[f32]) -> f32 {
        let (xq, qq) = self.sums(values);
        if qq > 0.0 { xq * xq / qq } else { 0.0 }
    }

    /// Its best scale; 0 where all integers are 0.
    fn scale(self, values: &[f32]) -> f32 {
        let (xq, qq) = self.sums(values);
        if qq > 0.0 { xq / qq } else { 0.0 }
    }
}

/// The sum of partial sums, in halves.
fn sum(lanes: [f32; LANES]) -> f32 {
    let mut sums = lanes;
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            sums[lane] += sums[lane + half];
        }
        half /= 2;
    }
    sums[0]
}

/// The sums of the squared errors and of the squares.
fn errors(values: &[f32], candidate: Candidate, scale: f32) -> (f64, f64) {
    let (mut errors, mut squares) = ([0f32; LANES], [0f32; LANES]);
    for values in values.as_chunks::<LANES>().0 {
        for lane in 0..LANES {
            let error = values[lane] - candidate.integer(values[lane]) * scale;
            errors[lane] += error * error;
            squares[lane] += values[lane] * values[lane];
        }
    }
    (f64::from(sum(errors)), f64::from(sum(squares)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(seed: u64, count: usize) -> Vec<f32> {
        let mut state = seed;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 24) as f32
        };
        // Nearly normal.
        (0..count).map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0).collect()
    }

    fn grid(bits: Bits, zero_points: bool) -> Grid {
        Grid { bits, zero_points, reduce_range: false, scale: ElementType::F32 }
    }

    /// What the stored block stands for, by the definition of the format.
    fn dequantized(block: Block, codes: &[u8]) -> Vec<f64> {
        codes.iter().map(|&q| (f64::from(q) - f64::from(block.zero_point)) * f64::from(block.scale)).collect()
    }

    fn error(values: &[f32], found: &[f64]) -> f64 {
        values.iter().zip(found).map(|(x, y)| (f64::from(*x) - y).powi(2)).sum()
    }

    /// Symmetric 4-bit blocks as they are without a search: the largest magnitude is the end of the range.
    fn plain(values: &[f32]) -> f64 {
        let extreme = values.iter().fold(0f32, |m, x| if x.abs() > m.abs() { *x } else { m });
        let scale = f64::from(extreme) / -8.0;
        let found: Vec<f64> = values.iter().map(|x| (f64::from(*x) / scale).round().clamp(-8.0, 7.0) * scale).collect();
        error(values, &found)
    }

    #[test]
    fn the_error_is_that_of_the_stored_numbers() {
        for bits in [Bits::Int4, Bits::Int8] {
            for zero_points in [false, true] {
                let values = numbers(3, 64);
                let mut codes = vec![0; 64];
                let block = grid(bits, zero_points).quantize(&values, &mut codes);
                let found = error(&values, &dequantized(block, &codes));
                assert!((found / block.error - 1.0).abs() < 1e-3, "{found} {block:?}");
                assert!(codes.iter().all(|q| usize::from(*q) < 1 << bits.count()));
                assert!(zero_points || block.zero_point == 1 << (bits.count() - 1));
            }
        }
    }

    /// Half as many integers, so twice the error; the zero point of symmetric blocks stays.
    #[test]
    fn a_reduced_range() {
        for zero_points in [false, true] {
            let (mut reduced, mut whole) = (0.0, 0.0);
            for seed in 0..50 {
                let values = numbers(seed, 32);
                let mut codes = vec![0; 32];
                let block = Grid { reduce_range: true, ..grid(Bits::Int8, zero_points) }.quantize(&values, &mut codes);
                assert!(codes.iter().all(|code| (64..192).contains(code)), "{codes:?}");
                assert!(zero_points || block.zero_point == 128, "{block:?}");
                let found = error(&values, &dequantized(block, &codes));
                assert!((found / block.error - 1.0).abs() < 1e-3, "{found} {block:?}");
                reduced += found;
                whole += grid(Bits::Int8, zero_points).quantize(&values, &mut codes).error;
            }
            let times = (reduced / whole).sqrt();
            assert!((1.8..2.2).contains(&times), "{times}");
        }
    }

    #[test]
    fn a_search_leaves_less() {
        let (mut searched, mut simple, mut asymmetric) = (0.0, 0.0, 0.0);
        for seed in 0..200 {
            let values = numbers(seed, 32);
            let mut codes = vec![0; 32];
            searched += grid(Bits::Int4, false).quantize(&values, &mut codes).error;
            asymmetric += grid(Bits::Int4, true).quantize(&values, &mut codes).error;
            simple += plain(&values);
        }
        assert!(searched < 0.9 * simple, "{searched} {simple}");
        assert!(asymmetric < searched, "{asymmetric} {searched}");
    }

    /// No scale of a fine grid does much better.
    #[test]
    fn near_the_best_of_all_scales() {
        let (mut found, mut best) = (0.0, 0.0);
        for seed in 0..40 {
            let values = numbers(seed, 32);
            let extreme = f64::from(values.iter().fold(0f32, |m, x| m.max(x.abs())));
            let of = |scale: f64| {
                let q = |x: &f32| (f64::from(*x) / scale).round().clamp(-8.0, 7.0) * scale;
                error(&values, &values.iter().map(q).collect::<Vec<_>>())
            };
            let scales = (400..1300).flat_map(|i| [extreme / f64::from(i) * 100.0, -extreme / f64::from(i) * 100.0]);
            best += scales.map(of).fold(f64::INFINITY, f64::min);
            let mut codes = vec![0; 32];
            found += grid(Bits::Int4, false).quantize(&values, &mut codes).error;
        }
        assert!(found < 1.05 * best, "{found} {best}");
    }

    #[test]
    fn extreme_numbers() {
        for (bits, zero_points) in [(Bits::Int4, false), (Bits::Int4, true), (Bits::Int8, false), (Bits::Int8, true)] {
            for scale in [ElementType::F32, ElementType::F16] {
                let grid = Grid { bits, zero_points, reduce_range: false, scale };
                for value in [0.0f32, 1e-45, 1e-39, 1e-30, -1.0, 6e4, 3e38, -3.4e38] {
                    if scale == ElementType::F16 && value.abs() > 65504.0 {
                        continue;
                    }
                    let mut values = vec![value; 16];
                    values[3] = 0.0;
                    let mut codes = vec![0; 16];
                    let block = grid.quantize(&values, &mut codes);
                    assert!(block.scale.is_finite(), "{value} {block:?}");
                    let found = dequantized(block, &codes);
                    assert_eq!(found[3], 0.0, "{value} {block:?}");
                    let allowed =
                        f64::from(value).abs() / 100.0 + if scale == ElementType::F16 { 2.5e-7 } else { 1e-38 };
                    assert!((found[0] - f64::from(value)).abs() <= allowed, "{value} {block:?} {}", found[0]);
                }
            }
        }
    }

    /// Of scales between which float16 has no others.
    #[test]
    fn small_numbers_with_scales_in_float16() {
        const SPACING: f64 = 5.960_464_5e-8;
        for zero_points in [false, true] {
            let grid = Grid { scale: ElementType::F16, ..grid(Bits::Int8, zero_points) };
            for magnitude in [1e-6f32, 2e-6, 3.5e-6, 5e-6, 1e-5, 3e-5, 1e-4, 1e-3] {
                let (mut left, mut most) = (0.0, 0f32);
                for seed in 0..20 {
                    let values: Vec<f32> = numbers(seed, 32).iter().map(|x| x * magnitude / 3.0).collect();
                    let mut codes = vec![0; 32];
                    let block = grid.quantize(&values, &mut codes);
                    left += error(&values, &dequantized(block, &codes)) / (20.0 * 32.0);
                    most = values.iter().fold(most, |most, x| most.max(x.abs()));
                }
                let allowed = 0.35 * (f64::from(most) / 127.0 + SPACING);
                assert!(left.sqrt() <= allowed, "{magnitude}: {}, expected {allowed}", left.sqrt());
            }
        }
    }

    /// What a block stands for is a number of float16 if the weights are.
    #[test]
    fn large_numbers_stay_in_float16() {
        for (bits, zero_points) in [(Bits::Int4, false), (Bits::Int4, true), (Bits::Int8, false), (Bits::Int8, true)] {
            let grid = Grid { scale: ElementType::F16, ..grid(bits, zero_points) };
            for seed in 0..50 {
                let values = numbers(seed, 32);
                let most = values.iter().fold(0f32, |most, x| most.max(x.abs()));
                let values: Vec<f32> = values.iter().map(|x| x / most * 65504.0).collect();
                let mut codes = vec![0; 32];
                let block = grid.quantize(&values, &mut codes);
                let found = dequantized(block, &codes);
                assert!(found.iter().all(|x| x.abs() < 65520.0), "{bits:?}: {found:?}");
            }
        }
    }

    /// All numbers far from 0, on one side of it.
    #[test]
    fn numbers_of_one_sign() {
        let values: Vec<f32> = (0..32).map(|i| 3.0 + i as f32 / 32.0).collect();
        let mut codes = vec![0; 32];
        let block = grid(Bits::Int4, true).quantize(&values, &mut codes);
        assert!(block.error < 32.0 * 0.3f64.powi(2) / 3.0, "{block:?}");
    }
}
