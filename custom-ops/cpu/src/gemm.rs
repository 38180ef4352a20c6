//! Matrix products for selected rows of a matrix: a blocked product in register tiles, with a weight packed in advance
//! or per block; for a few rows, a product that reads the weight in place.
//!
//! Each result element is the same sum in the same order, however rows and columns are partitioned, so it does not
//! depend on the number of threads. Which product is used depends on the number of rows only.

mod pack;
mod panels;
mod rows;
mod stream;
mod tile;

use crate::host::Host;
use crate::isa::{Isa, MAX_LANES};
use crate::memory::{Memory, Sections};
use moh_operators::Error;
use moh_operators::{DType, Element, Float};
use pack::CopyInputs;
pub(crate) use panels::{Matrix, Panels};
pub(crate) use rows::{AddScaled, Store};
use std::ops::Range;
use stream::{Axpy, Dots};
pub(crate) use tile::{Ahead, Tiles, vectors};

/// How products of many rows are cut.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Blocks {
    /// Rows that are multiplied with a panel, at most.
    pub(crate) rows: usize,
    /// Floats of the left matrix per block of the inner dimension: they stay in the L2 cache while panels are read.
    floats: usize,
    /// Maximum inner length of a block.
    depth: usize,
}

/// A packed panel is reused often, and a panel's sums fit the L2 cache.
const BLOCKS: Blocks = Blocks { rows: 384, floats: 128 << 10, depth: 1024 };
/// For packed weights and narrow tiles, which read and write sums for fewer products: few blocks of many inner indices, and as many rows as fit the
/// cache beside them. (A weight that is not packed would be packed for each part of the rows.)
const NARROW: Blocks = Blocks { rows: 128, floats: 256 << 10, depth: 2048 };
/// Minimum inner length of a block.
const LEAST_DEPTH: usize = 128;
/// Maximum rows for which reading the weight in place is faster than packing it: if columns of the weight are
/// contiguous, and if its rows are.
const MAX_STREAMED: [usize; 2] = [stream::ROWS, 4];
/// Rows per pass over several products, so that their sums with a panel stay in the L1 cache.
const NEAR: usize = 96;

/// Whether products of so many rows read the weight in place for every layout. Each weight element is then read once.
pub(crate) fn few(rows: usize) -> bool {
    rows <= MAX_STREAMED[0].min(MAX_STREAMED[1])
}

/// A weight matrix.
#[derive(Debug)]
pub(crate) struct Weight<'a, T> {
    pub(crate) panels: Panels,
    pub(crate) source: Source<'a, T>,
}

impl<T> Weight<'_, T> {
    /// How products with it are cut.
    pub(crate) fn blocks<I: Isa>(&self) -> Blocks {
        match self.source {
            Source::Packed(_) if tile::vectors::<I>() == 2 => NARROW,
            _ => BLOCKS,
        }
    }
}

/// Storage of a weight's elements.
#[derive(Debug)]
pub(crate) enum Source<'a, T> {
    /// The tensor, read in place.
    Matrix(Matrix<T>),
    /// All panels, packed.
    Packed(&'a [f32]),
}

/// A row of the left matrix, starting at inner index 0, and of the result, starting at the first computed column.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    pub(crate) input: *const f32,
    pub(crate) output: *mut f32,
}

/// What sums are before products are added to them.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Start<'a> {
    /// What they are.
    Sums,
    /// They are undefined: the bias of each column, or 0.
    New(Option<&'a [f32]>),
}

impl<'a> Start<'a> {
    /// Of the products of a block of inner indices.
    pub(crate) fn of_block(k: &Range<usize>, bias: Option<&'a [f32]>) -> Start<'a> {
        if k.start == 0 { Start::New(bias) } else { Start::Sums }
    }
}

/// A subset of the rows, in ascending order, and the range of inner indices to multiply.
#[derive(Debug, Clone)]
pub(crate) struct Product<'a> {
    pub(crate) rows: &'a [u32],
    pub(crate) k: Range<usize>,
}

/// Packs all panels of `matrix`.
///
/// # Safety
/// `matrix` has the rows and columns of `panels`; `output` is valid for writing [`Panels::floats`] floats, all of which are written.
pub(super) unsafe fn pack_all<I: Isa, T: Element>(isa: I, matrix: &Matrix<T>, panels: &Panels, output: *mut f32) {
    for panel in 0..panels.len() {
        let (n, width) = (panels.columns(&(panel..panel + 1)), panels.width(panel));
        // SAFETY: the caller's contract: there is room for every panel.
        unsafe { matrix.pack(isa, 0..panels.k, n, output.add(panels.offset(panel, 0)), width) };
    }
}

/// Size of the packed weight in floats; `None` if it overflows the address space.
pub(super) fn floats(panels: &Panels) -> Option<usize> {
    panels.floats()
}

/// Stride of copied rows: an odd number of cache lines, to avoid conflicts in set-associative caches.
pub(crate) fn pitch(k: usize) -> usize {
    ((super::memory::pitch(k) / MAX_LANES) | 1) * MAX_LANES
}

/// Maximum number of rows to process at a time. Rows that are not f32 are converted, and the copies should fit the L2
/// cache.
pub(crate) fn rows_at_once<T: Element>(rows: usize, k: usize) -> usize {
    const COPIED: usize = 256 << 10;
    match T::FLOAT {
        Float::F32 => rows,
        _ => (COPIED / k.max(1)).clamp(16, rows.max(16)),
    }
}

/// A worker's state for products.
pub(crate) struct Gemm<'h> {
    panel: Memory<'h>,
    depth: usize,
    lines: Vec<Row>,
}

impl<'h> Gemm<'h> {
    /// State for products of at most `rows` rows with `weight`. The inner dimension is cut into blocks at multiples of
    /// `unit` if possible.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(crate) fn new<I: Isa, T>(
        rows: usize,
        unit: usize,
        weight: &Weight<'_, T>,
        host: &'h dyn Host,
    ) -> Result<Gemm<'h>, Error> {
        let k = weight.panels.k;
        let blocks = weight.blocks::<I>();
        let most = (blocks.floats / rows.max(1)).clamp(LEAST_DEPTH, blocks.depth);
        let unit = if unit <= most { unit } else { MAX_LANES };
        let depth = k.div_ceil(k.div_ceil(most).max(1)).next_multiple_of(unit).min(k).max(1);
        let mut sections = Sections::default();
        if let Source::Matrix(_) = weight.source {
            sections.add(depth, tile::vectors::<I>() * I::LANES)?;
        }
        Ok(Gemm { panel: sections.allocate(host)?, depth, lines: Vec::new() })
    }

    /// The blocks of an inner dimension of length `k`.
    pub(crate) fn blocks(&self, k: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let depth = self.depth;
        (0..k).step_by(depth).map(move |start| start..(start + depth).min(k))
    }

    /// Computes `products`, all in one block of the inner dimension, of the rows with one panel of `weight`. Results
    /// are added to `begin`, in the rows' outputs from `column` on. A bias has the panel's columns, of which none is padding. Returns the number of
    /// multiply-accumulate operations. `next` is the panel and the range of inner indices to prefetch.
    ///
    /// # Safety
    /// The rows' inputs are valid for reading the products' elements; their outputs for writing (if they have sums, also
    /// for reading) the panel's padded columns from `column` on. They do not overlap. The weight has all elements of
    /// its panels.
    pub(crate) unsafe fn multiply<I: Isa, T: Element>(
        &mut self,
        isa: I,
        rows: &[Row],
        products: &[Product<'_>],
        weight: &Weight<'_, T>,
        panel: usize,
        column: usize,
        next: Option<(usize, Range<usize>)>,
        begin: Start<'_>,
    ) -> u64 {
        let (Some(start), Some(end)) = (products.first().map(|p| p.k.start), products.last().map(|p| p.k.end)) else {
            return 0;
        };
        let Weight { panels, source } = weight;
        let width = panels.width(panel);
        let n = panels.columns(&(panel..panel + 1));
        if let Start::New(Some(bias)) = begin {
            assert_eq!(bias.len(), width, "a bias for every column of the panel");
        }
        let mut ahead = Ahead::default();
        let (b, limit) = match source {
            Source::Packed(data) => {
                if let Some((panel, k)) = next {
                    let packed = &data[panels.offset(panel, k.start)..][..k.len() * panels.width(panel)];
                    ahead = Ahead::new(packed.as_ptr().cast(), 0, 1, size_of_val(packed));
                }
                (data[panels.offset(panel, start)..][..(end - start) * width].as_ptr(), 0)
            }
            Source::Matrix(matrix) => {
                let limit = MAX_STREAMED[usize::from(matches!(matrix, Matrix::Columns { .. }))];
                if products.iter().any(|product| product.rows.len() > limit) {
                    assert!(end - start <= self.depth, "{} of at most {} inner indices", end - start, self.depth);
                    // SAFETY: the caller's contract; the panel's memory suffices for this depth and the widest panel.
                    unsafe { matrix.pack(isa, start..end, n.clone(), self.panel.at(0), width) };
                    if let Some((panel, k)) = next {
                        ahead = lines(matrix, k, panels.columns(&(panel..panel + 1)));
                    }
                }
                (self.panel.at(0).cast_const(), limit)
            }
        };
        let tiled = || products.iter().filter(|product| product.rows.len() > limit);
        let prefetches = tiled().map(|p| tile::prefetches(p.rows.len(), width / I::LANES, p.k.len())).sum();
        ahead = ahead.distribute(tiled().map(|product| product.rows.len()).sum(), prefetches);
        let mut macs = 0;
        for product in products.iter().filter(|product| product.rows.len() <= limit) {
            if let Source::Matrix(matrix) = source {
                // SAFETY: the caller's contract.
                unsafe { self.stream(isa, rows, product, matrix, n.clone(), column, begin) };
                macs += product.rows.len() * product.k.len() * n.len();
            }
        }
        // A single product reads and writes its sums only once, so it needs no passes.
        let near = if products.len() > 1 { NEAR } else { usize::MAX };
        let mut done = 0;
        while done < rows.len() {
            let end = done.saturating_add(near);
            for product in tiled() {
                let before = |row: usize| product.rows.partition_point(|&r| (r as usize) < row);
                let picked = &product.rows[before(done)..before(end)];
                let (vectors, k) = (width / I::LANES, product.k.clone());
                let b = b.wrapping_add((k.start - start) * width);
                ahead = isa.vectorize(Tiles { rows, picked, k, b, vectors, column, begin, ahead });
                macs += picked.len() * product.k.len() * width;
            }
            done = end;
        }
        macs as u64
    }

    /// A product of a few rows, reading the weight in place.
    ///
    /// # Safety
    /// As [`Gemm::multiply`].
    unsafe fn stream<I: Isa, T: Element>(
        &mut self,
        isa: I,
        rows: &[Row],
        product: &Product<'_>,
        matrix: &Matrix<T>,
        n: Range<usize>,
        column: usize,
        begin: Start<'_>,
    ) {
        self.lines.clear();
        for &row in product.rows {
            let Row { input, output } = rows[row as usize];
            self.lines.push(Row { input: input.wrapping_add(product.k.start), output });
            if let Start::New(Some(bias)) = begin {
                // SAFETY: the row's output is valid for writing the panel's columns, as many as the bias has.
                unsafe { output.add(column).copy_from_nonoverlapping(bias.as_ptr(), bias.len()) };
            }
        }
        let first = matches!(begin, Start::New(None));
        let (lines, k) = (self.lines.as_slice(), product.k.len());
        let (b, stride, columns) = (matrix.at(product.k.start, &n), matrix.stride(), n.len());
        match matrix {
            Matrix::Rows { .. } => isa.vectorize(Dots { lines, k, b, stride, columns, column, first }),
            Matrix::Columns { .. } => isa.vectorize(Axpy { lines, k, b, stride, columns, column, first }),
        }
    }
}

/// The memory of the weight's elements at inner indices `k` and columns `n` (of one block), to prefetch.
fn lines<T: Element>(matrix: &Matrix<T>, k: Range<usize>, n: Range<usize>) -> Ahead {
    let (rows, columns) = match matrix {
        Matrix::Rows { .. } => (n.len(), k.len()),
        Matrix::Columns { .. } => (k.len(), n.len()),
    };
    Ahead::new(matrix.at(k.start, &n).cast(), matrix.stride() * size_of::<T>(), rows, columns * size_of::<T>())
}

/// Rows of `width` elements of `x` as f32: in place if they are f32, else converted into `copies`, [`pitch`] apart.
/// Output pointers are null.
///
/// # Safety
/// `input(i)` is valid for reading `width` elements for every `i < count`; `copies` has room for all rows.
pub(crate) unsafe fn load<I: Isa, T: Element>(
    isa: I,
    count: usize,
    width: usize,
    input: impl Fn(usize) -> *const T,
    copies: &mut Memory<'_>,
    rows: &mut Vec<Row>,
) {
    let (copied, output) = (T::DTYPE != DType::F32, std::ptr::null_mut());
    rows.clear();
    for i in 0..count {
        let place = if copied { copies.at(i * pitch(width)).cast_const() } else { input(i).cast() };
        rows.push(Row { input: place, output });
    }
    if copied {
        isa.vectorize(CopyInputs { rows: count, input, k: width, output: copies.at(0), pitch: pitch(width) });
    }
}

/// Reserves the memory to which [`load`] converts.
pub(crate) fn copies<T: Element>(rows: usize, width: usize, sections: &mut Sections) -> Result<(), Error> {
    if T::DTYPE != DType::F32 {
        sections.add(rows, pitch(width))?;
    }
    Ok(())
}
