//! AArch64: 4 lanes, 32 registers.

use super::{EXP2_FLOOR, EXP2_NEAREST, EXP2_ROUND, Isa, Job, MAX_LANES, exp2_fraction};
use moh_operators::{Element, Float};
use std::arch::aarch64::*;
use std::arch::asm;

/// NEON is part of the target's baseline, so this token always exists. Half-precision conversions use inline assembly,
/// because their intrinsics are newer than the workspace's `rust-version`.
#[derive(Clone, Copy)]
pub(crate) struct Neon(());

macro_rules! simd {
    ($e:expr) => {{
        // SAFETY: every AArch64 processor that this target runs on has NEON.
        unsafe { $e }
    }};
}

impl Isa for Neon {
    type V = float32x4_t;
    const LANES: usize = 4;
    const TILE: usize = 3;
    const GROUP: usize = 8;
    const REGISTERS: usize = 32;
    const NAME: &'static str = "neon";

    fn detect() -> Option<Neon> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Neon(()))
    }
    fn vectorize<J: Job>(self, job: J) -> J::Output {
        job.run(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> float32x4_t {
        simd!(vdupq_n_f32(x))
    }
    #[inline(always)]
    unsafe fn load(self, ptr: *const f32) -> float32x4_t {
        // SAFETY: the caller's contract.
        unsafe { vld1q_f32(ptr) }
    }
    #[inline(always)]
    unsafe fn store(self, ptr: *mut f32, x: float32x4_t) {
        // SAFETY: the caller's contract.
        unsafe { vst1q_f32(ptr, x) }
    }
    #[inline(always)]
    fn add(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        simd!(vaddq_f32(a, b))
    }
    #[inline(always)]
    fn sub(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        simd!(vsubq_f32(a, b))
    }
    #[inline(always)]
    fn mul(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        simd!(vmulq_f32(a, b))
    }
    #[inline(always)]
    fn div(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        simd!(vdivq_f32(a, b))
    }
    #[inline(always)]
    fn fma(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        simd!(vfmaq_f32(c, a, b))
    }
    #[inline(always)]
    fn max(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        simd!(vbslq_f32(vcgtq_f32(a, b), a, b))
    }
    #[inline(always)]
    fn keep_less(self, a: float32x4_t, b: float32x4_t, x: float32x4_t) -> float32x4_t {
        simd!(vbslq_f32(vcltq_f32(a, b), x, vdupq_n_f32(f32::NEG_INFINITY)))
    }
    #[inline(always)]
    fn finite_max(self, x: float32x4_t) -> float32x4_t {
        simd!(vbslq_f32(vceqq_f32(x, vdupq_n_f32(f32::NEG_INFINITY)), vdupq_n_f32(0.0), x))
    }
    #[inline(always)]
    fn exp2(self, x: float32x4_t) -> float32x4_t {
        simd!({
            let x = self.max(self.splat(EXP2_FLOOR), x);
            let shifted = self.add(x, self.splat(EXP2_ROUND));
            let fraction = self.sub(x, self.sub(shifted, self.splat(EXP2_ROUND)));
            let power = vreinterpretq_f32_s32(vshlq_n_s32::<23>(vreinterpretq_s32_f32(shifted)));
            self.mul(exp2_fraction(self, &EXP2_NEAREST, fraction), power)
        })
    }
    #[inline(always)]
    fn sum(self, x: float32x4_t) -> f32 {
        simd!(vaddvq_f32(x))
    }

    #[inline(always)]
    unsafe fn widen<T: Element>(self, ptr: *const T) -> float32x4_t {
        // SAFETY: the caller's contract; the pointer's type corresponds to FLOAT.
        unsafe {
            match T::FLOAT {
                Float::F32 => vld1q_f32(ptr.cast()),
                Float::BF16 => vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(ptr.cast()))),
                Float::F16 => {
                    let wide: float32x4_t;
                    let narrow = vld1_u16(ptr.cast());
                    asm!(
                        "fcvtl {wide:v}.4s, {narrow:v}.4h",
                        wide = out(vreg) wide,
                        narrow = in(vreg) narrow,
                        options(pure, nomem, nostack, preserves_flags)
                    );
                    wide
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn narrow<T: Element>(self, ptr: *mut T, x: float32x4_t) {
        // SAFETY: the caller's contract; the pointer's type corresponds to FLOAT.
        unsafe {
            match T::FLOAT {
                Float::F32 => vst1q_f32(ptr.cast(), x),
                Float::F16 => {
                    let narrow: uint16x4_t;
                    asm!(
                        "fcvtn {narrow:v}.4h, {wide:v}.4s",
                        narrow = out(vreg) narrow,
                        wide = in(vreg) x,
                        options(pure, nomem, nostack, preserves_flags)
                    );
                    vst1_u16(ptr.cast(), narrow);
                }
                Float::BF16 => {
                    let bits = vreinterpretq_u32_f32(x);
                    let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
                    let rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
                    let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
                    let bits = vbslq_u32(vceqq_f32(x, x), rounded, quiet);
                    vst1_u16(ptr.cast(), vshrn_n_u32::<16>(bits));
                }
            }
        }
    }

    #[inline(always)]
    fn larger_magnitude(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        simd!({
            let magnitude = |x| vreinterpretq_u32_f32(vabsq_f32(x));
            vreinterpretq_f32_u32(vmaxq_u32(magnitude(a), magnitude(b)))
        })
    }

    #[inline(always)]
    fn transpose(self, rows: &mut [float32x4_t; MAX_LANES]) {
        simd!({
            let d = |x| vreinterpretq_f64_f32(x);
            let (a, b) = (vtrn1q_f32(rows[0], rows[1]), vtrn2q_f32(rows[0], rows[1]));
            let (a2, b2) = (vtrn1q_f32(rows[2], rows[3]), vtrn2q_f32(rows[2], rows[3]));
            rows[0] = vreinterpretq_f32_f64(vtrn1q_f64(d(a), d(a2)));
            rows[1] = vreinterpretq_f32_f64(vtrn1q_f64(d(b), d(b2)));
            rows[2] = vreinterpretq_f32_f64(vtrn2q_f64(d(a), d(a2)));
            rows[3] = vreinterpretq_f32_f64(vtrn2q_f64(d(b), d(b2)));
        });
    }
}
