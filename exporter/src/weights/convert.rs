//! Elements on their way: read, checked, converted, and transposed.

use super::Part;
use crate::error::Error;
use crate::graph::{ElementType, Initializer, Source};
use half::slice::HalfFloatSliceExt;
use moh_models::checkpoint::Place;
use moh_models::{Weight, WeightType};
use std::ops::Range;

/// Bytes that a thread reads at a time: they stay in its core's cache until they are converted.
pub(super) const CHUNK_BYTES: usize = 1 << 20;

/// Elements that are converted in one step.
const STEP: usize = 2048;

/// Columns of a matrix to be transposed that are converted before they are put in their places.
const COLUMNS: usize = 512;

/// Parts of fewer bytes are not worth a second thread.
const SHARED: usize = 256 << 10;

/// Reads, checks and converts weights, on two threads.
#[derive(Default)]
pub(super) struct Converter {
    workers: [Worker; 2],
}

/// What a thread keeps from one part to the next.
#[derive(Default)]
struct Worker {
    bytes: Vec<u8>,
    values: Vec<f32>,
    rows: Vec<u8>,
}

impl Converter {
    /// Makes a part of an initializer.
    pub(super) fn convert(&mut self, init: &Initializer, part: &Part, out: &mut [u8]) -> Result<(), Error> {
        let Source::Weight { weight, .. } = &init.source else { return Ok(()) };
        match part {
            Part::Elements(elements) => self.elements(weight, init.ty, elements, out),
            Part::Columns(columns) if init.ty.size() == 2 => self.columns::<2, 32>(weight, init.ty, columns, out),
            Part::Columns(columns) => self.columns::<4, 16>(weight, init.ty, columns, out),
        }
    }

    fn elements(
        &mut self,
        weight: &Weight,
        ty: ElementType,
        elements: &Range<usize>,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let [one, other] = &mut self.workers;
        let half = if out.len() < SHARED { elements.len() } else { elements.len() / 2 };
        let middle = elements.start + half;
        let (out, rest) = out.split_at_mut(half * ty.size());
        both(
            || one.elements(weight, ty, elements.start..middle, out),
            (!rest.is_empty()).then_some(|| other.elements(weight, ty, middle..elements.end, rest)),
        )
    }

    /// Of the transposed matrix, with elements of `N` bytes. The threads share the rows, which each reads in order.
    fn columns<const N: usize, const ACROSS: usize>(
        &mut self,
        weight: &Weight,
        ty: ElementType,
        columns: &Range<usize>,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let [one, other] = &mut self.workers;
        let height = weight.shape()[0];
        // Threads that write to the same line of the cache would wait for each other.
        let middle = if out.len() < SHARED { height } else { height.div_ceil(2).next_multiple_of(ACROSS).min(height) };
        let whole = out.as_chunks_mut::<N>().0.chunks_exact_mut(height.max(1));
        let (mut out, mut rest): (Vec<_>, Vec<_>) = whole.map(|column| column.split_at_mut(middle)).unzip();
        both(
            || one.columns::<N, ACROSS>(weight, ty, 0..middle, columns, &mut out),
            (middle < height).then_some(|| other.columns::<N, ACROSS>(weight, ty, middle..height, columns, &mut rest)),
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

impl Worker {
    fn elements(
        &mut self,
        weight: &Weight,
        ty: ElementType,
        elements: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let step = (CHUNK_BYTES / weight.dtype().bytes()).max(1);
        for (start, out) in elements.clone().step_by(step).zip(out.chunks_mut(step * ty.size())) {
            weight.read(start..elements.end.min(start + step), &mut self.bytes)?;
            convert(weight, ty, start, &self.bytes, out, &mut self.values)?;
        }
        Ok(())
    }

    /// Puts `rows` of the matrix into `out`, which has the places of their elements in each of `columns`.
    fn columns<const N: usize, const ACROSS: usize>(
        &mut self,
        weight: &Weight,
        ty: ElementType,
        rows: Range<usize>,
        columns: &Range<usize>,
        out: &mut [&mut [[u8; N]]],
    ) -> Result<(), Error> {
        let (width, size) = (weight.shape()[1], weight.dtype().bytes());
        let step = (CHUNK_BYTES / (width * size).max(1)).max(1);
        for first in rows.clone().step_by(step) {
            let count = step.min(rows.end - first);
            weight.read(first * width..(first + count) * width, &mut self.bytes)?;
            for start in columns.clone().step_by(COLUMNS) {
                let end = columns.end.min(start + COLUMNS);
                self.rows.resize(count * (end - start) * N, 0);
                let converted = self.rows.chunks_exact_mut((end - start) * N);
                for (row, (elements, converted)) in self.bytes.chunks_exact(width * size).zip(converted).enumerate() {
                    let index = (first + row) * width + start;
                    let elements = &elements[start * size..end * size];
                    convert(weight, ty, index, elements, converted, &mut self.values)?;
                }
                let out = &mut out[start - columns.start..end - columns.start];
                transpose::<N, ACROSS>(self.rows.as_chunks().0, out, first - rows.start);
            }
        }
        Ok(())
    }
}

/// Puts rows, one after the other, into the places `first` and following of columns. `ACROSS` elements fill a line of the cache.
fn transpose<const N: usize, const ACROSS: usize>(rows: &[[u8; N]], out: &mut [&mut [[u8; N]]], first: usize) {
    /// Rows that are copied to a place of their own before they are written: elements of one column of a large matrix keep each
    /// other out of the cache. As many as fit there, because each column of the result lies in a page of its own.
    const DOWN: usize = 256;
    let width = out.len();
    let mut tile = [[[0; N]; ACROSS]; DOWN];
    for (band, rows) in rows.chunks(width * DOWN).enumerate() {
        let count = rows.len() / width;
        let first = first + band * DOWN;
        for (start, columns) in (0..width).step_by(ACROSS).zip(out.chunks_mut(ACROSS)) {
            for (copy, row) in tile.iter_mut().zip(rows.chunks_exact(width)) {
                match row[start..].first_chunk::<ACROSS>() {
                    Some(row) => *copy = *row,
                    None => copy[..columns.len()].copy_from_slice(&row[start..]),
                }
            }
            for (column, out) in columns.iter_mut().enumerate() {
                for (element, row) in out[first..first + count].iter_mut().zip(&tile) {
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
    match ty {
        ElementType::F16 => 65_520.0,
        ElementType::BF16 => f32::from_bits(0x7f7f_8000),
        _ => f32::INFINITY,
    }
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
