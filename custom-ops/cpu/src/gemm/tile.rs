//! The register-blocked product.

use super::Row;
use crate::isa::{Isa, Job};
use std::ops::Range;

/// The most rows of a register tile of [`vectors`] vectors a row, and of a narrower one: as many as the registers hold, of
/// numbers and of addresses.
const ROWS: [usize; 2] = [5, 6];

/// Vectors in a register tile's row.
pub(super) const fn vectors<I: Isa>() -> usize {
    if I::REGISTERS >= 32 { 5 } else { 2 }
}

/// Products of the rows `picked`, over inner indices `k`, with a packed panel of `vectors` vectors a row, added to their
/// outputs from `column` on, or written there.
///
/// Contract of the constructor: the rows' inputs are valid for reading the elements `k`, the panel for reading `k.len()` rows,
/// the outputs for reading and writing `vectors` vectors from `column` on.
pub(super) struct Tiles<'a> {
    pub(super) rows: &'a [Row],
    pub(super) picked: &'a [u32],
    pub(super) k: Range<usize>,
    pub(super) b: *const f32,
    pub(super) vectors: usize,
    pub(super) column: usize,
    pub(super) first: bool,
    /// Memory to prefetch meanwhile. The result is what remains of it.
    pub(super) ahead: Ahead,
}

/// Memory that will be read soon: rows of some bytes, `stride` bytes apart. It is never read here.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ahead {
    row: *const u8,
    stride: usize,
    rows: usize,
    bytes: usize,
    done: usize,
}

impl Default for Ahead {
    fn default() -> Ahead {
        Ahead::new(std::ptr::null(), 0, 0, 0)
    }
}

impl Ahead {
    pub(super) fn new(row: *const u8, stride: usize, rows: usize, bytes: usize) -> Ahead {
        Ahead { row, stride, rows, bytes, done: 0 }
    }

    /// Asks for one cache line more, if there is one.
    #[inline(always)]
    fn fetch<I: Isa>(&mut self, isa: I) {
        const LINE: usize = 64;
        if self.rows > 0 {
            isa.prefetch(self.row.wrapping_add(self.done));
            self.done += LINE;
            if self.done >= self.bytes {
                self.row = self.row.wrapping_add(self.stride);
                self.rows -= 1;
                self.done = 0;
            }
        }
    }
}

impl Job for Tiles<'_> {
    type Output = Ahead;

    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I) -> Ahead {
        match self.vectors {
            1 => self.rows::<I, 1>(isa),
            2 => self.rows::<I, 2>(isa),
            3 if vectors::<I>() > 2 => self.rows::<I, 3>(isa),
            4 if vectors::<I>() > 2 => self.rows::<I, 4>(isa),
            5 if vectors::<I>() > 2 => self.rows::<I, 5>(isa),
            _ => debug_assert!(false, "{} vectors", self.vectors),
        }
        self.ahead
    }
}

impl Tiles<'_> {
    #[inline(always)]
    fn rows<I: Isa, const V: usize>(&mut self, isa: I) {
        let most = ROWS[usize::from(V < 5)];
        let mut picked = self.picked;
        while !picked.is_empty() {
            // The last two tiles share their rows: a tile of very few would wait for every sum.
            let rows = if picked.len() < 2 * most && picked.len() > most { picked.len().div_ceil(2) } else { most };
            let (tile, rest) = picked.split_at(rows.min(picked.len()));
            match tile.len() {
                1 => self.picked::<I, 1, V>(isa, tile),
                2 => self.picked::<I, 2, V>(isa, tile),
                3 => self.picked::<I, 3, V>(isa, tile),
                4 => self.picked::<I, 4, V>(isa, tile),
                5 => self.picked::<I, 5, V>(isa, tile),
                _ if V < 5 => self.picked::<I, 6, V>(isa, tile),
                _ => {}
            }
            picked = rest;
        }
    }

    #[inline(always)]
    fn picked<I: Isa, const G: usize, const V: usize>(&mut self, isa: I, picked: &[u32]) {
        if let Some(picked) = picked.first_chunk::<G>() {
            self.tile::<I, G, V>(isa, picked.map(|row| self.rows[row as usize]));
        }
    }

    /// `G` rows, held in registers over the whole inner length.
    #[inline(always)]
    fn tile<I: Isa, const G: usize, const V: usize>(&mut self, isa: I, rows: [Row; G]) {
        /// Inner steps for each cache line that is asked for.
        const STEPS: usize = 4;
        let mut acc = [[isa.splat(0.0); V]; G];
        let mut input = [self.b; G];
        for g in 0..G {
            input[g] = rows[g].input.wrapping_add(self.k.start);
        }
        // SAFETY: the constructor's contract.
        unsafe {
            let (mut b, k) = (self.b, self.k.len());
            let whole = k - k % STEPS;
            for start in (0..whole).step_by(STEPS) {
                self.ahead.fetch(isa);
                // A constant number of steps, so that they are laid out one after the other.
                for i in start..start + STEPS {
                    step(isa, &mut acc, &input, b, i);
                    b = b.add(V * I::LANES);
                }
            }
            for i in whole..k {
                step(isa, &mut acc, &input, b, i);
                b = b.add(V * I::LANES);
            }
            for g in 0..G {
                for v in 0..V {
                    let output = rows[g].output.add(self.column + v * I::LANES);
                    let sum = if self.first { acc[g][v] } else { isa.add(isa.load(output), acc[g][v]) };
                    isa.store(output, sum);
                }
            }
        }
    }
}

/// Inner index `i`: a row of the panel, at `b`, times an element of each input.
///
/// # Safety
/// The row and the elements are valid for reading.
#[inline(always)]
unsafe fn step<I: Isa, const G: usize, const V: usize>(
    isa: I,
    acc: &mut [[I::V; V]; G],
    input: &[*const f32; G],
    b: *const f32,
    i: usize,
) {
    let mut row = [isa.splat(0.0); V];
    // SAFETY: the caller's contract.
    unsafe {
        for v in 0..V {
            row[v] = isa.load(b.add(v * I::LANES));
        }
        for g in 0..G {
            let x = isa.splat(*input[g].add(i));
            for v in 0..V {
                acc[g][v] = isa.fma(x, row[v], acc[g][v]);
            }
        }
    }
}
