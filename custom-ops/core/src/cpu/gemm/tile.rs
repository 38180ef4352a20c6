//! The register-blocked product.

use super::Row;
use crate::cpu::isa::{Isa, Job};

/// Rows of a register tile.
pub(super) const ROWS: usize = 6;

/// Vectors in a register tile's row: with [`ROWS`], as many as the registers hold beside the operands.
pub(super) const fn max_vectors<I: Isa>() -> usize {
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
}

impl Job for Tiles<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        match self.vectors {
            1 => self.rows::<I, 1>(isa),
            2 => self.rows::<I, 2>(isa),
            3 if max_vectors::<I>() > 2 => self.rows::<I, 3>(isa),
            4 if max_vectors::<I>() > 2 => self.rows::<I, 4>(isa),
            _ => debug_assert!(false, "{} vectors", self.vectors),
        }
    }
}

impl Tiles<'_> {
    #[inline(always)]
    fn rows<I: Isa, const V: usize>(&self, isa: I) {
        let mut lines = self.lines;
        while let Some((rows, rest)) = lines.split_first_chunk::<ROWS>() {
            self.tile::<I, ROWS, V>(isa, rows);
            lines = rest;
        }
        match lines.len() {
            5 => self.rest::<I, 5, V>(isa, lines),
            4 => self.rest::<I, 4, V>(isa, lines),
            3 => self.rest::<I, 3, V>(isa, lines),
            2 => self.rest::<I, 2, V>(isa, lines),
            1 => self.rest::<I, 1, V>(isa, lines),
            _ => {}
        }
    }

    #[inline(always)]
    fn rest<I: Isa, const G: usize, const V: usize>(&self, isa: I, lines: &[Row<f32>]) {
        if let Some(rows) = lines.first_chunk::<G>() {
            self.tile::<I, G, V>(isa, rows);
        }
    }

    /// `G` rows, held in registers over the whole inner length.
    #[inline(always)]
    fn tile<I: Isa, const G: usize, const V: usize>(&self, isa: I, rows: &[Row<f32>; G]) {
        let mut acc = [[isa.splat(0.0); V]; G];
        let mut input = [self.b; G];
        for g in 0..G {
            input[g] = rows[g].input;
        }
        // SAFETY: the constructor's contract.
        unsafe {
            let mut b = self.b;
            for i in 0..self.k {
                let mut row = [isa.splat(0.0); V];
                for v in 0..V {
                    row[v] = isa.load(b.add(v * I::LANES));
                }
                b = b.add(V * I::LANES);
                for g in 0..G {
                    let x = isa.splat(*input[g].add(i));
                    for v in 0..V {
                        acc[g][v] = isa.fma(x, row[v], acc[g][v]);
                    }
                }
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
