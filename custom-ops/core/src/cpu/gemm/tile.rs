//! The register-blocked product.

use super::Row;
use crate::cpu::isa::{Isa, Job};

/// The most rows of a register tile: with the vectors, as many as the registers hold, of numbers and of addresses.
const ROWS: usize = 6;

/// Vectors in a register tile's row.
pub(super) const fn vectors<I: Isa>() -> usize {
    if I::GROUP == 8 { 4 } else { 2 }
}

/// `lines`' products with a packed panel of `k` rows of `vectors` vectors, added to their outputs from `column` on, or
/// written there.
///
/// Contract of the constructor: the lines' inputs are valid for reading `k` floats, the panel for reading, the outputs for
/// reading and writing `vectors` vectors from `column` on.
pub(super) struct Tiles<'a> {
    pub(super) lines: &'a [Row<f32>],
    pub(super) k: usize,
    pub(super) b: *const f32,
    pub(super) vectors: usize,
    pub(super) column: usize,
    pub(super) first: bool,
    /// What is packed next: it comes from memory meanwhile.
    pub(super) ahead: Ahead,
    /// What is wanted after that. The result is what remains of it.
    pub(super) later: Ahead,
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

    /// Asks for one cache line more; false if there is none.
    #[inline(always)]
    fn fetch<I: Isa>(&mut self, isa: I) -> bool {
        const LINE: usize = 64;
        let some = self.rows > 0;
        if some {
            isa.prefetch(self.row.wrapping_add(self.done));
            self.done += LINE;
            if self.done >= self.bytes {
                self.row = self.row.wrapping_add(self.stride);
                self.rows -= 1;
                self.done = 0;
            }
        }
        some
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
            _ => debug_assert!(false, "{} vectors", self.vectors),
        }
        self.later
    }
}

impl Tiles<'_> {
    #[inline(always)]
    fn rows<I: Isa, const V: usize>(&mut self, isa: I) {
        let mut lines = self.lines;
        while !lines.is_empty() {
            // The last two tiles share their rows: a tile of very few would wait for every sum.
            let rows = if lines.len() < 2 * ROWS && lines.len() > ROWS { lines.len().div_ceil(2) } else { ROWS };
            let (tile, rest) = lines.split_at(rows.min(lines.len()));
            match tile.len() {
                1 => self.lines::<I, 1, V>(isa, tile),
                2 => self.lines::<I, 2, V>(isa, tile),
                3 => self.lines::<I, 3, V>(isa, tile),
                4 => self.lines::<I, 4, V>(isa, tile),
                5 => self.lines::<I, 5, V>(isa, tile),
                _ => self.lines::<I, ROWS, V>(isa, tile),
            }
            lines = rest;
        }
    }

    #[inline(always)]
    fn lines<I: Isa, const G: usize, const V: usize>(&mut self, isa: I, lines: &[Row<f32>]) {
        if let Some(rows) = lines.first_chunk::<G>() {
            self.tile::<I, G, V>(isa, rows);
        }
    }

    /// `G` rows, held in registers over the whole inner length.
    #[inline(always)]
    fn tile<I: Isa, const G: usize, const V: usize>(&mut self, isa: I, rows: &[Row<f32>; G]) {
        /// Inner steps for each cache line that is asked for.
        const STEPS: usize = 4;
        let mut acc = [[isa.splat(0.0); V]; G];
        let mut input = [self.b; G];
        for g in 0..G {
            input[g] = rows[g].input;
        }
        // SAFETY: the constructor's contract.
        unsafe {
            let mut b = self.b;
            let whole = self.k - self.k % STEPS;
            for start in (0..whole).step_by(STEPS) {
                if !self.ahead.fetch(isa) {
                    self.later.fetch(isa);
                }
                // A constant number of steps, so that they are laid out one after the other.
                for i in start..start + STEPS {
                    step(isa, &mut acc, &input, b, i);
                    b = b.add(V * I::LANES);
                }
            }
            for i in whole..self.k {
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
