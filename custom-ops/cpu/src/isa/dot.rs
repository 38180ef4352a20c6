//! x86-64 with AVX512-BF16: dot products of pairs of bfloat16, accumulated in f32.

use super::avx512::Avx512;
use super::unit::{Multiply, ROW_BYTES, TILE, TILE_BYTES, TileProduct, Unit};
use std::arch::x86_64::*;
use std::sync::OnceLock;

/// Exists only if the processor has the features of [`rows`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dot(());

impl Unit for Dot {
    type Vectors = Avx512;
    type Multiplier = Dot;
    const NAME: &'static str = "avx512bf16";
    const MOST_TERMS: usize = 1;

    fn detect() -> Option<Dot> {
        let found = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16");
        found.then_some(Dot(()))
    }

    /// Compared with f32 multiply-adds, these instructions have twice the throughput on AMD processors and half on
    /// Intel's.
    fn is_fast() -> bool {
        // Cached: CPUID traps to the hypervisor in a virtual machine, which takes longer than a small operator.
        static AMD: OnceLock<bool> = OnceLock::new();
        *AMD.get_or_init(|| {
            let vendor = __cpuid(0);
            (vendor.ebx, vendor.edx, vendor.ecx) == (0x6874_7541, 0x6974_6e65, 0x444d_4163)
        })
    }

    fn start(self) -> Dot {
        self
    }
}

impl Multiply for Dot {
    unsafe fn multiply<const BOTH: bool>(&self, p: &TileProduct) {
        for i in 0..1 + usize::from(BOTH) {
            for row in (0..TILE).step_by(ROWS) {
                // SAFETY: `self` proves that the processor has the features; the caller's contract.
                unsafe { rows(p, i, row, (i, row) == (0, 0)) }
            }
        }
    }
}

/// Rows accumulated in registers.
const ROWS: usize = 8;

/// Computes rows `row .. row + ROWS` of tile `i`. The first ones read ahead.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn rows(p: &TileProduct, i: usize, row: usize, is_first: bool) {
    let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
    // SAFETY: the caller's contract; every step has TILE pairs, or fewer.
    unsafe {
        let c = p.c[i].byte_add(row * p.c_stride);
        if p.add {
            for g in 0..ROWS {
                sums[g] = [0, TILE].map(|v| _mm512_loadu_ps(c.byte_add(g * p.c_stride).add(v)));
            }
        }
        let a = p.a[i].byte_add(row * ROW_BYTES).cast::<i32>();
        for step in 0..p.steps {
            if is_first {
                p.ahead.fetch(step);
            }
            let b = p.b.byte_add(step * p.b_step);
            let pairs = if step + 1 == p.steps { p.last } else { TILE };
            for pair in 0..pairs {
                let b = b.byte_add(pair * p.b_stride);
                let b = [load(b), load(b.add(TILE))];
                let a = a.byte_add(step * TILE_BYTES).add(pair);
                for g in 0..ROWS {
                    let x = as_bf16(_mm512_set1_epi32(*a.byte_add(g * ROW_BYTES)));
                    for v in 0..2 {
                        sums[g][v] = _mm512_dpbf16_ps(sums[g][v], x, b[v]);
                    }
                }
            }
        }
        for g in 0..ROWS {
            for v in 0..2 {
                _mm512_storeu_ps(c.byte_add(g * p.c_stride).add(v * TILE), sums[g][v]);
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn load(pairs: *const f32) -> __m512bh {
    // SAFETY: the caller's contract: a vector of pairs.
    unsafe { as_bf16(_mm512_loadu_si512(pairs.cast())) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn as_bf16(x: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes, and every bit pattern is valid.
    unsafe { std::mem::transmute(x) }
}
