#![allow(clippy::unwrap_used)]

use super::matrix::{Matrix, Quantized};
use super::search::Grid;
use super::{Bits, Order, Piece};
use crate::graph::{ElementType, Initializer, Source};
use crate::weights::bytes_of;
use moh_models::Weight;

/// Numbers without a pattern, from -1 to 1.
fn numbers(count: usize) -> Vec<f32> {
    let hash = |i: usize| (i as u32).wrapping_mul(2_654_435_761) ^ (i as u32 >> 3).wrapping_mul(40_503);
    (0..count).map(|i| hash(i) as f32 / u32::MAX as f32 * 2.0 - 1.0).collect()
}

fn grids() -> Vec<Grid> {
    let with = |bits, zero_points| Grid { bits, zero_points, reduce_range: false, scale: ElementType::F32 };
    let reduced = |zero_points| Grid { reduce_range: true, ..with(Bits::Int8, zero_points) };
    let whole = [with(Bits::Int4, false), with(Bits::Int4, true), with(Bits::Int8, false), with(Bits::Int8, true)];
    whole.into_iter().chain([reduced(false), reduced(true)]).collect()
}

fn bytes(matrix: &Matrix, order: Order, piece: Piece) -> Vec<u8> {
    let (ty, dims) = order.tensor(matrix, piece);
    let source = Source::Quantized { matrix: matrix.clone(), order, piece };
    let init = Initializer { name: "w".to_owned(), ty, dims, source };
    let bytes = bytes_of(&init).unwrap();
    assert_eq!(bytes.len(), init.bytes(), "{order:?} {piece:?}");
    bytes
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// Element `i` of packed integers of `bits` bits, the low half of a byte first.
fn integer(bytes: &[u8], bits: usize, i: usize) -> i32 {
    match bits {
        4 => i32::from(bytes[i / 2] >> (4 * (i % 2)) & 15),
        _ => i32::from(bytes[i]),
    }
}

/// The matrix (out, in) that the bytes of MatMulNBits's layout stand for.
fn from_rows(matrix: &Matrix, rows: usize, columns: usize) -> Vec<f32> {
    let (bits, block) = (matrix.grid().bits.count(), matrix.block());
    let [data, scales] = [Piece::Data, Piece::Scales].map(|piece| bytes(matrix, Order::Rows, piece));
    let zeros = if matrix.grid().zero_points { bytes(matrix, Order::Rows, Piece::ZeroPoints) } else { Vec::new() };
    let (scales, blocks) = (floats(&scales), columns / block);
    let value = |row: usize, column: usize| {
        let zero = match matrix.grid().zero_points {
            false => 1 << (bits - 1),
            true => integer(&zeros[row * (blocks * bits).div_ceil(8)..], bits, column / block),
        };
        (integer(&data, bits, row * columns + column) - zero) as f32 * scales[row * blocks + column / block]
    };
    (0..rows * columns).map(|i| value(i / columns, i % columns)).collect()
}

/// The same of the bytes that DequantizeLinear reads with axis 0: (in, out), signed without zero points.
fn from_columns(matrix: &Matrix, rows: usize, columns: usize) -> Vec<f32> {
    let (bits, block) = (matrix.grid().bits.count(), matrix.block());
    let [data, scales] = [Piece::Data, Piece::Scales].map(|piece| bytes(matrix, Order::Columns, piece));
    let zeros = if matrix.grid().zero_points { bytes(matrix, Order::Columns, Piece::ZeroPoints) } else { Vec::new() };
    let scales = floats(&scales);
    let value = |row: usize, column: usize| {
        let found = integer(&data, bits, column * rows + row);
        let at = column / block * rows + row;
        let integer = match matrix.grid().zero_points {
            // Two's complement.
            false => found - if found >> (bits - 1) == 1 { 1 << bits } else { 0 },
            true => found - integer(&zeros, bits, at),
        };
        integer as f32 * scales[at]
    };
    (0..rows * columns).map(|i| value(i / columns, i % columns)).collect()
}

/// An odd number of rows and of blocks, and more than one band and one part of rows.
#[test]
fn both_layouts_hold_the_same_numbers() {
    let (rows, columns) = (97, 112);
    for grid in grids() {
        let values = numbers(rows * columns);
        let matrix = Matrix::new(&Weight::from_f32("w", [rows, columns], values.clone()), false, grid, 16);
        let expected = matrix.dequantized().unwrap();
        assert_eq!(from_rows(&matrix, rows, columns), expected, "{grid:?}");
        assert_eq!(from_columns(&matrix, rows, columns), expected, "{grid:?}");
        let most = match (grid.bits, grid.reduce_range) {
            (Bits::Int4, _) => 0.15,
            (Bits::Int8, false) => 0.01,
            (Bits::Int8, true) => 0.02,
        };
        assert!(values.iter().zip(&expected).all(|(a, b)| (a - b).abs() < most), "{grid:?}");
        let sums = matrix.sums().unwrap();
        let error: f64 = values.iter().zip(&expected).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        assert!((sums.error / error - 1.0).abs() < 1e-3, "{sums:?} {error}");
    }
}

/// Matrices that the checkpoint has as (in, out) are quantised as if it had them as (out, in).
#[test]
fn the_order_of_the_checkpoint_does_not_matter() {
    let (matrices, rows, columns) = (3, 40, 64);
    let values = numbers(matrices * rows * columns);
    let mut swapped = vec![0.0; values.len()];
    for (i, value) in values.iter().enumerate() {
        let (matrix, row, column) = (i / (rows * columns), i / columns % rows, i % columns);
        swapped[matrix * rows * columns + column * rows + row] = *value;
    }
    for grid in grids() {
        let straight = Weight::from_f32("w", [matrices * rows, columns], values.clone());
        let straight = Matrix::new(&straight, false, grid, 32);
        let swapped = Weight::from_f32("w", [matrices, columns, rows], swapped.clone());
        let swapped = Matrix::new(&swapped, true, grid, 32);
        for piece in [Piece::Data, Piece::Scales, Piece::ZeroPoints] {
            assert_eq!(bytes(&swapped, Order::Rows, piece), bytes(&straight, Order::Rows, piece), "{grid:?} {piece:?}");
        }
        // In the order of the checkpoint, each.
        let (found, expected) = (swapped.dequantized().unwrap(), straight.dequantized().unwrap());
        for (i, value) in expected.iter().enumerate() {
            let (matrix, row, column) = (i / (rows * columns), i / columns % rows, i % columns);
            assert_eq!(found[matrix * rows * columns + column * rows + row], *value);
        }
    }
}

/// Zero points are stored without a sign, also where all numbers of a block have the same one.
#[test]
fn blocks_of_one_sign() {
    for (sign, least) in [(1.0, 5.0), (-1.0, 5.0), (1.0, 0.5), (-1.0, 0.0)] {
        let values: Vec<f32> = numbers(16 * 16).iter().map(|x| sign * (least + x.abs())).collect();
        for grid in grids() {
            for values in values.chunks(16) {
                let mut codes = [0; 16];
                let block = grid.quantize(values, &mut codes);
                let value = |code: u8| (f32::from(code) - f32::from(block.zero_point)) * block.scale;
                let errors = values.iter().zip(codes).map(|(x, code)| f64::from(x - value(code)).powi(2));
                let error = errors.sum::<f64>();
                assert!((block.error - error).abs() <= 1e-3 * error + 1e-9, "{grid:?} {values:?}: {block:?}, {error}");
            }
        }
    }
}

#[test]
fn numbers_that_are_not_finite_are_found_in_both_orders() {
    let (rows, columns) = (32, 48);
    for spoilt in [f32::NAN, f32::NEG_INFINITY] {
        for (shape, by_columns) in [([rows, columns], false), ([columns, rows], true)] {
            let mut values = numbers(rows * columns);
            values[1001] = spoilt;
            let matrix = Matrix::new(&Weight::from_f32("w", shape, values), by_columns, grids()[0], 16);
            let refused = matrix.dequantized().unwrap_err().to_string();
            assert!(refused.contains("1001"), "{refused}");
        }
    }
}

#[test]
fn threads_change_nothing() {
    let weight = Weight::from_f32("w", [37, 96], numbers(37 * 96));
    for grid in grids() {
        let matrix = Matrix::new(&weight, false, grid, 32);
        let of = |threads| matrix.quantize(5..37, 32..96, threads).unwrap();
        let (Quantized { codes, scales, zero_points }, sums) = of(1);
        for threads in [2, 3, 40] {
            let (found, found_sums) = of(threads);
            assert_eq!((&found.codes, &found.scales, &found.zero_points), (&codes, &scales, &zero_points));
            assert_eq!(found_sums, sums);
        }
    }
}

/// What a model with quantised weights is compared with: rows of a tensor are quantised as the whole is.
#[test]
fn rows_are_quantised_as_the_whole() {
    let weight = Weight::from_f32("w", [24, 32], numbers(24 * 32));
    let matrix = Matrix::new(&weight, false, grids()[0], 16);
    let some = matrix.of_other(&weight.rows(5..9)).dequantized().unwrap();
    assert_eq!(some, matrix.dequantized().unwrap()[5 * 32..9 * 32]);
}
