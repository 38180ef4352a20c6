//! A matrix of the checkpoint as rows (out, in) whose blocks are quantised, part by part.

use super::search::{Block, Grid};
use crate::error::Error;
use crate::graph::ElementType;
use crate::weights::check;
use moh_models::Weight;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Numbers that a thread reads at a time from a matrix in the order of its rows.
const STEP: usize = 1 << 20;

/// Numbers of a matrix in the order of its columns that are in memory at a time: the rest is passed over for each part.
const BAND: usize = if cfg!(test) { 1 << 10 } else { 1 << 24 };

/// Threads at most: each has a part in memory.
const MAX_THREADS: usize = 8;

/// One or several matrices (out, in), their rows one below the other, and what they are quantised to.
#[derive(Debug, Clone)]
pub struct Matrix(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    weight: Weight,
    grid: Grid,
    block: usize,
    /// Whether the checkpoint has them as (in, out).
    by_columns: bool,
    /// Columns of a row: in.
    columns: usize,
    /// Rows of one of the matrices: out.
    rows: usize,
    matrices: usize,
    sums: OnceLock<Sums>,
}

/// Sums of the squares of a matrix's errors, and of its numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Sums {
    pub(crate) error: f64,
    pub(crate) squares: f64,
}

/// Quantised rows, or the same columns of rows.
#[derive(Debug, Default)]
pub(crate) struct Quantized {
    /// (rows, columns), counted from 0.
    pub(crate) codes: Vec<u8>,
    /// (rows, blocks).
    pub(crate) scales: Vec<f32>,
    /// (rows, blocks).
    pub(crate) zero_points: Vec<u8>,
}

impl Matrix {
    /// The rows of a matrix (out, in); or of matrices (.., in, out) where `by_columns`.
    pub(crate) fn new(weight: &Weight, by_columns: bool, grid: Grid, block: usize) -> Matrix {
        let shape = weight.shape();
        let (first, last) = (shape[shape.len() - 2], shape[shape.len() - 1]);
        let matrices = shape[..shape.len() - 2].iter().product();
        let (rows, columns) = if by_columns { (last, first) } else { (first, last) };
        let weight = weight.clone();
        Matrix(Arc::new(Inner { weight, grid, block, by_columns, columns, rows, matrices, sums: OnceLock::new() }))
    }

    /// The tensor.
    pub fn weight(&self) -> &Weight {
        &self.0.weight
    }

    /// The same of another tensor: of this one in another shape, or of rows of it.
    pub(crate) fn of_other(&self, weight: &Weight) -> Matrix {
        let weight = match weight.elements() == self.0.weight.elements() {
            true => weight.reshaped(self.0.weight.shape()),
            false => weight.clone(),
        };
        Matrix::new(&weight, self.0.by_columns, self.0.grid, self.0.block)
    }

    /// How many matrices the rows are of.
    pub(crate) fn matrices(&self) -> usize {
        self.0.matrices
    }

    /// The type of scales.
    pub(crate) fn scale_type(&self) -> ElementType {
        self.0.grid.scale
    }

    pub(crate) fn grid(&self) -> Grid {
        self.0.grid
    }

    /// Numbers of a block.
    pub fn block(&self) -> usize {
        self.0.block
    }

    /// Rows of all matrices.
    pub(crate) fn rows(&self) -> usize {
        self.0.rows * self.0.matrices
    }

    /// Length of a row.
    pub(crate) fn columns(&self) -> usize {
        self.0.columns
    }

    /// What [`Matrix::note`] was told first.
    pub(crate) fn sums(&self) -> Option<Sums> {
        self.0.sums.get().copied()
    }

    /// Keeps the sums of the whole matrix.
    pub(crate) fn note(&self, sums: Sums) {
        // They are the same each time.
        let _ = self.0.sums.set(sums);
    }

    /// Whether both are the same tensor quantised in the same way.
    pub(crate) fn same(&self, other: &Matrix) -> bool {
        let of = |m: &Matrix| (m.0.weight.name().to_owned(), m.0.weight.shape().to_vec(), m.0.block, m.0.by_columns);
        of(self) == of(other) && self.0.grid == other.0.grid
    }

    /// The rows in parts that fit into memory, in order. Parts of an even number of rows, but for the last one of a matrix.
    pub(crate) fn parts(&self) -> Vec<Range<usize>> {
        let numbers = if self.0.by_columns { BAND } else { STEP * threads() };
        let step = ((numbers / self.0.columns.max(1)) & !1).max(2);
        // A part of a matrix in the order of its columns must not reach into the next one.
        let length = if self.0.by_columns { self.0.rows } else { self.rows() };
        let of_one =
            |start: usize| (start..start + length).step_by(step).map(move |at| at..(at + step).min(start + length));
        (0..self.rows()).step_by(length.max(1)).flat_map(of_one).collect()
    }

    /// Quantises `columns`, whole blocks, of a part, on `threads` threads; and the sums of each row. The result does not depend on
    /// the number of threads.
    ///
    /// # Errors
    /// A file that cannot be read; a number that is not finite, or beyond the type of the scales.
    pub(crate) fn quantize(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
        threads: usize,
    ) -> Result<(Quantized, Vec<Sums>), Error> {
        let values = if self.0.by_columns { self.read_by_columns(rows.clone(), &columns)? } else { Vec::new() };
        let (width, blocks) = (columns.len(), columns.len() / self.0.block);
        let mut all = Quantized {
            codes: vec![0; rows.len() * width],
            scales: vec![0.0; rows.len() * blocks],
            zero_points: vec![0; rows.len() * blocks],
        };
        let mut sums = vec![Sums::default(); rows.len()];
        let share = rows.len().div_ceil(threads.max(1)).max(1);
        let parts = (all.codes.chunks_mut(share * width).zip(all.scales.chunks_mut(share * blocks)))
            .zip(all.zero_points.chunks_mut(share * blocks).zip(sums.chunks_mut(share)));
        let one = |i: usize, ((codes, scales), (zeros, sums)): Parts<'_>| {
            let first = i * share;
            let own = match self.0.by_columns {
                true => Vec::new(),
                false => self.read_rows(rows.start + first..rows.start + first + sums.len(), &columns)?,
            };
            let values = if self.0.by_columns { &values[first * width..][..sums.len() * width] } else { &own[..] };
            for row in 0..sums.len() {
                let of = |all: usize| row * all..(row + 1) * all;
                let out = (&mut codes[of(width)], &mut scales[of(blocks)], &mut zeros[of(blocks)]);
                sums[row] = self.quantize_row(&values[of(width)], out);
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let one = &one;
            let running: Vec<_> = parts.enumerate().map(|(i, part)| scope.spawn(move || one(i, part))).collect();
            let ends = running.into_iter().map(|thread| thread.join().unwrap_or_else(|p| std::panic::resume_unwind(p)));
            // All have ended before the first error is told.
            ends.collect::<Vec<Result<(), Error>>>().into_iter().collect::<Result<(), Error>>()
        })?;
        Ok((all, sums))
    }

    fn quantize_row(&self, values: &[f32], (codes, scales, zeros): (&mut [u8], &mut [f32], &mut [u8])) -> Sums {
        let size = self.0.block;
        let mut sums = Sums::default();
        let blocks = values.chunks(size).zip(codes.chunks_mut(size));
        for ((values, codes), (scale_out, zero_out)) in blocks.zip(scales.iter_mut().zip(zeros)) {
            let Block { scale, zero_point, error, squares } = self.0.grid.quantize(values, codes);
            (*scale_out, *zero_out) = (scale, zero_point);
            sums.add(Sums { error, squares });
        }
        sums
    }

    /// `columns` of rows, from a matrix in the order of its rows.
    fn read_rows(&self, rows: Range<usize>, columns: &Range<usize>) -> Result<Vec<f32>, Error> {
        let Inner { weight, grid, columns: width, .. } = &*self.0;
        let (mut bytes, mut values) = (Vec::new(), Vec::with_capacity(rows.len() * columns.len()));
        let size = weight.dtype().bytes();
        let step = (STEP / width).max(1);
        for start in rows.clone().step_by(step) {
            weight.read(start * width..rows.end.min(start + step) * width, &mut bytes)?;
            for (row, bytes) in bytes.chunks(width * size).enumerate() {
                let first = values.len();
                weight.dtype().append_f32(&bytes[columns.start * size..columns.end * size], &mut values);
                check(weight, grid.scale, (start + row) * width + columns.start, &values[first..])?;
            }
        }
        Ok(values)
    }

    /// `columns` of rows, from one of matrices in the order of their columns.
    fn read_by_columns(&self, rows: Range<usize>, columns: &Range<usize>) -> Result<Vec<f32>, Error> {
        let Inner { weight, grid, columns: inner, rows: outer, .. } = &*self.0;
        let matrix = rows.start / outer;
        let rows = rows.start - matrix * outer..rows.end - matrix * outer;
        let mut values = vec![0.0; rows.len() * columns.len()];
        let (mut bytes, mut line) = (Vec::new(), Vec::new());
        let size = weight.dtype().bytes();
        let step = (STEP / outer).max(1);
        for start in columns.clone().step_by(step) {
            let first = (matrix * inner + start) * outer;
            let count = columns.end.min(start + step) - start;
            weight.read(first..first + count * outer, &mut bytes)?;
            for (i, bytes) in bytes.chunks(outer * size).enumerate() {
                line.clear();
                weight.dtype().append_f32(&bytes[rows.start * size..rows.end * size], &mut line);
                check(weight, grid.scale, first + i * outer + rows.start, &line)?;
                let column = start - columns.start + i;
                for (row, value) in line.iter().enumerate() {
                    values[row * columns.len() + column] = *value;
                }
            }
        }
        Ok(values)
    }

    /// The numbers that the quantised ones stand for, in the order of the checkpoint.
    ///
    /// # Errors
    /// As [`Matrix::quantize`].
    pub(crate) fn dequantized(&self) -> Result<Vec<f32>, Error> {
        let Inner { weight, block, by_columns, columns, rows, .. } = &*self.0;
        let mut values = vec![0.0; weight.elements()];
        for part in self.parts() {
            let (found, _) = self.quantize(part.clone(), 0..*columns, threads())?;
            for (i, codes) in found.codes.chunks(*block).enumerate() {
                let (scale, zero) = (found.scales[i], f32::from(found.zero_points[i]));
                let first = part.start * columns + i * block;
                for (j, code) in codes.iter().enumerate() {
                    let at = match by_columns {
                        false => first + j,
                        true => {
                            let (row, column) = ((first + j) / columns, (first + j) % columns);
                            (row / rows * columns + column) * rows + row % rows
                        }
                    };
                    values[at] = (f32::from(*code) - zero) * scale;
                }
            }
        }
        Ok(values)
    }
}

/// What a thread writes: integers and scales, zero points and sums.
type Parts<'a> = ((&'a mut [u8], &'a mut [f32]), (&'a mut [u8], &'a mut [Sums]));

impl Sums {
    /// Adds those of what comes next.
    pub(crate) fn add(&mut self, other: Sums) {
        self.error += other.error;
        self.squares += other.squares;
    }
}

/// As many as there are processors, up to a number.
pub(crate) fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS)
}
