//! x86-64 with AVX2: 8 words. [`words_of_256_bits`] is shared with its VNNI.

use super::{ByteDot, DotJob, NARROW_SUBTRACTED, Words16};
use crate::isa::avx2::Avx2;
use crate::isa::{Isa, MAX_LANES};
use std::arch::asm;
use std::arch::x86_64::*;

/// Exists only if the processor has the features of its `enabled`.
#[derive(Clone, Copy)]
pub(crate) struct Avx2Dot(Avx2);

/// Implements [`ByteDot`] on 256-bit registers for a token that holds [`Avx2`]'s.
macro_rules! words_of_256_bits {
    (
        $token:ident, $name:literal, $features:literal, $found:expr, subtracted: $subtracted:expr,
        dot4($sum4:ident, $w4:ident, $x4:ident): $dot4:expr,
        dot8($sum8:ident, $w8:ident, $x8:ident): $dot8:expr,
        dot_halves($dot:ident, $w:ident, $even:ident, $odd:ident): $halves:expr,
        $($parts:item)*
    ) => {
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

        impl ByteDot for $token {
            type Vectors = Avx2;
            type W = __m256i;
            const NAME: &'static str = $name;
            const SUBTRACTED: [u8; 2] = $subtracted;

            fn detect() -> Option<$token> {
                let vectors = Avx2::detect()?;
                $found.then_some($token(vectors))
            }
            #[inline(always)]
            fn vectors(self) -> Avx2 {
                self.0
            }
            fn vectorize<J: DotJob>(self, job: J) -> J::Output {
                simd!(enabled(self, job))
            }

            #[inline(always)]
            fn zero(self) -> __m256i {
                simd!(_mm256_setzero_si256())
            }
            #[inline(always)]
            unsafe fn load(self, ptr: *const u8) -> __m256i {
                // SAFETY: the caller's contract, and `self`.
                unsafe { _mm256_loadu_si256(ptr.cast()) }
            }
            #[inline(always)]
            unsafe fn broadcast(self, ptr: *const u8) -> __m256i {
                // SAFETY: the caller's contract, and `self`.
                unsafe { _mm256_set1_epi32(ptr.cast::<i32>().read_unaligned()) }
            }
            #[inline(always)]
            fn as_floats(self, words: __m256i) -> __m256 {
                simd!(_mm256_castsi256_ps(words))
            }
            #[inline(always)]
            fn as_words(self, x: __m256) -> __m256i {
                simd!(_mm256_castps_si256(x))
            }

            #[inline(always)]
            fn low(self, words: __m256i) -> __m256i {
                simd!(_mm256_and_si256(words, _mm256_set1_epi8(15)))
            }
            #[inline(always)]
            fn high(self, words: __m256i) -> __m256i {
                simd!(_mm256_and_si256(_mm256_srli_epi16::<4>(words), _mm256_set1_epi8(15)))
            }
            #[inline(always)]
            fn dot4(self, $sum4: __m256i, $w4: __m256i, $x4: __m256i) -> __m256i {
                simd!($dot4)
            }
            #[inline(always)]
            fn dot8(self, $sum8: __m256i, $w8: __m256i, $x8: __m256i) -> __m256i {
                simd!($dot8)
            }
            #[inline(always)]
            fn dot_halves(self, $w: __m256i, $even: __m256i, $odd: __m256i) -> __m256i {
                let $dot = self;
                simd!($halves)
            }
            $($parts)*
            #[inline(always)]
            fn to_float(self, words: __m256i) -> __m256 {
                simd!(_mm256_cvtepi32_ps(words))
            }
            #[inline(always)]
            fn nibble<const INDEX: usize>(self, words: __m256i) -> __m256 {
                simd!({
                    let signed = _mm256_xor_si256(words, _mm256_set1_epi8(-120));
                    let top = match INDEX {
                        0 => _mm256_slli_epi32::<28>(signed),
                        1 => _mm256_slli_epi32::<24>(signed),
                        2 => _mm256_slli_epi32::<20>(signed),
                        3 => _mm256_slli_epi32::<16>(signed),
                        4 => _mm256_slli_epi32::<12>(signed),
                        5 => _mm256_slli_epi32::<8>(signed),
                        6 => _mm256_slli_epi32::<4>(signed),
                        _ => signed,
                    };
                    _mm256_cvtepi32_ps(_mm256_srai_epi32::<28>(top))
                })
            }
            #[inline(always)]
            fn byte<const INDEX: usize>(self, words: __m256i) -> __m256 {
                simd!({
                    let signed = _mm256_xor_si256(words, _mm256_set1_epi8(-128));
                    let top = match INDEX {
                        0 => _mm256_slli_epi32::<24>(signed),
                        1 => _mm256_slli_epi32::<16>(signed),
                        2 => _mm256_slli_epi32::<8>(signed),
                        _ => signed,
                    };
                    _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(top))
                })
            }

            #[inline(always)]
            unsafe fn store_bytes<const N: usize>(self, x: [__m256; N], output: *mut u8) {
                // SAFETY: the caller's contract, and `self`.
                unsafe {
                    // In each half, the bytes of the first vector's lanes, then of the second's.
                    let order = super::avx2::halves([0, 4, 8, 12, 2, 6, 10, 14]);
                    let bytes = _mm256_shuffle_epi8(super::avx2::low_words(x), order);
                    let both = (_mm256_castsi256_si128(bytes), _mm256_extracti128_si256::<1>(bytes));
                    let bytes = _mm_unpacklo_epi32(both.0, both.1);
                    match N {
                        1 => _mm_storel_epi64(output.cast(), bytes),
                        _ => _mm_storeu_si128(output.cast(), bytes),
                    }
                }
            }
            #[inline(always)]
            unsafe fn store_bytes_apart<const N: usize>(self, x: [__m256; N], even: *mut u8, odd: *mut u8) {
                // SAFETY: the caller's contract, and `self`.
                unsafe {
                    // In each half, the first vector's even lanes and the second's, then the odd ones.
                    let order = super::avx2::halves([0, 8, 2, 10, 4, 12, 6, 14]);
                    let bytes = _mm256_shuffle_epi8(super::avx2::low_words(x), order);
                    let both = (_mm256_castsi256_si128(bytes), _mm256_extracti128_si256::<1>(bytes));
                    let apart = _mm_unpacklo_epi16(both.0, both.1);
                    match N {
                        1 => {
                            even.cast::<i32>().write_unaligned(_mm_cvtsi128_si32(apart));
                            odd.cast::<i32>().write_unaligned(_mm_extract_epi32::<2>(apart));
                        }
                        _ => {
                            _mm_storel_epi64(even.cast(), apart);
                            _mm_storel_epi64(odd.cast(), _mm_unpackhi_epi64(apart, apart));
                        }
                    }
                }
            }

            #[inline(always)]
            fn indices(self, lanes: &[u32; MAX_LANES]) -> __m256i {
                // SAFETY: the array holds a vector; `self`.
                unsafe { _mm256_loadu_si256(lanes.as_ptr().cast()) }
            }
            #[inline(always)]
            fn spread(self, x: __m256, indices: __m256i) -> __m256 {
                simd!(_mm256_permutevar8x32_ps(x, indices))
            }
            #[inline(always)]
            fn nibbles(self, bits: u64) -> __m256 {
                simd!({
                    let words = _mm256_set1_epi32(bits as i32);
                    let shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
                    _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srlv_epi32(words, shifts), _mm256_set1_epi32(15)))
                })
            }
            #[inline(always)]
            fn bytes(self, bytes: &[u8; MAX_LANES]) -> __m256 {
                // SAFETY: the array holds a byte for each lane; `self`.
                unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadu_si128(bytes.as_ptr().cast()))) }
            }
        }
    };
}
pub(super) use words_of_256_bits;

/// The low 16 bits of the lanes of one vector, or of two by turns.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn low_words<const N: usize>(x: [__m256; N]) -> __m256i {
    // SAFETY: the caller's contract.
    unsafe {
        let first = _mm256_castps_si256(x[0]);
        match N {
            1 => first,
            _ => _mm256_blend_epi16::<0b1010_1010>(first, _mm256_slli_epi32::<16>(_mm256_castps_si256(x[N - 1]))),
        }
    }
}

/// The argument of a shuffle that takes these bytes of each half of a vector to its beginning.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn halves(bytes: [u8; 8]) -> __m256i {
    // SAFETY: the caller's contract.
    unsafe { _mm256_set1_epi64x(i64::from_le_bytes(bytes)) }
}

words_of_256_bits!(
    Avx2Dot,
    "avx2",
    "avx2,fma,f16c",
    true,
    subtracted: [0, 128],
    dot4(sum, w, x): {
        // At most 2 * 15 * 127: no saturation.
        let pairs = _mm256_maddubs_epi16(w, x);
        _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
    },
    dot8(sum, w, x): {
        // At most 2 * 128 * 127 with signed weights: no saturation.
        let w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
        let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
        _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
    },
    dot_halves(dot, w, even, odd): {
        // Twice the above: no saturation either.
        let low = _mm256_maddubs_epi16(dot.low(w), even);
        let high = _mm256_maddubs_epi16(dot.high(w), odd);
        _mm256_madd_epi16(_mm256_add_epi16(low, high), _mm256_set1_epi16(1))
    },
    type Parts = Avx2Dot;
    #[inline(always)]
    fn parts(self) -> Option<Avx2Dot> {
        Some(self)
    }
);

/// Additions that stay where they are: the compiler would add up the products of several steps first, for which there are no registers.
macro_rules! additions {
    ($($name:ident: $instruction:literal),*) => {$(
        #[inline]
        #[target_feature(enable = "avx2")]
        fn $name(mut sum: __m256i, products: __m256i) -> __m256i {
            // SAFETY: an instruction of AVX2, on registers alone.
            unsafe {
                asm!(concat!($instruction, " {0}, {0}, {1}"), inout(ymm_reg) sum, in(ymm_reg) products,
                    options(pure, nomem, nostack, preserves_flags));
            }
            sum
        }
    )*};
}
additions!(add_epi16: "vpaddw", add_epi32: "vpaddd");

impl Words16<__m256i, __m256> for Avx2Dot {
    #[inline(always)]
    fn multiply4(self, w: __m256i, x: __m256i) -> __m256i {
        simd!(_mm256_maddubs_epi16(w, x))
    }
    #[inline(always)]
    fn add4(self, part: __m256i, products: __m256i) -> __m256i {
        // Words of 16 bits, at most 8 * 2 * 15 * 127 = 30480.
        simd!(add_epi16(part, products))
    }
    #[inline(always)]
    fn add(self, sum: __m256i, part: __m256i) -> __m256i {
        simd!(_mm256_add_epi32(sum, _mm256_madd_epi16(part, _mm256_set1_epi16(1))))
    }

    #[inline(always)]
    fn widen(self, words: __m256i) -> [__m256i; 2] {
        simd!({
            let signed = _mm256_xor_si256(words, _mm256_set1_epi8(-128));
            // Each byte as the upper half of 16 bits, which are then shifted down.
            let first = _mm_setr_epi8(-1, 0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13);
            let last = _mm_setr_epi8(-1, 2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15);
            let first = _mm256_shuffle_epi8(signed, _mm256_broadcastsi128_si256(first));
            let last = _mm256_shuffle_epi8(signed, _mm256_broadcastsi128_si256(last));
            [_mm256_srai_epi16::<8>(first), _mm256_srai_epi16::<8>(last)]
        })
    }
    #[inline(always)]
    fn multiply_narrow(self, w: __m256i, x: __m256i) -> __m256i {
        // At most 2 * 127 * 127: no saturation.
        simd!(_mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)))
    }
    #[inline(always)]
    fn narrow(self, words: __m256i) -> __m256i {
        simd!(_mm256_sub_epi8(words, _mm256_set1_epi8(NARROW_SUBTRACTED as i8)))
    }
    #[inline(always)]
    fn multiply2(self, w: __m256i, x: __m256i) -> __m256i {
        simd!(_mm256_madd_epi16(w, x))
    }
    #[inline(always)]
    fn add2(self, sum: __m256i, products: __m256i) -> __m256i {
        simd!(add_epi32(sum, products))
    }
    #[inline(always)]
    unsafe fn store_low<const N: usize>(self, x: [__m256; N], output: *mut u8) {
        // SAFETY: the caller's contract, and `self`.
        unsafe {
            // In each half, the words of the first vector's lanes, then of the second's.
            let order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
            let words = _mm256_shuffle_epi8(low_words(x), _mm256_broadcastsi128_si256(order));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            match N {
                1 => _mm_storeu_si128(output.cast(), _mm256_castsi256_si128(words)),
                _ => _mm256_storeu_si256(output.cast(), words),
            }
        }
    }
}
