//! A matrix in blocks, and the ways to write it.

use crate::support::onnx::{DataType, Graph};
use half::f16;

/// The type of scales and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Type {
    F32,
    F16,
}

impl Type {
    pub(super) fn onnx(self) -> DataType {
        match self {
            Type::F32 => DataType::Float,
            Type::F16 => DataType::Float16,
        }
    }

    pub(super) fn bytes(self, numbers: &[f32]) -> Vec<u8> {
        match self {
            Type::F32 => numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Type::F16 => numbers.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        }
    }

    pub(super) fn rounded(self, x: f32) -> f64 {
        match self {
            Type::F32 => f64::from(x),
            Type::F16 => f16::from_f32(x).to_f64(),
        }
    }
}

/// Reproducible numbers in -1..1.
pub(super) fn numbers(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9) | 1;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// `(integer - zero point) * scale`, rows of whole blocks.
pub(super) struct Matrix {
    pub(super) bits: usize,
    pub(super) signed: bool,
    pub(super) block: usize,
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) ty: Type,
    integers: Vec<i32>,
    scales: Vec<f32>,
    pub(super) zeros: Option<Vec<i32>>,
    /// The zero point without zero points.
    pub(super) middle: i32,
}

impl std::fmt::Debug for Matrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Matrix { bits, signed, block, rows, width, ty, .. } = self;
        let zeros = self.zeros.is_some();
        write!(
            f,
            "{rows} x {width} of {bits} bits (signed: {signed}) in blocks of {block}, zero points: {zeros}, {ty:?}"
        )
    }
}

impl Matrix {
    pub(super) fn new(bits: usize, signed: bool, zeros: bool, [rows, blocks, block]: [usize; 3], ty: Type) -> Matrix {
        let range = 1 << bits;
        let lowest = if signed { -range / 2 } else { 0 };
        let integers = |len, seed| {
            let number = |x: &f32| lowest + (((x + 1.0) / 2.0 * range as f32) as i32).min(range - 1);
            numbers(len, seed).iter().map(number).collect::<Vec<i32>>()
        };
        Matrix {
            bits,
            signed,
            block,
            rows,
            width: blocks * block,
            ty,
            integers: integers(rows * blocks * block, 1),
            scales: numbers(rows * blocks, 2).iter().map(|x| 0.01 + 0.1 * x.abs()).collect(),
            zeros: zeros.then(|| integers(rows * blocks, 3)),
            middle: 0,
        }
    }

    pub(super) fn value(&self, row: usize, k: usize) -> f64 {
        let at = row * (self.width / self.block) + k / self.block;
        let zero = self.zeros.as_ref().map_or(self.middle, |zeros| zeros[at]);
        f64::from(self.integers[row * self.width + k] - zero) * self.ty.rounded(self.scales[at])
    }

    /// Two 4-bit integers a byte, the first in the low half.
    fn packed(&self, integers: &[i32]) -> Vec<u8> {
        match self.bits {
            4 => integers.chunks(2).map(|pair| (pair[0] & 15 | pair.get(1).unwrap_or(&0) << 4) as u8).collect(),
            _ => integers.iter().map(|&i| i as u8).collect(),
        }
    }

    fn types(&self) -> DataType {
        match (self.bits, self.signed) {
            (4, true) => DataType::Int4,
            (4, false) => DataType::Uint4,
            (_, true) => DataType::Int8,
            (_, false) => DataType::Uint8,
        }
    }

    /// Adds `values`, `scales` and `zeros` as MatMulNBits has them. Signed integers are moved into the range from 0 on.
    pub(super) fn unsigned(&self, graph: &mut Graph) {
        let moved = if self.signed { 1 << (self.bits - 1) } else { 0 };
        let (rows, blocks) = (self.rows as i64, self.width / self.block);
        let up = |integers: &[i32]| integers.iter().map(|i| i + moved).collect::<Vec<i32>>();
        let values = self.packed(&up(&self.integers));
        graph.raw("values", DataType::Uint8, &[rows, blocks as i64, (self.block * self.bits / 8) as i64], &values);
        graph.raw("scales", self.ty.onnx(), &[rows, blocks as i64], &self.ty.bytes(&self.scales));
        if let Some(zeros) = &self.zeros {
            let zeros: Vec<u8> = up(zeros).chunks(blocks).flat_map(|row| self.packed(row)).collect();
            graph.raw("zeros", DataType::Uint8, &[rows, (zeros.len() / self.rows) as i64], &zeros);
        }
    }

    /// The same as GatherBlockQuantized has them.
    pub(super) fn table(&self, graph: &mut Graph) {
        let (rows, blocks) = (self.rows as i64, self.width / self.block);
        graph.raw(
            "values",
            DataType::Uint8,
            &[rows, (self.width * self.bits / 8) as i64],
            &self.packed(&self.integers),
        );
        graph.raw("scales", self.ty.onnx(), &[rows, blocks as i64], &self.ty.bytes(&self.scales));
        if let Some(zeros) = &self.zeros {
            let zeros: Vec<u8> = zeros.chunks(blocks).flat_map(|row| self.packed(row)).collect();
            graph.raw("zeros", DataType::Uint8, &[rows, (zeros.len() / self.rows) as i64], &zeros);
        }
    }

    /// Adds them as DequantizeLinear has them, (width, rows) if `turned`, and returns its axis.
    pub(super) fn dequantized(&self, graph: &mut Graph, turned: bool) -> i64 {
        fn turn<T: Copy>(rows: &[T], width: usize) -> Vec<T> {
            (0..rows.len()).map(|i| rows[i % (rows.len() / width) * width + i / (rows.len() / width)]).collect()
        }
        let blocks = self.width / self.block;
        let dims = |columns: usize| if turned { [columns, self.rows] } else { [self.rows, columns] }.map(|n| n as i64);
        let integers =
            |integers: &[i32], width| self.packed(&if turned { turn(integers, width) } else { integers.to_vec() });
        let scales = if turned { turn(&self.scales, blocks) } else { self.scales.clone() };
        graph.raw("values", self.types(), &dims(self.width), &integers(&self.integers, self.width));
        graph.raw("scales", self.ty.onnx(), &dims(blocks), &self.ty.bytes(&scales));
        if let Some(zeros) = &self.zeros {
            graph.raw("zeros", self.types(), &dims(blocks), &integers(zeros, blocks));
        }
        i64::from(!turned)
    }
}
