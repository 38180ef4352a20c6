//! The weight file: its plan, and the conversion of weights in small parts, so that memory does not grow with the model.

mod stream;

use crate::background;
use crate::error::Error;
use crate::graph::{ElementType, Graph, Initializer, Source};
use half::slice::HalfFloatSliceExt;
use moh_models::checkpoint::Place;
use moh_models::{Weight, WeightType};
use std::ops::Range;
use std::path::Path;

/// Bytes read at a time.
const CHUNK_BYTES: usize = 4 << 20;

/// Bytes of a transposed matrix that are in memory at a time: the largest matrices of the largest published model but one.
const BAND_BYTES: usize = if cfg!(test) { 4 << 20 } else { 112 << 20 };

/// Tensors shorter than this stay in the model file: shapes and scalars, which runtimes read while they load.
pub(crate) const INLINE_BYTES: usize = 1024;

/// Alignment of tensors in the weight file: what CUDA's libraries want, and more than any CPU does.
const ALIGNMENT: u64 = 256;

/// Where an export's weights go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Weights {
    /// Into a file beside the model.
    #[default]
    Copy,
    /// Into the model file, which holds up to 2 GB.
    Inline,
}

/// The largest message that protobuf allows, less what nodes, names and shapes may take.
const INLINE_LIMIT: u64 = (1 << 31) - (32 << 20);

/// Offsets of the large tensors in the weight file, by name, in order of offset.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    offsets: Vec<(String, u64)>,
    length: u64,
    inline: bool,
}

impl Plan {
    /// Places the large tensors of `graph`, for the model file `output`.
    ///
    /// # Errors
    /// [`Error::Inline`] where they do not fit into that file, and should.
    pub fn with(graph: &Graph, weights: Weights, output: &Path) -> Result<Plan, Error> {
        if weights == Weights::Copy {
            return Ok(Plan::new(graph));
        }
        let bytes = graph.initializers.iter().map(|init| init.bytes() as u64).sum();
        if bytes > INLINE_LIMIT {
            return Err(Error::Inline { path: output.to_owned(), bytes, limit: INLINE_LIMIT });
        }
        Ok(Plan { inline: true, ..Plan::default() })
    }

    /// Whether the model file holds that tensor itself.
    pub(crate) fn holds_inline(&self, init: &Initializer) -> bool {
        self.inline || init.bytes() < INLINE_BYTES
    }

    /// Places the large tensors of `graph` one after the other.
    pub fn new(graph: &Graph) -> Plan {
        let mut end = 0u64;
        let large = graph.initializers.iter().filter(|init| init.bytes() >= INLINE_BYTES);
        let place = |init: &Initializer| {
            let offset = end.next_multiple_of(ALIGNMENT);
            end = offset + init.bytes() as u64;
            (init.name.clone(), offset)
        };
        let offsets = large.map(place).collect();
        Plan { offsets, length: end, inline: false }
    }

    /// Bytes of the weight file.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Names and offsets.
    pub fn iter(&self) -> impl Iterator<Item = (&str, u64)> {
        self.offsets.iter().map(|(name, offset)| (name.as_str(), *offset))
    }
}

/// Writes the weight file that `plan` lays out; returns its length, 0 (and no file) where the model has no large tensor.
/// `progress` is told how many bytes of it are ready.
///
/// # Errors
/// [`Error::Io`]; a weight that is NaN or infinite, or beyond the file's type.
pub fn write_data(graph: &Graph, plan: &Plan, path: &Path, progress: &dyn Fn(u64)) -> Result<u64, Error> {
    let mut tensors = Vec::new();
    for (name, offset) in plan.iter() {
        let Some(init) = graph.initializers.iter().find(|init| init.name == name) else {
            return Err(moh_models::Error::Internal("a place in the weight file without a tensor").into());
        };
        tensors.push((offset, init));
    }
    if tensors.is_empty() {
        return Ok(0);
    }
    background::write(path, |out| stream::write(&tensors, out, progress))
}

/// Appends an initializer's elements, converted to its type.
///
/// # Errors
/// A checkpoint's file that cannot be read; a weight that is NaN or infinite, or beyond the type.
pub(crate) fn append_initializer(init: &Initializer, out: &mut Vec<u8>) -> Result<(), Error> {
    let (mut converter, mut bytes) = (Converter::default(), Vec::new());
    match &init.source {
        Source::Bytes(bytes) => out.extend_from_slice(bytes),
        Source::Weight { weight, .. } => {
            for block in blocks(init) {
                weight.read(block.elements.clone(), &mut bytes)?;
                converter.convert(init, &block, &bytes, out)?;
            }
        }
    }
    Ok(())
}

/// What of a weight is read and converted at a time.
struct Block {
    elements: Range<usize>,
    /// The columns that are wanted of these rows of a matrix that is to be transposed.
    columns: Option<Range<usize>>,
}

impl Block {
    /// Whether it is the first one of a band of a transposed matrix.
    fn begins_band(&self) -> bool {
        self.columns.is_some() && self.elements.start == 0
    }
}

/// The parts of an initializer's weight, in the order in which they are wanted.
///
/// A matrix to be transposed is read in blocks of rows, and written in bands of its columns. A band is as large as memory allows,
/// because the whole matrix is read for each.
fn blocks(init: &Initializer) -> Vec<Block> {
    let Source::Weight { weight, transposed } = &init.source else { return Vec::new() };
    let step = (CHUNK_BYTES / weight.dtype().bytes()).max(1);
    let parts = |all: usize, step: usize| (0..all).step_by(step).map(move |start| start..all.min(start + step));
    if !*transposed {
        return parts(weight.elements(), step).map(|elements| Block { elements, columns: None }).collect();
    }
    let (rows, columns) = (weight.shape()[0], weight.elements() / weight.shape()[0].max(1));
    let band = (BAND_BYTES / (rows * init.ty.size()).max(1)).clamp(1, columns.max(1));
    let in_band = |band: Range<usize>| {
        parts(rows, (step / columns.max(1)).max(1))
            .map(move |rows| Block { elements: rows.start * columns..rows.end * columns, columns: Some(band.clone()) })
    };
    parts(columns, band).flat_map(in_band).collect()
}

/// Checks and converts elements.
#[derive(Default)]
struct Converter {
    values: Vec<f32>,
    rows: Vec<u8>,
}

impl Converter {
    /// Adds a block, whose elements are `bytes`, to `out`, which ends where the block before it has ended.
    fn convert(&mut self, init: &Initializer, block: &Block, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), Error> {
        let Source::Weight { weight, .. } = &init.source else { return Ok(()) };
        let (first, ty) = (block.elements.start, init.ty);
        let Some(columns) = &block.columns else { return self.append(weight, ty, first, bytes, out) };
        let (height, width) = (weight.shape()[0], weight.shape()[1]);
        let size = weight.dtype().bytes();
        let mut rows = std::mem::take(&mut self.rows);
        rows.clear();
        match columns.len() == width {
            true => self.append(weight, ty, first, bytes, &mut rows)?,
            false => {
                for (row, elements) in bytes.chunks(width * size).enumerate() {
                    let wanted = &elements[columns.start * size..columns.end * size];
                    self.append(weight, ty, first + row * width + columns.start, wanted, &mut rows)?;
                }
            }
        }
        let band = height * columns.len() * ty.size();
        if block.begins_band() {
            out.resize(out.len() + band, 0);
        }
        let start = out.len() - band;
        let target = (&mut out[start..], height, first / width);
        match ty.size() {
            2 => transpose::<2>(&rows, columns.len(), target),
            _ => transpose::<4>(&rows, columns.len(), target),
        }
        self.rows = rows;
        Ok(())
    }

    /// Appends the elements of `weight` from `first` on, which are `bytes`, as elements of `ty`.
    fn append(
        &mut self,
        weight: &Weight,
        ty: ElementType,
        first: usize,
        bytes: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), Error> {
        /// So many that they stay in a core's cache from one step to the next.
        const STEP: usize = 8192;
        let size = weight.dtype().bytes();
        out.reserve(bytes.len() / size * ty.size());
        for (i, part) in bytes.chunks(STEP * size).enumerate() {
            self.values.clear();
            weight.dtype().append_f32(part, &mut self.values);
            check(weight, ty, first + i * STEP, &self.values)?;
            match same_type(weight.dtype(), ty) {
                true => out.extend_from_slice(part),
                false => append(ty, &self.values, out),
            }
        }
        Ok(())
    }
}

/// Puts rows of `width` elements of `N` bytes into columns `first` and following of a matrix that has `height` columns.
fn transpose<const N: usize>(rows: &[u8], width: usize, (out, height, first): (&mut [u8], usize, usize)) {
    /// Rows and columns that are copied to a place of their own before they are written: elements of one column of a large matrix
    /// keep each other out of the cache.
    const TILE: usize = 32;
    let (rows, out) = (rows.as_chunks::<N>().0, out.as_chunks_mut::<N>().0);
    let mut tile = [[[0; N]; TILE]; TILE];
    for (band, rows) in rows.chunks(width * TILE).enumerate() {
        let count = rows.len() / width;
        for start in (0..width).step_by(TILE) {
            let columns = TILE.min(width - start);
            for (copy, row) in tile.iter_mut().zip(rows.chunks(width)) {
                copy[..columns].copy_from_slice(&row[start..start + columns]);
            }
            for column in 0..columns {
                let at = (start + column) * height + first + band * TILE;
                for (element, row) in out[at..at + count].iter_mut().zip(&tile) {
                    *element = row[column];
                }
            }
        }
    }
}

fn same_type(weight: WeightType, ty: ElementType) -> bool {
    matches!(
        (weight, ty),
        (WeightType::F32, ElementType::F32)
            | (WeightType::F16, ElementType::F16)
            | (WeightType::BF16, ElementType::BF16)
    )
}

/// Whether `ty` can hold the elements of `weight` from `first` on, which are `values`.
fn check(weight: &Weight, ty: ElementType, first: usize, values: &[f32]) -> Result<(), Error> {
    // Half of the step beyond the largest finite f16 rounds to infinity.
    const F16_LIMIT: f32 = 65_520.0;
    let limit = if ty == ElementType::F16 { F16_LIMIT } else { f32::INFINITY };
    // As integers, magnitudes are in the order of the numbers, with infinity and NaN at the end. Without an exit inside, the loop
    // is vectorised.
    let magnitude = |value: &f32| (value.to_bits() & 0x7fff_ffff) as i32;
    let largest = values.iter().fold(0, |largest, value| magnitude(value).max(largest));
    if largest < magnitude(&limit) {
        return Ok(());
    }
    let found = values.iter().enumerate().find(|(_, value)| magnitude(value) >= magnitude(&limit));
    let Some((i, &value)) = found else { return Ok(()) };
    if !value.is_finite() {
        return Err(weight.not_finite(first + i, f64::from(value)).into());
    }
    let Place { file, tensor, index } = weight.place(first + i);
    Err(Error::Range { file: file.to_owned(), tensor: tensor.to_owned(), index, value, ty })
}

/// Appends the values, which are finite, as little-endian elements of `ty`.
pub(crate) fn append(ty: ElementType, values: &[f32], bytes: &mut Vec<u8>) {
    let start = bytes.len();
    bytes.resize(start + values.len() * ty.size(), 0);
    let halves = |bytes| <[u8]>::as_chunks_mut::<2>(bytes).0.iter_mut();
    match ty {
        ElementType::F16 => {
            // In blocks, because the conversion of a slice uses the processor's instruction, and that of one element does not.
            let mut block = [half::f16::ZERO; 512];
            for (bytes, values) in bytes[start..].chunks_mut(2 * block.len()).zip(values.chunks(block.len())) {
                let block = &mut block[..values.len()];
                block.convert_from_f32_slice(values);
                halves(bytes).zip(block).for_each(|(element, value)| *element = value.to_le_bytes());
            }
        }
        ElementType::BF16 => {
            // To the nearest, and of two equally near ones to the even one.
            let rounded = |v: f32| {
                let bits = v.to_bits();
                ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
            };
            halves(&mut bytes[start..]).zip(values).for_each(|(element, &v)| *element = rounded(v).to_le_bytes());
        }
        _ => {
            let elements = bytes[start..].as_chunks_mut::<4>().0.iter_mut();
            elements.zip(values).for_each(|(element, v)| *element = v.to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests;
