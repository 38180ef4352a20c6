//! Peak speed of the processor's multiply-add instructions, for benchmarks.

use crate::isa::{Isa, Job, each_isa, vectors_beside};
use std::time::Instant;

/// GFLOP/s of one thread in multiply-add instructions on the vector registers of `isa` (a value of
/// [`crate::Kernel::isa`]; for a matrix unit, those of its vector instruction set). `None` if the processor does not
/// support it.
pub fn gflops(isa: &str) -> Option<f64> {
    const STEPS: usize = 200_000;
    let isa = vectors_beside(isa).unwrap_or(isa);
    macro_rules! measure {
        ($(#[$cfg:meta] $module:ident::$token:ident,)*) => {
            $(
                #[$cfg]
                if isa == <crate::isa::$module::$token as Isa>::NAME {
                    return <crate::isa::$module::$token as Isa>::detect().map(|token| best(|| token.vectorize(MultiplyAdds(STEPS))));
                }
            )*
        };
    }
    each_isa!(measure);
    None
}

/// GFLOP/s of the fastest of ten runs.
fn best(run: impl Fn() -> usize) -> f64 {
    let rate = |_| {
        let start = Instant::now();
        run() as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    (0..10).map(rate).fold(0.0, f64::max)
}

/// Runs this many steps of multiply-adds in three quarters of the registers; returns the number of floating-point
/// operations.
struct MultiplyAdds(usize);

impl Job for MultiplyAdds {
    type Output = usize;

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> usize {
        if I::REGISTERS >= 32 { sums::<I, 24>(isa, self.0) } else { sums::<I, 12>(isa, self.0) }
    }
}

#[inline(always)]
fn sums<I: Isa, const N: usize>(isa: I, steps: usize) -> usize {
    let x = isa.splat(std::hint::black_box(0.5));
    let mut sums = [x; N];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = isa.fma(*sum, x, x);
        }
    }
    std::hint::black_box(sums.map(|sum| isa.sum(sum)));
    steps * N * I::LANES * 2
}
