//! x86-64 with AVX-512 and its VNNI: 16 words.

use super::{ByteDot, DotJob, Never, rounded};
use crate::isa::avx512::Avx512;
use crate::isa::{Isa, MAX_LANES};
use std::arch::x86_64::*;

/// Exists only if the processor has the features of [`enabled`].
#[derive(Clone, Copy)]
pub(crate) struct Avx512Vnni(Avx512);

macro_rules! simd {
    ($e:expr) => {{
        // SAFETY: `self` proves that the processor has the features.
        unsafe { $e }
    }};
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn enabled<J: DotJob>(dot: Avx512Vnni, job: J) -> J::Output {
    job.run(dot)
}

impl ByteDot for Avx512Vnni {
    type Vectors = Avx512;
    type W = __m512i;
    type Parts = Never;
    const NAME: &'static str = "avx512vnni";
    const SUBTRACTED: [u8; 2] = [0, 0];
    const AT_ONCE: usize = 4;

    fn detect() -> Option<Avx512Vnni> {
        let vectors = Avx512::detect()?;
        is_x86_feature_detected!("avx512vnni").then_some(Avx512Vnni(vectors))
    }
    #[inline(always)]
    fn vectors(self) -> Avx512 {
        self.0
    }
    fn vectorize<J: DotJob>(self, job: J) -> J::Output {
        simd!(enabled(self, job))
    }

    #[inline(always)]
    fn zero(self) -> __m512i {
        simd!(_mm512_setzero_si512())
    }
    #[inline(always)]
    unsafe fn load(self, ptr: *const u8) -> __m512i {
        // SAFETY: the caller's contract, and `self`.
        unsafe { _mm512_loadu_si512(ptr.cast()) }
    }
    #[inline(always)]
    unsafe fn load_part(self, ptr: *const u8, bytes: usize) -> __m512i {
        let mask = u64::MAX.checked_shr(64 - bytes as u32).unwrap_or(0);
        // SAFETY: the caller's contract, and `self`; masked bytes are not read.
        unsafe { _mm512_maskz_loadu_epi8(mask, ptr.cast()) }
    }
    #[inline(always)]
    unsafe fn broadcast(self, ptr: *const u8) -> __m512i {
        // SAFETY: the caller's contract, and `self`.
        unsafe { _mm512_set1_epi32(ptr.cast::<i32>().read_unaligned()) }
    }
    #[inline(always)]
    fn as_floats(self, words: __m512i) -> __m512 {
        simd!(_mm512_castsi512_ps(words))
    }
    #[inline(always)]
    fn as_words(self, x: __m512) -> __m512i {
        simd!(_mm512_castps_si512(x))
    }

    #[inline(always)]
    fn low(self, words: __m512i) -> __m512i {
        simd!(_mm512_and_si512(words, _mm512_set1_epi8(15)))
    }
    #[inline(always)]
    fn high(self, words: __m512i) -> __m512i {
        simd!(_mm512_and_si512(_mm512_srli_epi16::<4>(words), _mm512_set1_epi8(15)))
    }
    #[inline(always)]
    fn dot4(self, sum: __m512i, w: __m512i, x: __m512i) -> __m512i {
        simd!(_mm512_dpbusd_epi32(sum, w, x))
    }
    #[inline(always)]
    fn dot8(self, sum: __m512i, w: __m512i, x: __m512i) -> __m512i {
        simd!(_mm512_dpbusd_epi32(sum, w, x))
    }
    #[inline(always)]
    fn to_float(self, words: __m512i) -> __m512 {
        simd!(_mm512_cvtepi32_ps(words))
    }
    #[inline(always)]
    fn nibble<const INDEX: usize>(self, words: __m512i) -> __m512 {
        // The permutation reads the low four bits of each index.
        simd!({
            let values =
                _mm512_setr_ps(-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0);
            let index = match INDEX {
                0 => words,
                1 => _mm512_srli_epi32::<4>(words),
                2 => _mm512_srli_epi32::<8>(words),
                3 => _mm512_srli_epi32::<12>(words),
                4 => _mm512_srli_epi32::<16>(words),
                5 => _mm512_srli_epi32::<20>(words),
                6 => _mm512_srli_epi32::<24>(words),
                _ => _mm512_srli_epi32::<28>(words),
            };
            _mm512_permutexvar_ps(index, values)
        })
    }
    #[inline(always)]
    fn byte<const INDEX: usize>(self, words: __m512i) -> __m512 {
        simd!({
            let signed = _mm512_xor_si512(words, _mm512_set1_epi8(-128));
            let top = match INDEX {
                0 => _mm512_slli_epi32::<24>(signed),
                1 => _mm512_slli_epi32::<16>(signed),
                2 => _mm512_slli_epi32::<8>(signed),
                _ => signed,
            };
            _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(top))
        })
    }

    #[inline(always)]
    unsafe fn store_rounded<const N: usize>(self, x: [__m512; N], output: *mut u8) -> __m512 {
        if N == 1 {
            let (bytes, sum) = rounded(self.0, x);
            // SAFETY: the caller's contract.
            unsafe { self.store_bytes(bytes, output) }
            return sum;
        }
        // SAFETY: the caller's contract, and `self`.
        unsafe {
            let bytes = packed(x);
            // Word 4 l + i holds words 4 l .. of vector i.
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            if N == 4 {
                let bytes = _mm512_permutexvar_epi32(order, bytes);
                _mm512_storeu_si512(output.cast(), bytes);
                return sum_of(bytes);
            }
            let bytes = _mm512_maskz_permutexvar_epi32(0xff, order, bytes);
            _mm256_storeu_si256(output.cast(), _mm512_castsi512_si256(bytes));
            sum_of(bytes)
        }
    }
    #[inline(always)]
    unsafe fn store_rounded_apart<const N: usize>(self, x: [__m512; N], even: *mut u8, odd: *mut u8) -> __m512 {
        if N == 1 {
            let (bytes, sum) = rounded(self.0, x);
            // SAFETY: the caller's contract.
            unsafe { self.store_bytes_apart(bytes, even, odd) }
            return sum;
        }
        // SAFETY: the caller's contract, and `self`.
        unsafe {
            // Of each 128 bits, the bytes of even index first; then words of 16 bits as in `store_rounded`.
            let apart = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
            let bytes = _mm512_shuffle_epi8(packed(x), apart);
            #[rustfmt::skip]
            let fours: [i16; 32] = [
                0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27,
                4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31,
            ];
            #[rustfmt::skip]
            let twos: [i16; 32] = [
                0, 8, 16, 24, 1, 9, 17, 25, 4, 12, 20, 28, 5, 13, 21, 29,
                0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            ];
            if N == 4 {
                let bytes = _mm512_permutexvar_epi16(_mm512_loadu_si512(fours.as_ptr().cast()), bytes);
                _mm256_storeu_si256(even.cast(), _mm512_castsi512_si256(bytes));
                _mm256_storeu_si256(odd.cast(), _mm512_extracti64x4_epi64::<1>(bytes));
                return sum_of(bytes);
            }
            let bytes = _mm512_maskz_permutexvar_epi16(0xffff, _mm512_loadu_si512(twos.as_ptr().cast()), bytes);
            _mm_storeu_si128(even.cast(), _mm512_castsi512_si128(bytes));
            _mm_storeu_si128(odd.cast(), _mm512_extracti32x4_epi32::<1>(bytes));
            sum_of(bytes)
        }
    }

    #[inline(always)]
    unsafe fn store_bytes<const N: usize>(self, x: [__m512; N], output: *mut u8) {
        for (i, x) in x.into_iter().enumerate() {
            // SAFETY: the caller's contract, and `self`.
            unsafe { _mm_storeu_si128(output.add(16 * i).cast(), _mm512_cvtepi32_epi8(_mm512_castps_si512(x))) }
        }
    }
    #[inline(always)]
    unsafe fn store_bytes_apart<const N: usize>(self, x: [__m512; N], even: *mut u8, odd: *mut u8) {
        for (i, x) in x.into_iter().enumerate() {
            // SAFETY: the caller's contract, and `self`.
            unsafe {
                let bytes = _mm512_cvtepi32_epi8(_mm512_castps_si512(x));
                let order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
                let apart = _mm_shuffle_epi8(bytes, order);
                _mm_storel_epi64(even.add(8 * i).cast(), apart);
                _mm_storel_epi64(odd.add(8 * i).cast(), _mm_unpackhi_epi64(apart, apart));
            }
        }
    }

    #[inline(always)]
    fn indices(self, lanes: &[u32; MAX_LANES]) -> __m512i {
        // SAFETY: the array holds a vector; `self`.
        unsafe { _mm512_loadu_si512(lanes.as_ptr().cast()) }
    }
    #[inline(always)]
    fn spread(self, x: __m512, indices: __m512i) -> __m512 {
        simd!(_mm512_permutexvar_ps(indices, x))
    }
    #[inline(always)]
    fn nibbles(self, bits: u64) -> __m512 {
        simd!({
            let words = _mm512_maskz_set1_epi64(0xff, bits.cast_signed());
            let words =
                _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), words);
            let shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
            _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srlv_epi32(words, shifts), _mm512_set1_epi32(15)))
        })
    }
    #[inline(always)]
    fn bytes(self, bytes: &[u8; MAX_LANES]) -> __m512 {
        // SAFETY: the array holds a byte for each lane; `self`.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(bytes.as_ptr().cast()))) }
    }
}

/// Two or four vectors, rounded to integers of a byte: each 128 bits have four of each vector's, those of two vectors twice.
///
/// # Safety
/// The processor has the features of [`enabled`].
#[inline(always)]
unsafe fn packed<const N: usize>(x: [__m512; N]) -> __m512i {
    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    // SAFETY: the caller's contract.
    unsafe {
        let words = |i: usize| _mm512_cvt_roundps_epi32::<NEAREST>(x[i % N]);
        let [low, high] = [_mm512_packs_epi32(words(0), words(1)), _mm512_packs_epi32(words(2), words(3))];
        _mm512_packs_epi16(low, high)
    }
}

/// Lanes with the sum of all signed bytes.
///
/// # Safety
/// The processor has the features of [`enabled`].
#[inline(always)]
unsafe fn sum_of(bytes: __m512i) -> __m512 {
    // SAFETY: the caller's contract.
    unsafe { _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes)) }
}
