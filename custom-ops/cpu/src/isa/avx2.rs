//! x86-64 with AVX2, FMA and F16C: 8 lanes, 16 registers.

use super::{EXP2_FLOOR, EXP2_NEAREST, EXP2_ROUND, Isa, Job, MAX_LANES, exp2_fraction};
use moh_operators::{Element, Float};
use std::arch::asm;
use std::arch::x86_64::*;

/// Exists only if the processor has the features of [`enabled`].
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

macro_rules! simd {
    ($e:expr) => {{
        // SAFETY: `self` proves that the processor has the features.
        unsafe { $e }
    }};
}

#[target_feature(enable = "avx2,fma,f16c")]
fn enabled<J: Job>(isa: Avx2, job: J) -> J::Output {
    job.run(isa)
}

impl Isa for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    const TILE: usize = 2;
    const GROUP: usize = 6;
    const REGISTERS: usize = 16;
    const NAME: &'static str = "avx2";

    fn detect() -> Option<Avx2> {
        let found =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        found.then_some(Avx2(()))
    }
    fn vectorize<J: Job>(self, job: J) -> J::Output {
        simd!(enabled(self, job))
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        simd!(_mm256_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(self, ptr: *const f32) -> __m256 {
        // SAFETY: the caller's contract, and `self`.
        unsafe { _mm256_loadu_ps(ptr) }
    }
    #[inline(always)]
    unsafe fn store(self, ptr: *mut f32, x: __m256) {
        // SAFETY: the caller's contract, and `self`.
        unsafe { _mm256_storeu_ps(ptr, x) }
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        simd!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        simd!(_mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        simd!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        simd!(_mm256_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        simd!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        simd!(_mm256_max_ps(a, b))
    }
    #[inline(always)]
    fn keep_less(self, a: __m256, b: __m256, x: __m256) -> __m256 {
        simd!(_mm256_blendv_ps(_mm256_set1_ps(f32::NEG_INFINITY), x, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)))
    }
    #[inline(always)]
    fn finite_max(self, x: __m256) -> __m256 {
        simd!(_mm256_and_ps(x, _mm256_cmp_ps::<_CMP_NEQ_UQ>(x, _mm256_set1_ps(f32::NEG_INFINITY))))
    }
    #[inline(always)]
    fn exp2(self, x: __m256) -> __m256 {
        simd!({
            let x = self.max(self.splat(EXP2_FLOOR), x);
            let shifted = self.add(x, self.splat(EXP2_ROUND));
            let fraction = self.sub(x, self.sub(shifted, self.splat(EXP2_ROUND)));
            let power = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(shifted)));
            self.mul(exp2_fraction(self, &EXP2_NEAREST, fraction), power)
        })
    }
    #[inline(always)]
    fn sum(self, x: __m256) -> f32 {
        simd!({
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
        })
    }

    #[inline(always)]
    fn prefetch(self, ptr: *const u8) {
        simd!(_mm_prefetch::<_MM_HINT_T1>(ptr.cast()))
    }
    #[inline(always)]
    fn prefetch_output(self, ptr: *const u8) {
        // The intrinsic does not ask for a line to write unless the target has it by name. Where a processor has not, it does nothing.
        // SAFETY: nothing is read or written.
        unsafe { asm!("prefetchw [{}]", in(reg) ptr.addr(), options(nomem, nostack, preserves_flags)) }
    }

    #[inline(always)]
    unsafe fn widen<T: Element>(self, ptr: *const T) -> __m256 {
        // SAFETY: the caller's contract, and `self`; the pointer's type corresponds to FLOAT.
        unsafe {
            match T::FLOAT {
                Float::F32 => _mm256_loadu_ps(ptr.cast()),
                Float::F16 => _mm256_cvtph_ps(_mm_loadu_si128(ptr.cast())),
                Float::BF16 => {
                    let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(ptr.cast()));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn narrow<T: Element>(self, ptr: *mut T, x: __m256) {
        // SAFETY: the caller's contract, and `self`; the pointer's type corresponds to FLOAT.
        unsafe {
            match T::FLOAT {
                Float::F32 => _mm256_storeu_ps(ptr.cast(), x),
                Float::F16 => _mm_storeu_si128(ptr.cast(), _mm256_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(x)),
                Float::BF16 => {
                    let bits = _mm256_castps_si256(x);
                    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
                    let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
                    let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
                    let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
                    let bits = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
                    let (low, high) = (_mm256_castsi256_si128(bits), _mm256_extracti128_si256::<1>(bits));
                    _mm_storeu_si128(ptr.cast(), _mm_packus_epi32(low, high));
                }
            }
        }
    }

    #[inline(always)]
    fn transpose(self, rows: &mut [__m256; MAX_LANES]) {
        // 128-bit lane l of b[q][c] holds column 4l + c of rows 4q .. 4q + 4.
        let mut b = [[self.splat(0.0); 4]; 2];
        for q in 0..2 {
            let r = &rows[4 * q..4 * q + 4];
            simd!({
                let (lo, hi) = (_mm256_unpacklo_ps(r[0], r[1]), _mm256_unpackhi_ps(r[0], r[1]));
                let (lo2, hi2) = (_mm256_unpacklo_ps(r[2], r[3]), _mm256_unpackhi_ps(r[2], r[3]));
                b[q] = [
                    _mm256_shuffle_ps::<0x44>(lo, lo2),
                    _mm256_shuffle_ps::<0xee>(lo, lo2),
                    _mm256_shuffle_ps::<0x44>(hi, hi2),
                    _mm256_shuffle_ps::<0xee>(hi, hi2),
                ];
            });
        }
        for c in 0..4 {
            rows[c] = simd!(_mm256_permute2f128_ps::<0x20>(b[0][c], b[1][c]));
            rows[4 + c] = simd!(_mm256_permute2f128_ps::<0x31>(b[0][c], b[1][c]));
        }
    }

    #[inline(always)]
    fn across(self, r: [__m256; MAX_LANES], both: impl Fn(__m256, __m256) -> __m256) -> __m256 {
        // Each step takes halves of vectors and combines two vectors into one, with half the shuffles of a transposition.
        let zero = self.splat(0.0);
        let (mut pairs, mut fours) = ([zero; 4], [zero; 2]);
        for i in 0..4 {
            let (a, b) = (r[2 * i], r[2 * i + 1]);
            pairs[i] = both(simd!(_mm256_unpacklo_ps(a, b)), simd!(_mm256_unpackhi_ps(a, b)));
        }
        for i in 0..2 {
            let (a, b) = (pairs[2 * i], pairs[2 * i + 1]);
            fours[i] = both(simd!(_mm256_shuffle_ps::<0x44>(a, b)), simd!(_mm256_shuffle_ps::<0xee>(a, b)));
        }
        let [a, b] = fours;
        both(simd!(_mm256_permute2f128_ps::<0x20>(a, b)), simd!(_mm256_permute2f128_ps::<0x31>(a, b)))
    }

    #[inline(always)]
    fn larger_magnitude(self, a: __m256, b: __m256) -> __m256 {
        simd!({
            let magnitude = |x| _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(i32::MAX));
            _mm256_castsi256_ps(_mm256_max_epi32(magnitude(a), magnitude(b)))
        })
    }
}
