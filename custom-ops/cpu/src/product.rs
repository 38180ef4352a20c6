//! Register-blocked matrix product, used for scores and for weighted values.

use crate::isa::Isa;

/// Computes `c = scale * c + a b`; without `scale`, `c = a b`. `c` is `rows` rows of `V` vectors, `width` floats
/// apart; `k` is the inner length.
///
/// `b` is `k` rows of `V` vectors, `width` floats apart. `a` is read by broadcasting: its element (row, k) is at
/// `row * stride + k`, or with `ACROSS` at `k * stride + row`.
///
/// # Safety
/// Every address named above is valid for reading, those of `c` also for writing.
#[inline(always)]
pub(crate) unsafe fn product<I: Isa, const V: usize, const ACROSS: bool>(
    isa: I,
    rows: usize,
    k: usize,
    a: (*const f32, usize),
    b: *const f32,
    c: *mut f32,
    width: usize,
    scale: Option<&[I::V; V]>,
) {
    let (a, stride) = a;
    let step = if ACROSS { 1 } else { stride };
    let mut row = 0;
    // SAFETY: the caller's contract, for rows `row .. row + G <= rows`.
    unsafe {
        // Products of one vector need more rows: each sum waits for the one before.
        if I::GROUP >= 8 || V == 1 {
            while row + 8 <= rows {
                block::<I, V, 8, ACROSS>(isa, k, (a.add(row * step), stride), b, c.add(row * width), width, scale);
                row += 8;
            }
        }
        if I::GROUP == 6 {
            // Eight rows are twice four, not six and two, whose sums would wait for each other.
            while row + 6 <= rows && row + 8 != rows {
                block::<I, V, 6, ACROSS>(isa, k, (a.add(row * step), stride), b, c.add(row * width), width, scale);
                row += 6;
            }
        }
        while row + 4 <= rows {
            block::<I, V, 4, ACROSS>(isa, k, (a.add(row * step), stride), b, c.add(row * width), width, scale);
            row += 4;
        }
        if row + 2 <= rows {
            block::<I, V, 2, ACROSS>(isa, k, (a.add(row * step), stride), b, c.add(row * width), width, scale);
            row += 2;
        }
        if row < rows {
            block::<I, V, 1, ACROSS>(isa, k, (a.add(row * step), stride), b, c.add(row * width), width, scale);
        }
    }
}

/// `G` rows of [`product`], accumulated in registers over the whole inner length.
#[inline(always)]
unsafe fn block<I: Isa, const V: usize, const G: usize, const ACROSS: bool>(
    isa: I,
    k: usize,
    a: (*const f32, usize),
    b: *const f32,
    c: *mut f32,
    width: usize,
    scale: Option<&[I::V; V]>,
) {
    let (a, stride) = a;
    let mut acc = [[isa.splat(0.0); V]; G];
    // SAFETY: the caller's contract.
    unsafe {
        if let Some(scale) = scale {
            for g in 0..G {
                for v in 0..V {
                    acc[g][v] = isa.mul(isa.load(c.add(g * width + v * I::LANES)), scale[v]);
                }
            }
        }
        for i in 0..k {
            let mut row = [isa.splat(0.0); V];
            for v in 0..V {
                row[v] = isa.load(b.add(i * width + v * I::LANES));
            }
            for g in 0..G {
                let x = isa.splat(*a.add(if ACROSS { i * stride + g } else { g * stride + i }));
                for v in 0..V {
                    acc[g][v] = isa.fma(x, row[v], acc[g][v]);
                }
            }
        }
        for g in 0..G {
            for v in 0..V {
                isa.store(c.add(g * width + v * I::LANES), acc[g][v]);
            }
        }
    }
}
