//! DequantizeLinear's tensors in the form of MatMulNBits.
//!
//! DequantizeLinear's integers are row-major without padding, signed or not; MatMulNBits's are unsigned, with the summed axis last and
//! every row of zero points in whole bytes.

use super::blocks::Sizes;
use crate::bytes::Bytes;
use tract_onnx::pb::tensor_proto::DataType;
use tract_onnx::tract_hir::internal::*;

/// DequantizeLinear's integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Integers {
    pub(crate) bits: usize,
    pub(crate) signed: bool,
}

impl Integers {
    pub(crate) fn of(data_type: i32) -> TractResult<Integers> {
        Ok(match DataType::try_from(data_type) {
            Ok(DataType::Int4) => Integers { bits: 4, signed: true },
            Ok(DataType::Uint4) => Integers { bits: 4, signed: false },
            Ok(DataType::Int8) => Integers { bits: 8, signed: true },
            Ok(DataType::Uint8) => Integers { bits: 8, signed: false },
            found => bail!("expected an integer of 4 or 8 bits, found {found:?}"),
        })
    }

    /// Turns two's complement into a number from 0 on, in every part of a byte.
    fn flip(self) -> u8 {
        match (self.signed, self.bits) {
            (false, _) => 0,
            (true, 4) => 0x88,
            (true, _) => 0x80,
        }
    }
}

/// The values (rows, width) from (width, rows) if `transposed`, else from (rows, width).
pub(crate) fn values(stored: &Bytes, integers: Integers, sizes: Sizes, transposed: bool) -> Bytes {
    let rows = sizes.rows;
    let (from, flip) = (stored.as_slice(), integers.flip());
    if !transposed {
        if flip == 0 {
            return stored.clone();
        }
        return Bytes::made(from.len(), |out| {
            out.iter_mut().zip(from).for_each(|(out, byte)| *out = byte ^ flip);
        });
    }
    let row = sizes.row_bytes();
    Bytes::made(rows * row, |out| match integers.bits {
        // A byte of `from` holds values of two rows: a plane of bytes for each.
        4 if rows.is_multiple_of(2) => each_tile(out, row, 2, |first, k, planes| {
            let pairs = |k: usize| from[(k * rows + first) / 2..].iter().take(SIDE.min((rows - first) / 2));
            let [lower, upper] = planes else { return };
            for (i, (even, odd)) in pairs(2 * k).zip(pairs(2 * k + 1)).enumerate() {
                lower[i] = (even & 15 | odd << 4) ^ flip;
                upper[i] = (even >> 4 | odd & 0xF0) ^ flip;
            }
        }),
        4 => {
            let number = |i: usize| from[i / 2] >> (i % 2 * 4) & 15;
            each_tile(out, row, 1, |first, k, planes| {
                for (n, byte) in (first..rows).zip(planes.iter_mut().flat_map(|plane| plane.iter_mut())) {
                    *byte = (number(2 * k * rows + n) | number((2 * k + 1) * rows + n) << 4) ^ flip;
                }
            });
        }
        _ => each_tile(out, row, 1, |first, k, planes| {
            let bytes = from[k * rows + first..].iter().take(rows - first);
            bytes.zip(planes.iter_mut().flat_map(|plane| plane.iter_mut())).for_each(|(from, to)| *to = from ^ flip);
        }),
    })
}

/// Rows of a plane and bytes of each: a line of the cache.
const SIDE: usize = 64;

/// Fills `out`, of rows of `row` bytes, from its columns, on all processors. `column` gets the number of a row and of a byte, and writes
/// that byte of the row and of those after it: of every `planes`-th row to the first line, of those after them to the second.
///
/// Lines are turned in a place of their own, for the rows of `out` may be a power of two apart and push each other out of the cache.
fn each_tile(out: &mut [u8], row: usize, planes: usize, column: impl Fn(usize, usize, &mut [&mut [u8; SIDE]]) + Sync) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let band = SIDE * planes;
    let share = (out.len() / row).div_ceil(threads).next_multiple_of(band);
    std::thread::scope(|scope| {
        for (i, part) in out.chunks_mut(share * row).enumerate() {
            let column = &column;
            scope.spawn(move || {
                let mut columns = [[[0; SIDE]; SIDE]; 2];
                let mut rows = [[[0; SIDE]; SIDE]; 2];
                for (j, part) in part.chunks_mut(band * row).enumerate() {
                    for at in (0..row).step_by(SIDE) {
                        let len = SIDE.min(row - at);
                        let [first, second] = &mut columns;
                        for (k, (first, second)) in first.iter_mut().zip(second).take(len).enumerate() {
                            column(i * share + j * band, at + k, &mut [first, second][..planes]);
                        }
                        columns.iter().zip(&mut rows).take(planes).for_each(|(columns, rows)| turn(columns, rows));
                        for (n, line) in part.chunks_exact_mut(row).enumerate() {
                            line[at..at + len].copy_from_slice(&rows[n % planes][n / planes][..len]);
                        }
                    }
                }
            });
        }
    });
}

/// Makes rows of columns: 8 x 8 bytes at a time, by exchanging blocks of 4 x 4, then 2 x 2, then single bytes.
fn turn(columns: &[[u8; SIDE]; SIDE], rows: &mut [[u8; SIDE]; SIDE]) {
    const STEPS: [(usize, u64); 3] = [(4, 0xFFFF_FFFF), (2, 0x0000_FFFF_0000_FFFF), (1, 0x00FF_00FF_00FF_00FF)];
    for top in (0..SIDE).step_by(8) {
        for left in (0..SIDE).step_by(8) {
            let mut block = [0u64; 8];
            for (i, line) in block.iter_mut().enumerate() {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(&columns[top + i][left..left + 8]);
                *line = u64::from_le_bytes(bytes);
            }
            for (step, mask) in STEPS {
                for i in (0..8).filter(|i| i & step == 0) {
                    let swapped = (block[i] >> (8 * step) ^ block[i + step]) & mask;
                    block[i] ^= swapped << (8 * step);
                    block[i + step] ^= swapped;
                }
            }
            for (i, line) in block.iter().enumerate() {
                rows[left + i][top..top + 8].copy_from_slice(&line.to_le_bytes());
            }
        }
    }
}

/// The zero points (rows, blocks), each row in whole bytes, from (blocks, rows) if `transposed`, else from (rows, blocks). Without any,
/// they are 0, which for signed integers is MatMulNBits's own.
pub(crate) fn zero_points(stored: Option<&Bytes>, integers: Integers, sizes: Sizes, transposed: bool) -> Option<Bytes> {
    if stored.is_none() && integers.signed {
        return None;
    }
    let (blocks, bits) = (sizes.blocks(), integers.bits);
    let flip = integers.flip() & if bits == 4 { 15 } else { 0xFF };
    let number = |i: usize| match stored.map(Bytes::as_slice) {
        None => 0,
        Some(bytes) if bits == 4 => (bytes[i / 2] >> (i % 2 * 4) & 15) ^ flip,
        Some(bytes) => bytes[i] ^ flip,
    };
    Some(Bytes::made(sizes.rows * sizes.zero_bytes(), |out| {
        for (row, out) in out.chunks_exact_mut(sizes.zero_bytes()).enumerate() {
            for block in 0..blocks {
                let number = number(if transposed { block * sizes.rows + row } else { row * blocks + block });
                match bits {
                    4 => out[block / 2] |= number << (block % 2 * 4),
                    _ => out[block] = number,
                }
            }
        }
    }))
}

/// The scales (rows, blocks) from (blocks, rows) if `transposed`.
pub(crate) fn scales(stored: Bytes, element: usize, sizes: Sizes, transposed: bool) -> Bytes {
    if !transposed {
        return stored;
    }
    let (from, blocks) = (stored.as_slice(), sizes.blocks());
    Bytes::made(from.len(), |out| {
        for (i, out) in out.chunks_exact_mut(element).enumerate() {
            let at = (i % blocks * sizes.rows + i / blocks) * element;
            out.copy_from_slice(&from[at..at + element]);
        }
    })
}
