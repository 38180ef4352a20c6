//! aarch64: 4 words. [`words_of_128_bits`] is shared with the dot products.

use super::{ByteDot, DotJob, Never};
use crate::isa::neon::Neon;
use crate::isa::{Isa, MAX_LANES};
use std::arch::aarch64::*;

/// Every aarch64 processor has these instructions.
#[derive(Clone, Copy)]
pub(crate) struct NeonMultiply(Neon);

/// Implements [`ByteDot`] on 128-bit registers for a token that holds [`Neon`]'s; `dot` adds the products of signed bytes.
macro_rules! words_of_128_bits {
    ($token:ident, $name:literal, $features:literal, $found:expr, dot($sum:ident, $w:ident, $x:ident): $dot:expr $(,)?) => {
        macro_rules! simd {
            ($e:expr) => {{
                // SAFETY: `self` proves that the processor has the features.
                unsafe { $e }
            }};
        }

        #[target_feature(enable = $features)]
        fn enabled<J: DotJob>(dot: $token, job: J) -> J::Output {
            job.run(dot)
        }

        impl $token {
            #[inline(always)]
            fn dot(self, $sum: uint32x4_t, $w: int8x16_t, $x: int8x16_t) -> uint32x4_t {
                simd!($dot)
            }
        }

        impl ByteDot for $token {
            type Vectors = Neon;
            type W = uint32x4_t;
            type Parts = Never;
            const NAME: &'static str = $name;
            const SUBTRACTED: [u8; 2] = [0, 128];

            fn detect() -> Option<$token> {
                let vectors = Neon::detect()?;
                $found.then_some($token(vectors))
            }
            #[inline(always)]
            fn vectors(self) -> Neon {
                self.0
            }
            fn vectorize<J: DotJob>(self, job: J) -> J::Output {
                simd!(enabled(self, job))
            }

            #[inline(always)]
            fn zero(self) -> uint32x4_t {
                simd!(vdupq_n_u32(0))
            }
            #[inline(always)]
            unsafe fn load(self, ptr: *const u8) -> uint32x4_t {
                // SAFETY: the caller's contract, and `self`.
                unsafe { vreinterpretq_u32_u8(vld1q_u8(ptr)) }
            }
            #[inline(always)]
            unsafe fn broadcast(self, ptr: *const u8) -> uint32x4_t {
                // SAFETY: the caller's contract, and `self`.
                unsafe { vdupq_n_u32(ptr.cast::<u32>().read_unaligned()) }
            }
            #[inline(always)]
            fn as_floats(self, words: uint32x4_t) -> float32x4_t {
                simd!(vreinterpretq_f32_u32(words))
            }
            #[inline(always)]
            fn as_words(self, x: float32x4_t) -> uint32x4_t {
                simd!(vreinterpretq_u32_f32(x))
            }

            #[inline(always)]
            fn low(self, words: uint32x4_t) -> uint32x4_t {
                simd!(vandq_u32(words, vdupq_n_u32(0x0f0f_0f0f)))
            }
            #[inline(always)]
            fn high(self, words: uint32x4_t) -> uint32x4_t {
                simd!(vreinterpretq_u32_u8(vshrq_n_u8::<4>(vreinterpretq_u8_u32(words))))
            }
            #[inline(always)]
            fn dot4(self, sum: uint32x4_t, w: uint32x4_t, x: uint32x4_t) -> uint32x4_t {
                simd!(self.dot(sum, vreinterpretq_s8_u32(w), vreinterpretq_s8_u32(x)))
            }
            #[inline(always)]
            fn dot8(self, sum: uint32x4_t, w: uint32x4_t, x: uint32x4_t) -> uint32x4_t {
                simd!({
                    let w = veorq_u32(w, vdupq_n_u32(0x8080_8080));
                    self.dot(sum, vreinterpretq_s8_u32(w), vreinterpretq_s8_u32(x))
                })
            }
            #[inline(always)]
            fn to_float(self, words: uint32x4_t) -> float32x4_t {
                simd!(vcvtq_f32_s32(vreinterpretq_s32_u32(words)))
            }
            #[inline(always)]
            fn nibble<const INDEX: usize>(self, words: uint32x4_t) -> float32x4_t {
                simd!({
                    let shifted = vshlq_u32(words, vdupq_n_s32(-4 * INDEX as i32));
                    vsubq_f32(vcvtq_f32_u32(vandq_u32(shifted, vdupq_n_u32(15))), vdupq_n_f32(8.0))
                })
            }
            #[inline(always)]
            fn byte<const INDEX: usize>(self, words: uint32x4_t) -> float32x4_t {
                simd!({
                    let shifted = vshlq_u32(words, vdupq_n_s32(-8 * INDEX as i32));
                    vsubq_f32(vcvtq_f32_u32(vandq_u32(shifted, vdupq_n_u32(255))), vdupq_n_f32(128.0))
                })
            }

            #[inline(always)]
            fn indices(self, lanes: &[u32; MAX_LANES]) -> uint32x4_t {
                // The table lookup of `spread` takes the indices of bytes.
                let bytes: [u8; 16] = std::array::from_fn(|i| (4 * lanes[i / 4] + i as u32 % 4) as u8);
                // SAFETY: the array holds a vector; `self`.
                unsafe { vreinterpretq_u32_u8(vld1q_u8(bytes.as_ptr())) }
            }
            #[inline(always)]
            fn spread(self, x: float32x4_t, indices: uint32x4_t) -> float32x4_t {
                simd!(vreinterpretq_f32_u8(vqtbl1q_u8(vreinterpretq_u8_f32(x), vreinterpretq_u8_u32(indices))))
            }
        }
    };
}
pub(super) use words_of_128_bits;

words_of_128_bits!(
    NeonMultiply,
    "neon",
    "neon",
    true,
    dot(sum, w, x): {
        // A product is at most 128 * 127, and a sum of two fits 16 bits.
        let low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)));
        let high = vpaddlq_s16(vmull_high_s8(w, x));
        vaddq_u32(sum, vreinterpretq_u32_s32(vpaddq_s32(low, high)))
    },
);
