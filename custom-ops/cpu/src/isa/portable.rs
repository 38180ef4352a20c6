//! Arrays that the compiler vectorises for the target's baseline; runs on any processor.

use super::{EXP2_FLOOR, EXP2_NEAREST, EXP2_ROUND, Isa, Job, MAX_LANES, exp2_fraction};
use moh_operators::Element;

/// Always available.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

const LANES: usize = 4;

/// A vector.
#[derive(Clone, Copy)]
#[repr(align(16))]
pub(crate) struct F32x4([f32; LANES]);

#[inline(always)]
fn zip(a: F32x4, b: F32x4, f: impl Fn(f32, f32) -> f32) -> F32x4 {
    F32x4(std::array::from_fn(|i| f(a.0[i], b.0[i])))
}

impl Isa for Portable {
    type V = F32x4;
    const LANES: usize = LANES;
    const TILE: usize = 2;
    const GROUP: usize = 4;
    const REGISTERS: usize = 16;
    const NAME: &'static str = "portable";

    fn detect() -> Option<Portable> {
        Some(Portable)
    }
    fn vectorize<J: Job>(self, job: J) -> J::Output {
        job.run(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> F32x4 {
        F32x4([x; LANES])
    }
    #[inline(always)]
    unsafe fn load(self, ptr: *const f32) -> F32x4 {
        // SAFETY: the caller's contract; arrays of f32 have its alignment.
        F32x4(unsafe { ptr.cast::<[f32; LANES]>().read() })
    }
    #[inline(always)]
    unsafe fn store(self, ptr: *mut f32, x: F32x4) {
        // SAFETY: the caller's contract; arrays of f32 have its alignment.
        unsafe { ptr.cast::<[f32; LANES]>().write(x.0) }
    }
    #[inline(always)]
    fn add(self, a: F32x4, b: F32x4) -> F32x4 {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: F32x4, b: F32x4) -> F32x4 {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: F32x4, b: F32x4) -> F32x4 {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: F32x4, b: F32x4) -> F32x4 {
        zip(a, b, |a, b| a / b)
    }
    // Not `mul_add`, which is a C library call on targets without the instruction.
    #[inline(always)]
    fn fma(self, a: F32x4, b: F32x4, c: F32x4) -> F32x4 {
        zip(zip(a, b, |a, b| a * b), c, |ab, c| ab + c)
    }
    #[inline(always)]
    fn max(self, a: F32x4, b: F32x4) -> F32x4 {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn keep_less(self, a: F32x4, b: F32x4, x: F32x4) -> F32x4 {
        let mask = zip(a, b, |a, b| if a < b { 0.0 } else { f32::NEG_INFINITY });
        zip(mask, x, |mask, x| if mask == 0.0 { x } else { mask })
    }
    #[inline(always)]
    fn finite_max(self, x: F32x4) -> F32x4 {
        zip(x, x, |x, _| if x == f32::NEG_INFINITY { 0.0 } else { x })
    }
    #[inline(always)]
    fn exp2(self, x: F32x4) -> F32x4 {
        let x = self.max(self.splat(EXP2_FLOOR), x);
        let shifted = self.add(x, self.splat(EXP2_ROUND));
        let fraction = self.sub(x, self.sub(shifted, self.splat(EXP2_ROUND)));
        let power = zip(shifted, shifted, |s, _| f32::from_bits(s.to_bits() << 23));
        self.mul(exp2_fraction(self, &EXP2_NEAREST, fraction), power)
    }
    #[inline(always)]
    fn sum(self, x: F32x4) -> f32 {
        (x.0[0] + x.0[1]) + (x.0[2] + x.0[3])
    }
    #[inline(always)]
    unsafe fn widen<T: Element>(self, ptr: *const T) -> F32x4 {
        // SAFETY: the caller's contract; arrays have their element's alignment.
        F32x4(unsafe { ptr.cast::<[T; LANES]>().read() }.map(T::to_f32))
    }
    #[inline(always)]
    unsafe fn narrow<T: Element>(self, ptr: *mut T, x: F32x4) {
        // SAFETY: the caller's contract; arrays have their element's alignment.
        unsafe { ptr.cast::<[T; LANES]>().write(x.0.map(T::from_f32)) }
    }
    #[inline(always)]
    fn transpose(self, rows: &mut [F32x4; MAX_LANES]) {
        let old = *rows;
        for i in 0..LANES {
            for j in 0..LANES {
                rows[i].0[j] = old[j].0[i];
            }
        }
    }
}
