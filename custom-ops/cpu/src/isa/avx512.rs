//! x86-64 with AVX-512 (F, BW, DQ, VL): 16 lanes, 32 registers.

use super::{EXP2, Isa, Job, MAX_LANES, exp2_fraction};
use moh_operators::{Element, Float};
use std::arch::asm;
use std::arch::x86_64::*;

/// Exists only if the processor has the features of [`enabled`].
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

macro_rules! simd {
    ($e:expr) => {{
        // SAFETY: `self` proves that the processor has the features.
        unsafe { $e }
    }};
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn enabled<J: Job>(isa: Avx512, job: J) -> J::Output {
    job.run(isa)
}

impl Isa for Avx512 {
    type V = __m512;
    const LANES: usize = 16;
    const TILE: usize = 3;
    const GROUP: usize = 8;
    const REGISTERS: usize = 32;
    const NAME: &'static str = "avx512";

    fn detect() -> Option<Avx512> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Avx512(()))
    }
    fn vectorize<J: Job>(self, job: J) -> J::Output {
        simd!(enabled(self, job))
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        simd!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(self, ptr: *const f32) -> __m512 {
        // SAFETY: the caller's contract, and `self`.
        unsafe { _mm512_loadu_ps(ptr) }
    }
    #[inline(always)]
    unsafe fn store(self, ptr: *mut f32, x: __m512) {
        // SAFETY: the caller's contract, and `self`.
        unsafe { _mm512_storeu_ps(ptr, x) }
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_div_ps(a, b))
    }
    // A division keeps its unit busy for as long as ten to sixteen other operations take.
    #[inline(always)]
    fn quotient(self, a: __m512, b: __m512) -> __m512 {
        simd!({
            let guess = _mm512_rcp14_ps(b);
            // Newton's step. (One more for the quotient would make an infinity NaN.)
            let error = _mm512_fnmadd_ps(guess, b, _mm512_set1_ps(1.0));
            // NaN where b is an infinity, whose guess is 0.
            let error = _mm512_max_ps(error, _mm512_set1_ps(-1.0));
            let inverse = _mm512_fmadd_ps(guess, error, guess);
            _mm512_mul_ps(a, inverse)
        })
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        simd!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn keep_less(self, a: __m512, b: __m512, x: __m512) -> __m512 {
        simd!(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), _mm512_set1_ps(f32::NEG_INFINITY), x))
    }
    #[inline(always)]
    fn finite_max(self, x: __m512) -> __m512 {
        simd!(_mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(x, _mm512_set1_ps(f32::NEG_INFINITY)), x))
    }
    #[inline(always)]
    fn exp2(self, x: __m512) -> __m512 {
        const DOWN: i32 = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
        simd!(_mm512_scalef_ps(exp2_fraction(self, &EXP2, _mm512_reduce_ps::<DOWN>(x)), x))
    }
    #[inline(always)]
    fn sum(self, x: __m512) -> f32 {
        simd!(_mm512_reduce_add_ps(x))
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
    unsafe fn widen<T: Element>(self, ptr: *const T) -> __m512 {
        // SAFETY: the caller's contract, and `self`; the pointer's type corresponds to FLOAT.
        unsafe {
            match T::FLOAT {
                Float::F32 => _mm512_loadu_ps(ptr.cast()),
                Float::F16 => _mm512_cvtph_ps(_mm256_loadu_si256(ptr.cast())),
                Float::BF16 => {
                    let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(ptr.cast()));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn narrow<T: Element>(self, ptr: *mut T, x: __m512) {
        // SAFETY: the caller's contract, and `self`; the pointer's type corresponds to FLOAT.
        unsafe {
            match T::FLOAT {
                Float::F32 => _mm512_storeu_ps(ptr.cast(), x),
                Float::F16 => {
                    _mm256_storeu_si256(ptr.cast(), _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(x));
                }
                Float::BF16 => {
                    let bits = _mm512_castps_si512(x);
                    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
                    let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
                    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
                    let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
                    let bits = _mm512_mask_mov_epi32(rounded, nan, quiet);
                    _mm256_storeu_si256(ptr.cast(), _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(bits)));
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn widen_part<T: Element>(self, ptr: *const T, n: usize) -> __m512 {
        if n == Self::LANES {
            // SAFETY: the caller's contract.
            return unsafe { self.widen(ptr) };
        }
        let mask = ((1u32 << n) - 1) as __mmask16;
        // SAFETY: the caller's contract, and `self`; masked lanes are not read.
        unsafe {
            match T::FLOAT {
                Float::F32 => _mm512_maskz_loadu_ps(mask, ptr.cast()),
                Float::F16 => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, ptr.cast())),
                Float::BF16 => {
                    let bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, ptr.cast()));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
                }
            }
        }
    }

    #[inline(always)]
    fn pair(self, a: __m512, b: __m512) -> __m512 {
        simd!({
            let half = _mm512_set1_epi32(0x8000);
            let low = _mm512_srli_epi32::<16>(_mm512_add_epi32(_mm512_castps_si512(a), half));
            let high = _mm512_add_epi32(_mm512_castps_si512(b), half);
            // high & mask | low
            const SELECT: i32 = 0xea;
            let mask = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<SELECT>(high, mask, low))
        })
    }

    #[inline(always)]
    fn halves(self, a: __m512, b: __m512) -> __m512 {
        // Odd 16-bit elements come from `b`.
        simd!(_mm512_castsi512_ps(_mm512_mask_mov_epi16(
            _mm512_srli_epi32::<16>(_mm512_castps_si512(a)),
            0xaaaa_aaaa,
            _mm512_castps_si512(b)
        )))
    }

    #[inline(always)]
    fn unpair(self, x: __m512) -> [__m512; 2] {
        simd!({
            let mask = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            let x = _mm512_castps_si512(x);
            [_mm512_slli_epi32::<16>(x), _mm512_and_si512(x, mask)].map(|x| _mm512_castsi512_ps(x))
        })
    }

    #[inline(always)]
    fn rest(self, x: __m512) -> __m512 {
        simd!({
            let mask = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), mask)))
        })
    }

    #[inline(always)]
    fn without_first(self, x: __m512, n: usize) -> __m512 {
        simd!(_mm512_maskz_mov_ps((u32::from(u16::MAX) << n.min(MAX_LANES)) as __mmask16, x))
    }

    #[inline(always)]
    fn larger_magnitude(self, a: __m512, b: __m512) -> __m512 {
        simd!({
            let magnitude = |x| _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(i32::MAX));
            _mm512_castsi512_ps(_mm512_max_epi32(magnitude(a), magnitude(b)))
        })
    }

    #[inline(always)]
    fn digits(self, x: [__m512; 4], scale: __m512) -> [__m512; 3] {
        const ODD_BYTES: u64 = 0xaaaa_aaaa_aaaa_aaaa;
        const ODD_WORDS: u32 = 0xaaaa_aaaa;
        simd!({
            let middle = _mm512_set1_epi32(0x80_8080);
            let [a, b, c, d] = x.map(|x| {
                let whole = _mm512_cvtps_epi32(_mm512_mul_ps(x, scale));
                _mm512_xor_si512(_mm512_add_epi32(whole, middle), middle)
            });
            // Words of a byte each of two vectors: of the first and third digit from the right, and of the second.
            let outer = |a, b| _mm512_mask_mov_epi8(a, ODD_BYTES, _mm512_slli_epi32::<8>(b));
            let inner = |a, b| _mm512_mask_mov_epi8(_mm512_srli_epi32::<8>(a), ODD_BYTES, b);
            let (ab, cd) = (outer(a, b), outer(c, d));
            let third = _mm512_mask_mov_epi16(_mm512_srli_epi32::<16>(ab), ODD_WORDS, cd);
            let first = _mm512_mask_mov_epi16(ab, ODD_WORDS, _mm512_slli_epi32::<16>(cd));
            let second = _mm512_mask_mov_epi16(inner(a, b), ODD_WORDS, _mm512_slli_epi32::<16>(inner(c, d)));
            [third, second, first].map(|x| _mm512_castsi512_ps(x))
        })
    }

    #[inline(always)]
    fn widen_integers(self, x: __m512) -> __m512 {
        simd!(_mm512_cvtepi32_ps(_mm512_castps_si512(x)))
    }

    #[inline(always)]
    fn transpose(self, rows: &mut [__m512; MAX_LANES]) {
        // 128-bit lane l of b[q][c] holds column 4l + c of rows 4q .. 4q + 4.
        let mut b = [[self.splat(0.0); 4]; 4];
        for q in 0..4 {
            let r = &rows[4 * q..4 * q + 4];
            simd!({
                let (lo, hi) = (_mm512_unpacklo_ps(r[0], r[1]), _mm512_unpackhi_ps(r[0], r[1]));
                let (lo2, hi2) = (_mm512_unpacklo_ps(r[2], r[3]), _mm512_unpackhi_ps(r[2], r[3]));
                let pd = |x| _mm512_castps_pd(x);
                b[q] = [
                    _mm512_castpd_ps(_mm512_unpacklo_pd(pd(lo), pd(lo2))),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(pd(lo), pd(lo2))),
                    _mm512_castpd_ps(_mm512_unpacklo_pd(pd(hi), pd(hi2))),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(pd(hi), pd(hi2))),
                ];
            });
        }
        for c in 0..4 {
            simd!({
                let low = _mm512_shuffle_f32x4::<0x44>(b[0][c], b[1][c]);
                let low2 = _mm512_shuffle_f32x4::<0x44>(b[2][c], b[3][c]);
                let high = _mm512_shuffle_f32x4::<0xee>(b[0][c], b[1][c]);
                let high2 = _mm512_shuffle_f32x4::<0xee>(b[2][c], b[3][c]);
                rows[c] = _mm512_shuffle_f32x4::<0x88>(low, low2);
                rows[4 + c] = _mm512_shuffle_f32x4::<0xdd>(low, low2);
                rows[8 + c] = _mm512_shuffle_f32x4::<0x88>(high, high2);
                rows[12 + c] = _mm512_shuffle_f32x4::<0xdd>(high, high2);
            });
        }
    }

    #[inline(always)]
    fn across(self, r: [__m512; MAX_LANES], both: impl Fn(__m512, __m512) -> __m512) -> __m512 {
        // Each step takes halves of vectors and combines two vectors into one, with half the shuffles of a transposition.
        let zero = self.splat(0.0);
        let (mut pairs, mut fours, mut eights) = ([zero; 8], [zero; 4], [zero; 2]);
        for i in 0..8 {
            let (a, b) = (r[2 * i], r[2 * i + 1]);
            pairs[i] = both(simd!(_mm512_unpacklo_ps(a, b)), simd!(_mm512_unpackhi_ps(a, b)));
        }
        for i in 0..4 {
            let (low, high) = simd!({
                let (a, b) = (_mm512_castps_pd(pairs[2 * i]), _mm512_castps_pd(pairs[2 * i + 1]));
                (_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)))
            });
            fours[i] = both(low, high);
        }
        for i in 0..2 {
            let (a, b) = (fours[2 * i], fours[2 * i + 1]);
            eights[i] = both(simd!(_mm512_shuffle_f32x4::<0x44>(a, b)), simd!(_mm512_shuffle_f32x4::<0xee>(a, b)));
        }
        let [a, b] = eights;
        both(simd!(_mm512_shuffle_f32x4::<0x88>(a, b)), simd!(_mm512_shuffle_f32x4::<0xdd>(a, b)))
    }
}
