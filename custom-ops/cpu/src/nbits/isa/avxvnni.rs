//! x86-64 with AVX2 and AVX-VNNI: 8 words.

use super::avx2::words_of_256_bits;
use super::{ByteDot, DotJob, Never};
use crate::isa::avx2::Avx2;
use crate::isa::{Isa, MAX_LANES};
use std::arch::x86_64::*;

/// Exists only if the processor has the features of its `enabled`.
#[derive(Clone, Copy)]
pub(crate) struct AvxVnni(Avx2);

words_of_256_bits!(
    AvxVnni,
    "avxvnni",
    "avx2,fma,f16c,avxvnni",
    is_x86_feature_detected!("avxvnni"),
    subtracted: [0, 0],
    dot4(sum, w, x): _mm256_dpbusd_avx_epi32(sum, w, x),
    dot8(sum, w, x): _mm256_dpbusd_avx_epi32(sum, w, x),
    dot_halves(dot, w, even, odd): {
        let low = _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), dot.low(w), even);
        _mm256_dpbusd_avx_epi32(low, dot.high(w), odd)
    },
    type Parts = Never;
);
