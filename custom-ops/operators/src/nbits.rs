//! Matrices of 4-bit or 8-bit integers with a scale for each block of the inner dimension, as onnxruntime's MatMulNBits
//! stores them.
//!
//! Row `n` of a matrix is an output feature. Its inner dimension of length `k` is cut into blocks. The block's bytes hold its
//! values in order, of 4 bits two a byte with the first one in the low half. A value is `(q - zero_point) * scale`.

mod body;

use crate::error::Error;
use crate::shape::{PartialShape, show};
use crate::tensor::Tensor;
use crate::tolerance;
pub(crate) use body::{Dequantise, Quantised};

/// How a matrix is quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Format {
    /// Bits of a value: 4 or 8.
    pub bits: usize,
    /// Values of the inner dimension that share a scale.
    pub block: usize,
}

impl Format {
    /// Bytes of a block.
    pub fn bytes(&self) -> usize {
        self.block * self.bits / 8
    }

    /// Bytes of a row's zero points, packed as the values are.
    pub fn zero_point_bytes(&self, blocks: usize) -> usize {
        (blocks * self.bits).div_ceil(8)
    }

    /// The zero point of a matrix that has none of its own: the middle of the range.
    pub fn zero_point(&self) -> u8 {
        1 << (self.bits - 1)
    }

    /// A byte of zero points that are [`Format::zero_point`].
    pub fn zero_point_byte(&self) -> u8 {
        if self.bits == 4 { 0x88 } else { 0x80 }
    }

    /// Element `i` of packed values.
    fn unpack(&self, bytes: &Tensor<'_>, row: usize, row_bytes: usize, i: usize) -> f64 {
        let byte = bytes.data.at(row * row_bytes + i * self.bits / 8);
        match (self.bits, i % 2) {
            (4, 0) => byte % 16.0,
            (4, _) => (byte / 16.0).floor(),
            _ => byte,
        }
    }

    /// The dense shape (.., rows, k) of a weight (.., rows, blocks, bytes); `None` if the last dimension does not fit.
    pub(crate) fn dense(&self, weight: PartialShape<'_>, rank: usize) -> Option<Vec<Option<usize>>> {
        let [leading @ .., blocks, bytes] = weight else { return None };
        let fits = weight.len() == rank && bytes.is_none_or(|bytes| bytes == self.bytes()) && *blocks != Some(0);
        let k = match blocks {
            Some(blocks) => Some(blocks.checked_mul(self.block)?),
            None => None,
        };
        fits.then(|| [leading, &[k]].concat())
    }
}

/// The value of the attribute `accuracy_level` that lets kernels round activations to 8-bit integers.
pub(crate) const INT8: i64 = 4;

/// Checks the attributes `bits`, `block_size` and `accuracy_level`.
///
/// # Errors
/// [`Error::Attribute`] naming the one that is out of range.
pub(crate) fn check(operator: &'static str, bits: usize, block: usize, accuracy_level: i64) -> Result<(), Error> {
    let (attribute, expected, found) = match (bits, block, accuracy_level) {
        (4 | 8, 16 | 32 | 64 | 128 | 256, 0 | INT8) => return Ok(()),
        (4 | 8, 16 | 32 | 64 | 128 | 256, _) => ("accuracy_level", "0 or 4", accuracy_level.to_string()),
        (4 | 8, ..) => ("block_size", "16, 32, 64, 128 or 256", block.to_string()),
        _ => ("bits", "4 or 8", bits.to_string()),
    };
    Err(Error::Attribute { operator, attribute, expected: expected.to_owned(), found })
}

/// The error for a weight of a wrong shape: expected are `rows`, and blocks of the inner dimension, which has a name and perhaps a
/// known length.
pub(crate) fn wrong_weight(
    operator: &'static str,
    input: &'static str,
    format: Format,
    rows: &str,
    (name, inner): (&str, Option<usize>),
    found: PartialShape<'_>,
) -> Error {
    let Format { bits, block } = format;
    let blocks = match inner {
        Some(k) if k.is_multiple_of(block) => (k / block).to_string(),
        Some(k) => format!("{k} / {block}"),
        None => format!("{name} / {block}"),
    };
    let expected = format!("({rows}, {blocks}, {}) for {bits} bits in blocks of {block}", format.bytes());
    Error::Shape { operator, input, expected, found: show(found) }
}

/// What `accuracy_level` allows beyond the rounding of T: see [`Definition::rounding`](crate::operator::Definition::rounding).
pub(crate) fn rounding(int8_activations: bool) -> f64 {
    if int8_activations { tolerance::INT8_ACTIVATIONS } else { 0.0 }
}

/// Checks the length of an inner dimension, the last one of `shape`.
///
/// # Errors
/// [`Error::Shape`] if blocks do not divide it.
pub(crate) fn check_inner(
    operator: &'static str,
    input: &'static str,
    format: Format,
    shape: PartialShape<'_>,
    k: Option<usize>,
) -> Result<(), Error> {
    match k {
        Some(k) if !k.is_multiple_of(format.block) => {
            let expected = format!("(.., a multiple of block_size = {})", format.block);
            Err(Error::Shape { operator, input, expected, found: show(shape) })
        }
        _ => Ok(()),
    }
}

/// Checks the shapes of a weight's scales and zero points.
///
/// # Errors
/// [`Error::Shape`] naming the one that does not fit the weight.
pub(crate) fn check_scales(
    operator: &'static str,
    format: Format,
    weight: PartialShape<'_>,
    [scales, zero_points]: [(&'static str, Option<PartialShape<'_>>); 2],
) -> Result<(), Error> {
    let Some((_, blocks @ [leading @ .., last])) = weight.split_last() else { return Ok(()) };
    let packed = [leading, &[last.map(|blocks| format.zero_point_bytes(blocks))]].concat();
    for ((input, found), expected) in [(scales, blocks), (zero_points, &packed)] {
        let agrees = |found: PartialShape<'_>| {
            let pairs = || found.iter().zip(expected);
            found.len() == expected.len() && pairs().all(|(a, b)| a.is_none() || b.is_none() || a == b)
        };
        if let Some(found) = found.filter(|found| !agrees(found)) {
            return Err(Error::Shape { operator, input, expected: show(expected), found: show(found) });
        }
    }
    Ok(())
}

/// The matrices (.., rows, k) in f64, one after the other.
pub(crate) fn dequantised(
    format: Format,
    k: usize,
    weight: &Tensor<'_>,
    scales: &Tensor<'_>,
    zero_points: Option<&Tensor<'_>>,
) -> Vec<f64> {
    let blocks = k / format.block;
    let rows = scales.data.len() / blocks.max(1);
    let value = |row: usize, i: usize| {
        let (q, block) = (format.unpack(weight, row, blocks * format.bytes(), i), i / format.block);
        let zero = match zero_points {
            Some(packed) => format.unpack(packed, row, format.zero_point_bytes(blocks), block),
            None => format.zero_point().into(),
        };
        (q - zero) * scales.data.at(row * blocks + block)
    };
    (0..rows).flat_map(|row| (0..k).map(move |i| (row, i))).map(|(row, i)| value(row, i)).collect()
}
