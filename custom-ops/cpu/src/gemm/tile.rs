//! Register-blocked product.

use super::{Row, Start};
use crate::isa::{Isa, Job};
use std::ops::Range;

/// Maximum rows of a register tile with [`vectors`] vectors per row, and of a narrower one: limited by vector
/// registers and by address registers.
const ROWS: [usize; 2] = [5, 6];
/// Inner indices that are multiplied without a branch, and between two prefetches.
const STEPS: usize = 4;
/// Cache lines per prefetch, at most: for every row, and in all. (With one line, 2 to 32 rows took 1.1 to 1.4 of the time on AVX-512; one row, which is
/// read as fast as memory permits, takes longer with more.)
const MOST_LINES: [usize; 2] = [4, 10];

/// Number of prefetches during the product of `rows` rows with a panel of `vectors` vectors per row, over `k` inner indices.
pub(super) fn prefetches(rows: usize, vectors: usize, k: usize) -> usize {
    rows.div_ceil(most_rows(vectors)) * (k / STEPS)
}

const fn most_rows(vectors: usize) -> usize {
    ROWS[if vectors < 5 { 1 } else { 0 }]
}

/// Vectors per row of the register tile.
pub(crate) const fn vectors<I: Isa>() -> usize {
    if I::REGISTERS >= 32 { 5 } else { 2 }
}

/// Products of the rows `picked`, over inner indices `k`, with a packed panel of `vectors` vectors per row. Results
/// are added to `begin`, in the outputs from `column` on.
///
/// Contract of the constructor: the rows' inputs are valid for reading the elements `k`, the panel for reading `k.len()` rows,
/// the outputs for reading and writing `vectors` vectors from `column` on; a bias has as many.
pub(crate) struct Tiles<'a> {
    pub(crate) rows: &'a [Row],
    pub(crate) picked: &'a [u32],
    pub(crate) k: Range<usize>,
    pub(crate) b: *const f32,
    pub(crate) vectors: usize,
    pub(crate) column: usize,
    pub(crate) begin: Start<'a>,
    /// Memory to prefetch during the product. `run` returns what is left of it.
    pub(crate) ahead: Ahead,
}

const LINE: usize = 64;

/// Vectors of a cache line, at least one.
const fn vectors_of_line<I: Isa>() -> usize {
    let vectors = LINE / (I::LANES * size_of::<f32>());
    if vectors > 0 { vectors } else { 1 }
}

/// Memory to prefetch: rows of `bytes` bytes, `stride` bytes apart. It is never dereferenced.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ahead {
    row: *const u8,
    stride: usize,
    rows: usize,
    bytes: usize,
    done: usize,
    /// Cache lines at a time.
    lines: usize,
}

impl Default for Ahead {
    fn default() -> Ahead {
        Ahead::new(std::ptr::null(), 0, 0, 0)
    }
}

impl Ahead {
    pub(super) fn new(row: *const u8, stride: usize, rows: usize, bytes: usize) -> Ahead {
        Ahead { row, stride, rows, bytes, done: 0, lines: 1 }
    }

    /// Distributes the memory over so many prefetches, during products of `rows` rows.
    pub(super) fn distribute(self, rows: usize, prefetches: usize) -> Ahead {
        let [of_row, most] = MOST_LINES;
        let lines = (self.rows * self.bytes.div_ceil(LINE)).div_ceil(prefetches.max(1));
        Ahead { lines: lines.clamp(1, most.min(of_row * rows.max(1))), ..self }
    }

    /// If they are in one row and prefetched one by one; instead of nothing, `other`.
    #[inline(always)]
    fn single_lines(&self, other: *const f32) -> Option<Lines> {
        match (self.rows, self.lines) {
            (0, _) => Some(Lines { next: other.cast(), last: other.cast() }),
            (1, 1) => {
                let last = self.row.wrapping_add(self.bytes.saturating_sub(LINE));
                Some(Lines { next: self.row.wrapping_add(self.done), last })
            }
            _ => None,
        }
    }
}

/// What prefetches some memory in many steps.
trait Prefetch: Copy {
    /// Prefetches the next cache lines, if any are left.
    fn fetch<I: Isa>(&mut self, isa: I);
}

/// Cache lines one after another, until the last one. It is prefetched again and again, which takes less time than branches.
#[derive(Debug, Clone, Copy)]
struct Lines {
    next: *const u8,
    last: *const u8,
}

impl Prefetch for Lines {
    #[inline(always)]
    fn fetch<I: Isa>(&mut self, isa: I) {
        isa.prefetch(self.next);
        self.next = self.next.wrapping_add(LINE).min(self.last);
    }
}

impl Prefetch for Ahead {
    #[inline(always)]
    fn fetch<I: Isa>(&mut self, isa: I) {
        match self.rows {
            0 => {}
            // A packed panel, for which this loop is short; perhaps some lines after its end as well.
            1 => {
                for line in 0..self.lines {
                    isa.prefetch(self.row.wrapping_add(self.done + line * LINE));
                }
                self.done += self.lines * LINE;
                self.rows = usize::from(self.done < self.bytes);
            }
            _ => {
                for _ in 0..self.lines {
                    self.fetch_line(isa);
                }
            }
        }
    }
}

impl Ahead {
    #[inline(always)]
    fn fetch_line<I: Isa>(&mut self, isa: I) {
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
        let most = const { most_rows(V) };
        let mut picked = self.picked;
        // Tiles of about equal numbers of rows: in a tile of very few rows, every addition would wait for the previous one.
        for left in (1..=picked.len().div_ceil(most)).rev() {
            let rows = picked.len().div_ceil(left);
            let (tile, rest) = picked.split_at(rows);
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

    /// A tile of `G` rows, accumulated in registers over the whole inner length.
    #[inline(always)]
    fn tile<I: Isa, const G: usize, const V: usize>(&mut self, isa: I, rows: [Row; G]) {
        let outputs = rows.map(|row| row.output.wrapping_add(self.column));
        // SAFETY: the constructor's contract.
        unsafe {
            let mut sums = match self.ahead.single_lines(self.b) {
                Some(lines) => {
                    let (sums, lines) = self.products::<I, _, G, V>(isa, &rows, &outputs, lines);
                    self.ahead.done = lines.next.addr().wrapping_sub(self.ahead.row.addr());
                    sums
                }
                None => {
                    let (sums, ahead) = self.products::<I, _, G, V>(isa, &rows, &outputs, self.ahead);
                    self.ahead = ahead;
                    sums
                }
            };
            match self.begin {
                Start::New(None) => {}
                Start::New(Some(bias)) => {
                    for v in 0..V {
                        let bias = isa.load(bias.as_ptr().add(v * I::LANES));
                        for g in 0..G {
                            sums[g][v] = isa.add(bias, sums[g][v]);
                        }
                    }
                }
                Start::Sums => {
                    for g in 0..G {
                        for v in 0..V {
                            sums[g][v] = isa.add(isa.load(outputs[g].add(v * I::LANES)), sums[g][v]);
                        }
                    }
                }
            }
            for g in 0..G {
                for v in 0..V {
                    isa.store(outputs[g].add(v * I::LANES), sums[g][v]);
                }
            }
        }
    }

    /// The tile's sums of products. Also returns what is left to prefetch.
    ///
    /// # Safety
    /// The constructor's contract.
    #[inline(always)]
    unsafe fn products<I: Isa, P: Prefetch, const G: usize, const V: usize>(
        &self,
        isa: I,
        rows: &[Row; G],
        outputs: &[*mut f32; G],
        mut ahead: P,
    ) -> ([[I::V; V]; G], P) {
        let mut sums = [[isa.splat(0.0); V]; G];
        let mut input = [self.b; G];
        for g in 0..G {
            input[g] = rows[g].input.wrapping_add(self.k.start);
        }
        let (mut b, k) = (self.b, self.k.len());
        let whole = k - k % STEPS;
        // Stores that wait for lines, all at a tile's end, would be in the way of the next tile's loads. (A product whose output was
        // not in a cache took 0.91 of the time, another 0.97.)
        let of_line = const { vectors_of_line::<I>() };
        let lines = V.div_ceil(of_line);
        let fetching = whole.min(G * lines * STEPS);
        // SAFETY: the caller's contract.
        unsafe {
            let mut start = 0;
            while start < fetching {
                let line = start / STEPS;
                let output = outputs[line / lines].wrapping_add(line % lines * of_line * I::LANES);
                isa.prefetch_output(output.cast_const().cast());
                ahead.fetch(isa);
                b = steps(isa, &mut sums, &input, b, start);
                start += STEPS;
            }
            while start < whole {
                ahead.fetch(isa);
                b = steps(isa, &mut sums, &input, b, start);
                start += STEPS;
            }
            for i in whole..k {
                step(isa, &mut sums, &input, b, i);
                b = b.add(V * I::LANES);
            }
        }
        (sums, ahead)
    }
}

/// [`STEPS`] inner indices from `start` on. Returns what follows in the panel.
///
/// # Safety
/// As [`step`].
#[inline(always)]
unsafe fn steps<I: Isa, const G: usize, const V: usize>(
    isa: I,
    acc: &mut [[I::V; V]; G],
    input: &[*const f32; G],
    mut b: *const f32,
    start: usize,
) -> *const f32 {
    // A constant trip count, so that the loop is unrolled.
    for i in 0..STEPS {
        // SAFETY: the caller's contract.
        unsafe {
            step(isa, acc, input, b, start + i);
            b = b.add(V * I::LANES);
        }
    }
    b
}

/// One inner index: multiplies a row of the panel, at `b`, by one element of each input and accumulates.
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
