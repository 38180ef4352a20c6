//! Quantised matrices as bytes of the file: integers, scales and zero points, in the order of one of the forms.

use super::matrix::{Matrix, Quantized, Sums, threads};
use crate::background::Buffer;
use crate::error::Error;
use crate::graph::ElementType;
use crate::weights::put;
use std::ops::Range;

/// Bytes of a matrix in the order of its columns that are in memory at a time: the whole matrix is read for each.
const BAND_BYTES: usize = if cfg!(test) { 1 << 10 } else { 64 << 20 };

/// The order in which a matrix (out, in) is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Order {
    /// (out, in / block, block), as `MatMulNBits` and the operators of `ai.moh` read it: counted from 0.
    Rows,
    /// (in, out), as `DequantizeLinear` and `MatMul` read it: signed where there are no zero points.
    Columns,
}

/// One of the tensors that a quantised matrix is stored as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Piece {
    /// Integers.
    Data,
    /// Scales.
    Scales,
    /// Zero points.
    ZeroPoints,
}

/// Scales and zero points, which follow the integers in the file.
#[derive(Debug, Default)]
pub(crate) struct Sides {
    pub(crate) scales: Vec<u8>,
    pub(crate) zero_points: Vec<u8>,
}

/// Where bytes go to.
pub(crate) trait Sink {
    /// What was not yet handed over.
    fn part(&mut self) -> &mut Buffer;
    /// Hands it over, or not.
    ///
    /// # Errors
    /// [`Error::Io`].
    fn made(&mut self) -> Result<(), Error>;
}

impl Sink for Buffer {
    fn part(&mut self) -> &mut Buffer {
        self
    }

    fn made(&mut self) -> Result<(), Error> {
        Ok(())
    }
}

impl Order {
    /// Element type and dimensions of a piece of `matrix`.
    pub(crate) fn tensor(self, matrix: &Matrix, piece: Piece) -> (ElementType, Vec<usize>) {
        let (rows, columns) = (matrix.rows(), matrix.columns());
        let (bits, blocks) = (matrix.grid().bits.count(), columns / matrix.block());
        match (self, piece) {
            (Order::Rows, Piece::Data) => (ElementType::U8, vec![rows, blocks, matrix.block() * bits / 8]),
            (Order::Rows, Piece::Scales) => (matrix.grid().scale, vec![rows, blocks]),
            (Order::Rows, Piece::ZeroPoints) => (ElementType::U8, vec![rows, (blocks * bits).div_ceil(8)]),
            (Order::Columns, Piece::Data) => (integers(matrix), vec![columns, rows]),
            (Order::Columns, Piece::Scales) => (matrix.grid().scale, vec![blocks, rows]),
            (Order::Columns, Piece::ZeroPoints) => (integers(matrix), vec![blocks, rows]),
        }
    }

    /// Quantises the matrix and writes its integers; returns the rest.
    ///
    /// # Errors
    /// Those of [`Matrix::quantize`] and of the sink.
    pub(crate) fn write(self, matrix: &Matrix, out: &mut dyn Sink) -> Result<Sides, Error> {
        let mut sides = Sides::default();
        let mut all = Sums::default();
        match self {
            Order::Rows => {
                for rows in matrix.parts() {
                    let (found, sums) = matrix.quantize(rows, 0..matrix.columns(), threads())?;
                    sums.into_iter().for_each(|sums| all.add(sums));
                    pack_rows(matrix, &found, out.part(), &mut sides);
                    out.made()?;
                }
            }
            Order::Columns => {
                for band in bands(matrix) {
                    let mut columns = Columns::new(matrix, &band, out.part());
                    for rows in matrix.parts() {
                        let (found, sums) = matrix.quantize(rows.clone(), band.clone(), threads())?;
                        sums.into_iter().for_each(|sums| all.add(sums));
                        columns.put(&found, rows.start, out.part());
                    }
                    columns.finish(&mut sides);
                    out.made()?;
                }
                if matrix.grid().bits.count() == 4 {
                    // Elements of 4 bits follow each other without regard to rows.
                    let codes = std::mem::take(&mut sides.zero_points);
                    sides.zero_points.resize(codes.len().div_ceil(2), 0);
                    put_integers(4, &codes, 0, &mut sides.zero_points);
                }
            }
        }
        matrix.note(all);
        Ok(sides)
    }
}

/// The type of integers in the order of columns.
fn integers(matrix: &Matrix) -> ElementType {
    match (matrix.grid().bits.count(), matrix.grid().zero_points) {
        (4, false) => ElementType::I4,
        (4, true) => ElementType::U4,
        (_, false) => ElementType::I8,
        (_, true) => ElementType::U8,
    }
}

/// Appends numbers as elements of `ty`.
fn append(ty: ElementType, values: &[f32], bytes: &mut Vec<u8>) {
    let start = bytes.len();
    bytes.resize(start + values.len() * ty.size(), 0);
    put(ty, values, &mut bytes[start..]);
}

/// Appends rows one after the other.
fn pack_rows(matrix: &Matrix, found: &Quantized, out: &mut Buffer, sides: &mut Sides) {
    append(matrix.grid().scale, &found.scales, &mut sides.scales);
    let blocks = matrix.columns() / matrix.block();
    match matrix.grid().bits.count() {
        4 => {
            let pairs = found.codes.as_chunks::<2>().0;
            out.grow(pairs.len()).iter_mut().zip(pairs).for_each(|(byte, [low, high])| *byte = low | high << 4);
            for zeros in found.zero_points.chunks(blocks) {
                let pair = |pair: &[u8]| pair[0] | pair.get(1).copied().unwrap_or(0) << 4;
                sides.zero_points.extend(zeros.chunks(2).map(pair));
            }
        }
        _ => {
            out.put(&found.codes);
            sides.zero_points.extend_from_slice(&found.zero_points);
        }
    }
}

/// The columns that are written at a time: whole blocks.
fn bands(matrix: &Matrix) -> Vec<Range<usize>> {
    let block = matrix.block();
    let of_one = matrix.rows() * block * matrix.grid().bits.count() / 8;
    let step = (BAND_BYTES / of_one.max(1)).max(1) * block;
    (0..matrix.columns()).step_by(step).map(|start| start..matrix.columns().min(start + step)).collect()
}

/// A band of columns in the making.
struct Columns {
    bits: usize,
    /// What makes an integer signed.
    sign: u8,
    height: usize,
    columns: usize,
    blocks: usize,
    scale: ElementType,
    /// Bytes of the band, which ends the part of the file.
    size: usize,
    /// (blocks, rows).
    scales: Vec<f32>,
    zero_points: Vec<u8>,
}

impl Columns {
    fn new(matrix: &Matrix, band: &Range<usize>, out: &mut Buffer) -> Columns {
        let (height, blocks) = (matrix.rows(), band.len() / matrix.block());
        let bits = matrix.grid().bits.count();
        let size = (band.len() * height * bits).div_ceil(8);
        // Elements of 4 bits are added to what is there.
        out.grow(size).fill(0);
        Columns {
            bits,
            sign: if matrix.grid().zero_points { 0 } else { matrix.grid().middle() },
            height,
            columns: band.len(),
            blocks,
            scale: matrix.grid().scale,
            size,
            scales: vec![0.0; blocks * height],
            zero_points: if matrix.grid().zero_points { vec![0; blocks * height] } else { Vec::new() },
        }
    }

    /// Puts rows `first` and following into their columns.
    fn put(&mut self, found: &Quantized, first: usize, out: &mut Buffer) {
        let rows = found.codes.len() / self.columns;
        // Two columns are whole bytes, whatever the number of rows.
        let share = self.columns.div_ceil(threads()).next_multiple_of(2);
        let parts = out.last(self.size).chunks_mut((share * self.height * self.bits / 8).max(1));
        std::thread::scope(|scope| {
            for (i, part) in parts.enumerate() {
                let columns = i * share..self.columns.min((i + 1) * share);
                let this = &*self;
                scope.spawn(move || this.put_columns(&found.codes, (first, rows), columns, part));
            }
        });
        for row in 0..rows {
            for block in 0..self.blocks {
                let (from, to) = (row * self.blocks + block, block * self.height + first + row);
                self.scales[to] = found.scales[from];
                if let Some(zero) = self.zero_points.get_mut(to) {
                    *zero = found.zero_points[from];
                }
            }
        }
    }

    /// Puts `rows` rows of the integers of `columns` into `out`, which begins with the first of these columns.
    fn put_columns(&self, codes: &[u8], (first, rows): (usize, usize), columns: Range<usize>, out: &mut [u8]) {
        /// Rows that are copied to a place of their own first: elements of one column keep each other out of the cache.
        const TILE: usize = 64;
        let mut tile = [[0u8; TILE]; TILE];
        for top in (0..rows).step_by(TILE) {
            let count = TILE.min(rows - top);
            for left in columns.clone().step_by(TILE) {
                let width = TILE.min(columns.end - left);
                for row in 0..count {
                    let line = &codes[(top + row) * self.columns + left..][..width];
                    for (column, code) in line.iter().enumerate() {
                        tile[column][row] = code ^ self.sign;
                    }
                }
                for (column, line) in tile.iter().enumerate().take(width) {
                    let at = (left - columns.start + column) * self.height + first + top;
                    put_integers(self.bits, &line[..count], at, out);
                }
            }
        }
    }

    fn finish(self, sides: &mut Sides) {
        append(self.scale, &self.scales, &mut sides.scales);
        sides.zero_points.extend_from_slice(&self.zero_points);
    }
}

/// Puts integers into `out` from element `at` on. Those of 4 bits must be 0 before.
fn put_integers(bits: usize, codes: &[u8], at: usize, out: &mut [u8]) {
    if bits == 8 {
        out[at..at + codes.len()].copy_from_slice(codes);
    } else if at.is_multiple_of(2) && codes.len().is_multiple_of(2) {
        for (byte, [low, high]) in out[at / 2..].iter_mut().zip(codes.as_chunks::<2>().0) {
            *byte = (low & 15) | high << 4;
        }
    } else {
        for (i, code) in codes.iter().enumerate() {
            out[(at + i) / 2] |= (code & 15) << (4 * ((at + i) % 2));
        }
    }
}
