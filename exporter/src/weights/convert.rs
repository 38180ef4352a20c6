//! Elements on their way: checked, converted, and transposed.

use super::Block;
use crate::error::Error;
use crate::graph::{ElementType, Initializer, Source};
use half::slice::HalfFloatSliceExt;
use moh_models::checkpoint::Place;
use moh_models::{Weight, WeightType};

/// Elements that stay in a core's cache from one step to the next.
const STEP: usize = 2048;

/// Columns of a matrix to be transposed that are converted before they are put in their places.
const COLUMNS: usize = 512;

/// Blocks of fewer bytes are not worth a second thread.
const SHARED: usize = 256 << 10;

/// Checks and converts blocks, on two threads.
#[derive(Default)]
pub(super) struct Converter {
    workers: [Worker; 2],
}

/// What a thread keeps from one block to the next.
#[derive(Default)]
struct Worker {
    values: Vec<f32>,
    rows: Vec<u8>,
}

impl Converter {
    /// Puts a block, whose elements are `bytes`, into `out`: its own place, or that of the band of columns that it is a part of.
    pub(super) fn convert(
        &mut self,
        init: &Initializer,
        block: &Block,
        bytes: &[u8],
        out: &mut [u8],
    ) -> Result<(), Error> {
        let Source::Weight { weight, .. } = &init.source else { return Ok(()) };
        let (first, ty) = (block.elements.start, init.ty);
        let [one, other] = &mut self.workers;
        let Some(columns) = block.columns.clone() else {
            let middle = if bytes.len() < SHARED { block.elements.len() } else { block.elements.len() / 2 };
            let (bytes, more) = bytes.split_at(middle * weight.dtype().bytes());
            let (out, rest) = out.split_at_mut(middle * ty.size());
            return both(
                || convert(weight, ty, first, bytes, out, &mut one.values),
                (!more.is_empty()).then_some(|| convert(weight, ty, first + middle, more, rest, &mut other.values)),
            );
        };
        let height = weight.shape()[0];
        let middle = if bytes.len() < SHARED { columns.end } else { columns.start + columns.len() / 2 };
        let (out, rest) = out.split_at_mut((middle - columns.start) * height * ty.size());
        let strip = |columns| Strip { weight, ty, first, bytes, columns };
        both(
            || strip(columns.start..middle).transpose(out, one),
            (middle < columns.end).then_some(|| strip(middle..columns.end).transpose(rest, other)),
        )
    }
}

/// Does both at the same time.
fn both(
    one: impl FnOnce() -> Result<(), Error>,
    other: Option<impl FnOnce() -> Result<(), Error> + Send>,
) -> Result<(), Error> {
    let Some(other) = other else { return one() };
    std::thread::scope(|scope| {
        let other = scope.spawn(other);
        let first = one();
        first.and(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// Some columns of a block of rows of a matrix.
struct Strip<'a> {
    weight: &'a Weight,
    ty: ElementType,
    /// The index of the rows' first element.
    first: usize,
    /// The rows, whole.
    bytes: &'a [u8],
    columns: std::ops::Range<usize>,
}

impl Strip<'_> {
    /// Puts the elements into their places in `out`, which holds these columns of the whole matrix, one after the other.
    fn transpose(&self, out: &mut [u8], worker: &mut Worker) -> Result<(), Error> {
        let (height, width) = (self.weight.shape()[0], self.weight.shape()[1]);
        let (from, to) = (self.weight.dtype().bytes(), self.ty.size());
        let count = self.bytes.len() / (width * from).max(1);
        for start in self.columns.clone().step_by(COLUMNS) {
            let end = self.columns.end.min(start + COLUMNS);
            let row = (end - start) * to;
            if worker.rows.len() < count * row {
                worker.rows.resize(count * row, 0);
            }
            let rows = worker.rows[..count * row].chunks_exact_mut(row);
            for (i, (elements, converted)) in self.bytes.chunks_exact(width * from).zip(rows).enumerate() {
                let first = self.first + i * width + start;
                let elements = &elements[start * from..end * from];
                convert(self.weight, self.ty, first, elements, converted, &mut worker.values)?;
            }
            let out = &mut out[(start - self.columns.start) * height * to..];
            let (rows, target) = (&worker.rows[..count * row], (out, height, self.first / width));
            match to {
                2 => transpose::<2, 32>(rows, end - start, target),
                _ => transpose::<4, 16>(rows, end - start, target),
            }
        }
        Ok(())
    }
}

/// Puts rows of `width` elements of `N` bytes into columns `first` and following of a matrix that has `height` columns.
/// `ACROSS` of them fill a line of the cache.
fn transpose<const N: usize, const ACROSS: usize>(
    rows: &[u8],
    width: usize,
    (out, height, first): (&mut [u8], usize, usize),
) {
    /// Rows that are copied to a place of their own before they are written: elements of one column of a large matrix keep each
    /// other out of the cache. As many as fit there, because each column of the result lies in a page of its own.
    const DOWN: usize = 256;
    let (rows, out) = (rows.as_chunks::<N>().0, out.as_chunks_mut::<N>().0);
    let mut tile = [[[0; N]; ACROSS]; DOWN];
    for (band, rows) in rows.chunks(width * DOWN).enumerate() {
        let count = rows.len() / width;
        for start in (0..width).step_by(ACROSS) {
            let columns = ACROSS.min(width - start);
            for (copy, row) in tile.iter_mut().zip(rows.chunks_exact(width)) {
                match row[start..start + columns].first_chunk::<ACROSS>() {
                    Some(row) => *copy = *row,
                    None => copy[..columns].copy_from_slice(&row[start..start + columns]),
                }
            }
            for column in 0..columns {
                let at = (start + column) * height + first + band * DOWN;
                for (element, row) in out[at..at + count].iter_mut().zip(&tile) {
                    *element = row[column];
                }
            }
        }
    }
}

/// Puts the elements of `weight` from `first` on, which are `bytes`, into `out` as elements of `ty`.
fn convert(
    weight: &Weight,
    ty: ElementType,
    first: usize,
    bytes: &[u8],
    out: &mut [u8],
    values: &mut Vec<f32>,
) -> Result<(), Error> {
    let (dtype, size) = (weight.dtype(), weight.dtype().bytes());
    for (i, (bytes, out)) in bytes.chunks(STEP * size).zip(out.chunks_mut(STEP * ty.size())).enumerate() {
        if may_not_fit(dtype, ty, bytes) {
            values.clear();
            dtype.append_f32(bytes, values);
            check(weight, ty, first + i * STEP, values)?;
        }
        match (dtype, ty) {
            (WeightType::F32, ElementType::F32)
            | (WeightType::F16, ElementType::F16)
            | (WeightType::BF16, ElementType::BF16) => out.copy_from_slice(bytes),
            (WeightType::BF16, ElementType::F32) => {
                let elements = bytes.as_chunks::<2>().0.iter().zip(out.as_chunks_mut::<4>().0);
                elements.for_each(|(&[low, high], wide)| *wide = [0, 0, low, high]);
            }
            _ => {
                values.clear();
                dtype.append_f32(bytes, values);
                put(ty, values, out);
            }
        }
    }
    Ok(())
}

/// The largest finite number of a type, and then half of a step: what rounds to infinity.
fn limit(ty: ElementType) -> f32 {
    if ty == ElementType::F16 { 65_520.0 } else { f32::INFINITY }
}

/// Whether one of the elements may be one that `ty` cannot hold; fast, and true where that takes a conversion to see.
fn may_not_fit(dtype: WeightType, ty: ElementType, bytes: &[u8]) -> bool {
    // As integers, magnitudes are in the order of the numbers, with infinity and NaN at the end. Without an exit inside, the loops
    // are vectorised.
    let halves = || {
        let elements = bytes.as_chunks::<2>().0.iter();
        elements.fold(0, |largest, &bytes| (i16::from_le_bytes(bytes) & i16::MAX).max(largest)) as u32
    };
    let limit = limit(ty).to_bits();
    match dtype {
        WeightType::F32 => {
            let elements = bytes.as_chunks::<4>().0.iter();
            let largest = elements.fold(0, |largest, &bytes| (i32::from_le_bytes(bytes) & i32::MAX).max(largest));
            largest.cast_unsigned() >= limit
        }
        WeightType::BF16 => halves() >= limit.div_ceil(1 << 16),
        WeightType::F16 => halves() >= u32::from(half::f16::INFINITY.to_bits()),
        _ => true,
    }
}

/// Whether `ty` can hold the elements of `weight` from `first` on, which are `values`.
pub(crate) fn check(weight: &Weight, ty: ElementType, first: usize, values: &[f32]) -> Result<(), Error> {
    let limit = limit(ty);
    let fits = |value: &f32| value.abs() < limit;
    let Some((i, &value)) = values.iter().enumerate().find(|(_, value)| !fits(value)) else { return Ok(()) };
    if !value.is_finite() {
        return Err(weight.not_finite(first + i, f64::from(value)).into());
    }
    let Place { file, tensor, index } = weight.place(first + i);
    Err(Error::Range { file: file.to_owned(), tensor: tensor.to_owned(), index, value, ty })
}

/// Puts the values, which are finite, into `out` as little-endian elements of `ty`.
pub(crate) fn put(ty: ElementType, values: &[f32], out: &mut [u8]) {
    match ty {
        ElementType::F16 => {
            // In blocks, because the conversion of a slice uses the processor's instruction, and that of one element does not.
            let mut block = [half::f16::ZERO; 512];
            for (bytes, values) in out.chunks_mut(2 * block.len()).zip(values.chunks(block.len())) {
                let block = &mut block[..values.len()];
                block.convert_from_f32_slice(values);
                let elements = bytes.as_chunks_mut::<2>().0.iter_mut();
                elements.zip(block).for_each(|(element, value)| *element = value.to_le_bytes());
            }
        }
        ElementType::BF16 => {
            // To the nearest, and of two equally near ones to the even one.
            let rounded = |v: f32| {
                let bits = v.to_bits();
                ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
            };
            let elements = out.as_chunks_mut::<2>().0.iter_mut();
            elements.zip(values).for_each(|(element, &v)| *element = rounded(v).to_le_bytes());
        }
        _ => {
            let elements = out.as_chunks_mut::<4>().0.iter_mut();
            elements.zip(values).for_each(|(element, v)| *element = v.to_le_bytes());
        }
    }
}
