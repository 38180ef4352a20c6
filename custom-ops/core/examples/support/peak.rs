//! The speed of the processor's multiply-add instructions.

use std::time::Instant;

/// GFLOP/s of one thread in multiply-add instructions on registers.
pub(crate) fn peak(isa: &str) -> f64 {
    const STEPS: usize = 200_000;
    let mut best = f64::MAX;
    let mut flops = 0;
    for _ in 0..10 {
        let start = Instant::now();
        flops = match isa {
            // SAFETY: the kernel of that name is supported, and so are the instructions.
            #[cfg(target_arch = "x86_64")]
            "avx512" | "avx512bf16" | "amx" => unsafe { fma_avx512(STEPS) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            "avx2" => unsafe { fma_avx2(STEPS) },
            _ => fma_portable(STEPS),
        };
        best = best.min(start.elapsed().as_secs_f64());
    }
    flops as f64 / best / 1e9
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn fma_avx512(steps: usize) -> usize {
    use std::arch::x86_64::*;
    let x = _mm512_set1_ps(std::hint::black_box(0.5));
    let mut sums = [x; 24];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(*sum, x, x);
        }
    }
    std::hint::black_box(sums);
    steps * sums.len() * 32
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn fma_avx2(steps: usize) -> usize {
    use std::arch::x86_64::*;
    let x = _mm256_set1_ps(std::hint::black_box(0.5));
    let mut sums = [x; 12];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm256_fmadd_ps(*sum, x, x);
        }
    }
    std::hint::black_box(sums);
    steps * sums.len() * 16
}

/// What the target's baseline instructions do: fused where it has that, as AArch64 does.
fn fma_portable(steps: usize) -> usize {
    let x = std::hint::black_box(0.5f32);
    let mut sums = [[x; 4]; 12];
    for _ in 0..steps {
        for sum in &mut sums {
            for lane in sum {
                *lane = if cfg!(target_arch = "aarch64") { lane.mul_add(x, x) } else { *lane * x + x };
            }
        }
    }
    std::hint::black_box(sums);
    steps * sums.len() * 8
}
