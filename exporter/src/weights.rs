//! The weight file: its plan, and the weights streamed into it from the mapped checkpoint.

use crate::error::Error;
use crate::graph::{ElementType, Graph, Initializer, Source};
use moh_models::checkpoint::Place;
use moh_models::{Weight, WeightType};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Bytes converted at a time: memory does not grow with the model.
const CHUNK_BYTES: usize = 4 << 20;

/// Tensors shorter than this stay in the model file: shapes and scalars, which runtimes read while they load.
pub(crate) const INLINE_BYTES: usize = 1024;

/// Alignment of tensors in the weight file: what CUDA's libraries want, and more than any CPU does.
const ALIGNMENT: u64 = 256;

/// Offsets of the large tensors in the weight file, by name, in order of offset.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    offsets: Vec<(String, u64)>,
}

impl Plan {
    /// Places the large tensors of `graph` one after the other.
    pub fn new(graph: &Graph) -> Plan {
        let mut end = 0u64;
        let large = graph.initializers.iter().filter(|init| init.bytes() >= INLINE_BYTES);
        let place = |init: &Initializer| {
            let offset = end.next_multiple_of(ALIGNMENT);
            end = offset + init.bytes() as u64;
            (init.name.clone(), offset)
        };
        Plan { offsets: large.map(place).collect() }
    }

    /// Names and offsets.
    pub fn iter(&self) -> impl Iterator<Item = (&str, u64)> {
        self.offsets.iter().map(|(name, offset)| (name.as_str(), *offset))
    }
}

/// Writes the weight file that `plan` lays out; returns its length, 0 (and no file) where the model has no large tensor.
///
/// # Errors
/// [`Error::Io`]; a weight that is NaN or infinite, or beyond the file's type.
pub fn write_data(graph: &Graph, plan: &Plan, path: &Path) -> Result<u64, Error> {
    let mut places = plan.iter().peekable();
    if places.peek().is_none() {
        return Ok(0);
    }
    let file = File::create(path).map_err(Error::io(path))?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    let mut position = 0u64;
    for (name, offset) in places {
        let Some(init) = graph.initializers.iter().find(|init| init.name == name) else {
            return Err(moh_models::Error::Internal("a place in the weight file without a tensor").into());
        };
        out.write_all(&vec![0; (offset - position) as usize]).map_err(Error::io(path))?;
        write_initializer(init, &mut out).map_err(|e| e.on(path))?;
        position = offset + init.bytes() as u64;
    }
    let file = out.into_inner().map_err(|e| Error::io(path)(e.into_error()))?;
    file.sync_all().map_err(Error::io(path))?;
    Ok(position)
}

/// Writes an initializer's elements, converted to its type.
///
/// # Errors
/// [`Error::Io`] with an empty path; a weight that is NaN or infinite, or beyond the type.
pub(crate) fn write_initializer(init: &Initializer, out: &mut impl Write) -> Result<(), Error> {
    match &init.source {
        Source::Bytes(bytes) => out.write_all(bytes).map_err(Error::io("")),
        Source::Weight { weight, transposed: true } => transposed(weight, init.ty, out),
        Source::Weight { weight, transposed: false } => straight(weight, init.ty, out),
    }
}

fn straight(weight: &Weight, ty: ElementType, out: &mut impl Write) -> Result<(), Error> {
    let size = weight.dtype().bytes();
    let (mut values, mut bytes) = (Vec::new(), Vec::new());
    let step = CHUNK_BYTES / 4;
    for start in (0..weight.elements()).step_by(step) {
        let end = (start + step).min(weight.elements());
        values.clear();
        weight.read_f32(start..end, &mut values);
        for (i, &value) in values.iter().enumerate() {
            check(weight, ty, start + i, value)?;
        }
        if same_type(weight.dtype(), ty) {
            out.write_all(&weight.bytes()[start * size..end * size]).map_err(Error::io(""))?;
        } else {
            bytes.clear();
            append(ty, &values, &mut bytes);
            out.write_all(&bytes).map_err(Error::io(""))?;
        }
    }
    Ok(())
}

/// Writes a matrix (rows, columns) as (columns, rows), a band of columns at a time.
fn transposed(weight: &Weight, ty: ElementType, out: &mut impl Write) -> Result<(), Error> {
    let &[rows, columns] = weight.shape() else {
        return Err(moh_models::Error::Internal("a transposed tensor that is no matrix").into());
    };
    // A band holds whole cache lines of a row, so that the source is read once.
    let band = (CHUNK_BYTES / 4 / rows.max(1)).next_multiple_of(32).min(columns.max(1));
    let (mut part, mut values, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
    for start in (0..columns).step_by(band) {
        let width = band.min(columns - start);
        values.clear();
        values.resize(width * rows, 0.0);
        for row in 0..rows {
            part.clear();
            let first = row * columns + start;
            weight.read_f32(first..first + width, &mut part);
            for (i, &value) in part.iter().enumerate() {
                check(weight, ty, first + i, value)?;
                values[i * rows + row] = value;
            }
        }
        bytes.clear();
        append(ty, &values, &mut bytes);
        out.write_all(&bytes).map_err(Error::io(""))?;
    }
    Ok(())
}

fn same_type(weight: WeightType, ty: ElementType) -> bool {
    matches!(
        (weight, ty),
        (WeightType::F32, ElementType::F32)
            | (WeightType::F16, ElementType::F16)
            | (WeightType::BF16, ElementType::BF16)
    )
}

/// Whether `ty` can hold the value.
#[inline]
fn check(weight: &Weight, ty: ElementType, index: usize, value: f32) -> Result<(), Error> {
    // Half of the step beyond the largest finite f16 rounds to infinity.
    const F16_LIMIT: f32 = 65_520.0;
    if value.is_finite() && (ty != ElementType::F16 || value.abs() < F16_LIMIT) {
        return Ok(());
    }
    if !value.is_finite() {
        return Err(weight.not_finite(index, f64::from(value)).into());
    }
    let Place { file, tensor, index } = weight.place(index);
    Err(Error::Range { file: file.to_owned(), tensor: tensor.to_owned(), index, value, ty })
}

/// Appends the values as little-endian elements of `ty`.
fn append(ty: ElementType, values: &[f32], bytes: &mut Vec<u8>) {
    match ty {
        ElementType::F16 => bytes.extend(values.iter().flat_map(|&v| half::f16::from_f32(v).to_le_bytes())),
        ElementType::BF16 => bytes.extend(values.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes())),
        _ => bytes.extend(values.iter().flat_map(|v| v.to_le_bytes())),
    }
}

#[cfg(test)]
mod tests;
