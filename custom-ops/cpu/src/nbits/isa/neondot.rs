//! aarch64 with dot products of bytes: 4 words.

use super::neon::words_of_128_bits;
use super::{ByteDot, DotJob, Never};
use crate::isa::neon::Neon;
use crate::isa::{Isa, MAX_LANES};
use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};

/// Exists only if the processor has the features of its `enabled`.
#[derive(Clone, Copy)]
pub(crate) struct NeonDot(Neon);

words_of_128_bits!(
    NeonDot,
    "neondot",
    "neon,dotprod",
    is_aarch64_feature_detected!("dotprod"),
    dot(sum, w, x): {
        // The intrinsic is not stable.
        let mut sum = sum;
        asm!(
            ".arch_extension dotprod",
            "sdot {sum:v}.4s, {w:v}.16b, {x:v}.16b",
            sum = inout(vreg) sum,
            w = in(vreg) w,
            x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags)
        );
        sum
    },
);
