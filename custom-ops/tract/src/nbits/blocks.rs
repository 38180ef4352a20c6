//! A matrix in blocks.

use crate::bytes::Bytes;
use crate::host::TractHost;
use moh_cpu::nbits::{self, Level, Linear, NBits};
use tract_onnx::tract_hir::internal::*;
use zerocopy::{FromBytes, Immutable};

/// Block lengths that the kernels have.
const LENGTHS: [usize; 5] = [16, 32, 64, 128, 256];

/// Sizes of a matrix in blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// Bits of a value: 4 or 8.
    pub(crate) bits: usize,
    /// Values that share a scale.
    pub(crate) block: usize,
    /// Rows: outputs of a product, or entries of a table.
    pub(crate) rows: usize,
    /// Values of a row.
    pub(crate) width: usize,
}

impl Sizes {
    /// The sizes that a node's attributes give.
    ///
    /// # Errors
    /// Bits or blocks that no kernel has, and rows that are not whole blocks.
    pub(crate) fn checked(bits: i64, block: i64, rows: i64, width: i64) -> TractResult<Sizes> {
        ensure!(matches!(bits, 4 | 8), "bits: expected 4 or 8, found {bits}");
        let size = |name: &str, n: i64| {
            usize::try_from(n).ok().filter(|&n| n > 0).with_context(|| format!("{name}: expected a length, found {n}"))
        };
        let (block, rows, width) = (size("block_size", block)?, size("rows", rows)?, size("row length", width)?);
        ensure!(LENGTHS.contains(&block), "block_size: expected one of {LENGTHS:?}, found {block}");
        ensure!(width.is_multiple_of(block), "row length: expected a multiple of block_size = {block}, found {width}");
        ensure!(rows.checked_mul(width).is_some(), "expected a matrix that fits into memory, found {rows} x {width}");
        Ok(Sizes { bits: bits as usize, block, rows, width })
    }

    /// Blocks of a row.
    pub(crate) fn blocks(&self) -> usize {
        self.width / self.block
    }

    /// Bytes of a row's values.
    pub(crate) fn row_bytes(&self) -> usize {
        self.width * self.bits / 8
    }

    /// Bytes of a row's zero points.
    pub(crate) fn zero_bytes(&self) -> usize {
        (self.blocks() * self.bits).div_ceil(8)
    }
}

/// A matrix of `(value - zero point) * scale`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Blocks {
    pub(crate) sizes: Sizes,
    /// (rows, row bytes), the even value of a byte in its low half.
    pub(crate) values: Bytes,
    /// (rows, blocks) elements of `datum_type`.
    pub(crate) scales: Bytes,
    /// float32 or float16.
    pub(crate) datum_type: DatumType,
    /// (rows, zero bytes), packed as the values; absent: the middle of the range.
    pub(crate) zero_points: Option<Bytes>,
}

impl Blocks {
    /// `out = x W^T + bias` for rows of `x`, all of the scales' type `T`.
    pub(crate) fn multiply<T: Linear + FromBytes + Immutable>(
        &self,
        x: &[T],
        bias: Option<&[T]>,
        out: &mut [T],
        level: Level,
    ) -> TractResult<()> {
        let Sizes { bits, block, rows, width } = self.sizes;
        let zero_points = self.zero_points.as_ref().map(Bytes::as_slice);
        let scales = self.scales.cast::<T>()?;
        let weight =
            NBits::new("BlockLinear", bits, block, [rows, width], self.values.as_slice(), scales, zero_points)?;
        nbits::linear("BlockLinear", x, &weight, bias, out, level, &TractHost::current())?;
        Ok(())
    }

    /// Writes row `row` as float32.
    pub(crate) fn dequantize(&self, row: usize, out: &mut [f32]) -> TractResult<()> {
        let Sizes { bits, block, .. } = self.sizes;
        let part = |bytes: &Bytes, len: usize| bytes.as_slice()[row * len..][..len].to_vec();
        let (values, blocks) = (part(&self.values, self.sizes.row_bytes()), self.sizes.blocks());
        let zeros = self.zero_points.as_ref().map(|zeros| part(zeros, self.sizes.zero_bytes()));
        let number = |bytes: &[u8], i: usize| match bits {
            4 => i32::from(bytes[i / 2] >> (i % 2 * 4) & 15),
            _ => i32::from(bytes[i]),
        };
        for (i, out) in out.chunks_exact_mut(block).enumerate() {
            let at = row * blocks + i;
            let scale = match self.datum_type {
                DatumType::F16 => self.scales.cast::<f16>()?[at].to_f32(),
                _ => self.scales.cast::<f32>()?[at],
            };
            let zero = zeros.as_ref().map_or(1 << (bits - 1), |zeros| number(zeros, i));
            for (j, out) in out.iter_mut().enumerate() {
                *out = (number(&values, i * block + j) - zero) as f32 * scale;
            }
        }
        Ok(())
    }
}
