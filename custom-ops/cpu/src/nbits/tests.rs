//! Every instruction set is compared with products of dequantised weights in f64.

#![allow(clippy::unwrap_used)]

use super::linear::{ROWS, layer};
use super::{Activations, Engine, FEW, Level, NBits, Parts, Row, Start, Worker};
use crate::epilogue::Epilogue;
use crate::host::Threads;
use crate::isa::matrix_unit;
use half::{bf16, f16};
use moh_conformance::Random;
use moh_operators::{Element, Error};

/// Error of sums of up to 1100 terms in f32, relative to the sum of their magnitudes: a few roundings of 6e-8 add up.
const TOLERANCE: f64 = 3e-6;

/// How an engine rounds what it multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rounding {
    /// Not at all.
    Nothing,
    /// Activations to integers of 8 bits.
    Integers,
    /// Both factors to bfloat16.
    Halves,
}

/// As matrix units round.
fn halved(x: f32) -> f32 {
    f32::from_bits((x.to_bits() + 0x8000) & 0xffff_0000)
}

/// What sums are before products are added: a power of two below the results, so that its rounding does not matter.
const START: f32 = 1.0 / 64.0;

#[derive(Debug, Clone, Copy)]
struct Shape {
    bits: usize,
    block: usize,
    n: usize,
    k: usize,
    rows: usize,
    zero_points: bool,
    level: Level,
}

/// Every instruction set that this processor has, and AMX, which is emulated where it lacks it.
fn engines() -> Vec<Engine> {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    let _emulated = crate::isa::amx::emulator::emulate();
    Engine::all(matrix_unit(None))
}

fn name(engine: Engine) -> String {
    format!("{}{}", engine.name(), if engine.unit().is_some() { " with a matrix unit" } else { "" })
}

/// A product's operands.
#[derive(Clone)]
struct Problem<X, T> {
    shape: Shape,
    x: Vec<X>,
    data: Vec<u8>,
    scales: Vec<T>,
    zeros: Option<Vec<u8>>,
}

impl<X: Element, T: Element> Problem<X, T> {
    fn new(shape: Shape, random: &mut Random) -> Problem<X, T> {
        let Shape { bits, block, n, k, rows, .. } = shape;
        let blocks = k / block;
        let mut bytes = |len: usize| (0..len).map(|_| random.bits() as u8).collect::<Vec<u8>>();
        let data = bytes(n * k * bits / 8);
        let zeros = shape.zero_points.then(|| bytes(n * (blocks * bits).div_ceil(8)));
        let scales = (0..n * blocks).map(|_| T::from_f32(0.02 * random.signed() + 0.001)).collect();
        let x = (0..rows * k)
            .map(|_| X::from_f32(random.signed() * (1.0 + 30.0 * (random.unit() as f32).powi(8))))
            .collect();
        Problem { shape, x, data, scales, zeros }
    }

    fn weight(&self) -> NBits<'_> {
        let Shape { bits, block, n, k, .. } = self.shape;
        NBits::new("test", bits, block, [n, k], &self.data, &self.scales, self.zeros.as_deref()).unwrap()
    }

    /// How `engine` rounds; `apart` if rows use parts.
    fn rounding(&self, engine: Engine, apart: bool) -> Rounding {
        let Shape { rows, block, level, .. } = self.shape;
        match level {
            Level::Float => Rounding::Nothing,
            Level::Int8 if engine.unit().is_some() && rows > FEW && (!apart || block >= 32) => Rounding::Halves,
            Level::Int8 => Rounding::Integers,
        }
    }

    /// A weight, and the magnitude of what its rounding in f32 depends on.
    fn value(&self, n: usize, k: usize, rounding: Rounding) -> (f64, f64) {
        let Shape { bits, block, k: all, .. } = self.shape;
        let packed = |bytes: &[u8], row: usize, row_bytes: usize, i: usize| {
            let byte = bytes[row * row_bytes + i * bits / 8];
            f64::from(if bits == 8 { byte } else { byte >> (4 * (i % 2)) & 15 })
        };
        let blocks = all / block;
        let zero = self.zeros.as_ref().map(|zeros| packed(zeros, n, (blocks * bits).div_ceil(8), k / block));
        let zero = zero.unwrap_or(if bits == 4 { 8.0 } else { 128.0 });
        let (q, scale) = (packed(&self.data, n, all * bits / 8, k), self.scales[n * blocks + k / block].to_f32());
        // Zero points are subtracted from weights before their product, or from sums of products, which are larger.
        let magnitude =
            if rounding == Rounding::Nothing { (q - zero).abs() } else { q + zero } * f64::from(scale.abs());
        if rounding != Rounding::Halves {
            return ((q - zero) * f64::from(scale), magnitude);
        }
        let default = if bits == 4 { 8.0 } else { 128.0 };
        let value = (q as f32 - default) * scale - scale * (zero as f32 - default);
        (f64::from(halved(value)), magnitude)
    }

    /// Row `row` as it is multiplied; what `used` refuses is 0.
    fn row(&self, row: usize, rounding: Rounding, used: impl Fn(usize) -> bool) -> Vec<f64> {
        let Shape { block, k, .. } = self.shape;
        let x = |i: usize| if used(i) { self.x[row * k + i].to_f32() } else { 0.0 };
        let x: Vec<f32> = (0..k).map(x).collect();
        let quantised = |x: &[f32]| {
            let most = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            let (scale, inverse) = if most > 0.0 { (most / 127.0, 127.0 / most) } else { (0.0, 0.0) };
            x.iter().map(|x| f64::from((x * inverse).round_ties_even()) * f64::from(scale)).collect::<Vec<f64>>()
        };
        match rounding {
            Rounding::Nothing => x.into_iter().map(f64::from).collect(),
            Rounding::Integers => x.chunks(block).flat_map(quantised).collect(),
            Rounding::Halves => x.into_iter().map(|x| f64::from(halved(x))).collect(),
        }
    }

    /// The products of `rows` with all columns, and the sums of their terms' magnitudes.
    fn expected(&self, rows: &[Vec<f64>], rounding: Rounding) -> Vec<(f64, f64)> {
        let mut expected = vec![(0.0, 0.0); rows.len() * self.shape.n];
        for n in 0..self.shape.n {
            let weights: Vec<_> = (0..self.shape.k).map(|k| self.value(n, k, rounding)).collect();
            for (row, x) in rows.iter().enumerate() {
                let sums = &mut expected[row * self.shape.n + n];
                for (x, (weight, magnitude)) in x.iter().zip(&weights) {
                    sums.0 += x * weight;
                    sums.1 += x.abs() * magnitude;
                }
            }
        }
        expected
    }

    /// Multiplies on every instruction set, by [`Worker::multiply`]: the rows in reverse order, of which some are left
    /// out, with columns in two parts; `used(row, part)` are the parts of `width` inner indices that a row uses.
    fn everywhere(&self, width: usize, used: &(dyn Fn(usize, usize) -> bool + Sync)) {
        let rows = self.shape.rows;
        let mirrored = |row: usize| rows - 1 - row;
        let apart = !self.uses_all(width, used);
        for (engine, expected) in
            self.judged(apart, |row, rounding| self.row(mirrored(row), rounding, |i| used(mirrored(row), i / width)))
        {
            let found = self.multiply(engine, width, used);
            for (i, (&found, &(expected, magnitude))) in found.iter().zip(&expected).enumerate() {
                if self.skipped(i / self.shape.n) {
                    assert_eq!(found, START);
                    continue;
                }
                let error = (f64::from(found) - f64::from(START) - expected).abs();
                let tolerance = TOLERANCE * (magnitude + f64::from(START));
                let (name, shape) = (name(engine), self.shape);
                assert!(
                    error <= tolerance,
                    "{name} {shape:?}: element {i}: {error:e} from {expected} (at most {tolerance:e})"
                );
            }
        }
    }

    /// Every engine with what it should compute; `row` rounds rows.
    fn judged(
        &self,
        apart: bool,
        row: impl Fn(usize, Rounding) -> Vec<f64>,
    ) -> impl Iterator<Item = (Engine, Vec<(f64, f64)>)> {
        let mut known: Vec<(Rounding, Vec<(f64, f64)>)> = Vec::new();
        let judged = engines().into_iter().map(move |engine| {
            let rounding = self.rounding(engine, apart);
            if known.iter().all(|(other, _)| *other != rounding) {
                let rows: Vec<_> = (0..self.shape.rows).map(|i| row(i, rounding)).collect();
                known.push((rounding, self.expected(&rows, rounding)));
            }
            let expected = known.iter().find(|(other, _)| *other == rounding).unwrap();
            (engine, expected.1.clone())
        });
        judged.collect::<Vec<_>>().into_iter()
    }

    fn uses_all(&self, width: usize, used: &(dyn Fn(usize, usize) -> bool + Sync)) -> bool {
        (0..self.shape.rows).all(|row| (0..self.shape.k.div_ceil(width)).all(|part| used(row, part)))
    }

    /// Whether a row is left out.
    fn skipped(&self, row: usize) -> bool {
        self.shape.rows > 2 && row % 5 == 1
    }

    fn multiply(&self, engine: Engine, width: usize, used: &(dyn Fn(usize, usize) -> bool + Sync)) -> Vec<f32> {
        let Shape { n, k, rows, level, .. } = self.shape;
        let host = Threads::new(1 + rows % 3);
        let weight = self.weight().narrowed(engine, level, rows, &host);
        let mirrored = |row: usize| rows - 1 - row;
        let input = |row: usize| self.x[mirrored(row) * k..].as_ptr();
        let of_row = |row: usize, part: usize| used(mirrored(row), part);
        let parts = (!self.uses_all(width, used)).then_some(Parts { width, used: &of_row });
        let mut sums = vec![START; rows * n];
        // SAFETY: x has k elements for every row, the sums n for each.
        unsafe {
            let x = Activations::new(engine, &host, weight.format, level, rows, &input, parts).unwrap();
            let mut worker = Worker::new(&x, &host).unwrap();
            for columns in [0..n / 3, n / 3..n] {
                let picked = (0..rows).filter(|&row| !self.skipped(row));
                let row =
                    |row: usize| Row { index: row as u32, output: sums.as_mut_ptr().add(row * n + columns.start) };
                let picked: Vec<Row> = picked.map(row).collect();
                worker.multiply(&weight, &x, &picked, columns, Start::Sums);
            }
        }
        sums
    }
}

const ALL: &(dyn Fn(usize, usize) -> bool + Sync) = &|_, _| true;

/// Every format and level, for which `check` is called.
fn formats(mut check: impl FnMut(Shape)) {
    for bits in [4, 8] {
        for block in [16, 32, 64, 128, 256] {
            for zero_points in [false, true] {
                for level in [Level::Float, Level::Int8] {
                    check(Shape { bits, block, n: 0, k: 0, rows: 0, zero_points, level });
                }
            }
        }
    }
}

#[test]
fn products_equal_dequantised_weights() {
    let mut random = Random(1);
    formats(|format| {
        for rows in [1, 2, 3, 4, 7, 8, 9, 16, 23] {
            let blocks = 1 + random.bits() as usize % (1100 / format.block);
            let n = [1, 5, 16, 37, 83][random.bits() as usize % 5];
            let shape = Shape { n, k: blocks * format.block, rows, ..format };
            Problem::<f32, f32>::new(shape, &mut random).everywhere(shape.k, ALL);
        }
    });
}

#[test]
fn element_types_of_activations_and_scales() {
    let mut random = Random(2);
    formats(|format| {
        for rows in [1, 11] {
            let shape = Shape { n: 21, k: 3 * format.block, rows, ..format };
            Problem::<f16, f16>::new(shape, &mut random).everywhere(shape.k, ALL);
            Problem::<bf16, bf16>::new(shape, &mut random).everywhere(shape.k, ALL);
            Problem::<f32, f16>::new(shape, &mut random).everywhere(shape.k, ALL);
        }
    });
}

#[test]
fn skipped_parts_are_zero_and_never_read() {
    let mut random = Random(3);
    formats(|format| {
        for (rows, width) in [(1, 16), (1, 64), (3, 80), (6, 128), (10, 16), (19, 64), (19, 40), (33, 128), (12, 384)] {
            let k = (width * 8usize).next_multiple_of(format.block);
            let shape = Shape { n: 19, k, rows, ..format };
            let parts = k.div_ceil(width);
            let used: Vec<bool> = (0..rows * parts).map(|_| random.bits().is_multiple_of(3)).collect();
            let mut problem = Problem::<f32, f32>::new(shape, &mut random);
            for row in 0..rows {
                for i in (0..k).filter(|i| !used[row * parts + i / width]) {
                    problem.x[row * k + i] = f32::NAN;
                }
            }
            problem.everywhere(width, &|row, part| used[row * parts + part]);
        }
    });
}

/// Blocks and rows that fill tiles and do not, more columns than a panel has, and panels of which some rows use a part, and all rows
/// others: the first two, and as many rows, though not the same, the next two.
#[test]
fn many_rows() {
    let mut random = Random(9);
    formats(|format| {
        if format.level == Level::Float {
            return;
        }
        for (rows, n, blocks, width) in
            [(9, 7, 1, 0), (16, 33, 3, 0), (31, 97, 9, 0), (70, 140, 7, 64), (49, 64, 11, 48)]
        {
            let shape = Shape { n, k: blocks * format.block, rows, ..format };
            let problem = Problem::<f32, f16>::new(shape, &mut random);
            let width = if width == 0 { shape.k } else { width };
            let parts = shape.k.div_ceil(width);
            let used: Vec<bool> = (0..rows * parts).map(|_| !random.bits().is_multiple_of(4)).collect();
            problem.everywhere(width, &|row, part| match part {
                0 | 1 => true,
                2 => row < 6,
                3 => (3..9).contains(&row),
                _ => used[row * parts + part],
            });
        }
    });
}

#[test]
fn extreme_integers_do_not_saturate() {
    let mut random = Random(4);
    formats(|format| {
        for (rows, byte, zero) in [(1, 0xff, 0x00), (2, 0x00, 0xff), (13, 0xff, 0x00), (13, 0x00, 0xff)] {
            let shape = Shape { n: 18, k: 4 * format.block, rows, ..format };
            for sign in [1.0, -1.0] {
                let mut problem = Problem::<f32, f32>::new(shape, &mut random);
                problem.data.fill(byte);
                // Equal terms would all be rounded in the same direction.
                let float = shape.level == Level::Float;
                problem.x.fill_with(|| if float { sign * (0.5 + random.unit() as f32) } else { sign });
                if let Some(zeros) = &mut problem.zeros {
                    zeros.fill(zero);
                }
                problem.everywhere(shape.k, ALL);
            }
        }
    });
}

/// Weights that use 7 of their 8 bits, in the middle of the range, where as many rows make that worth knowing; and weights of which one value
/// lies beside it.
#[test]
fn narrow_weights() {
    let mut random = Random(13);
    formats(|format| {
        if format.bits != 8 || format.level == Level::Float {
            return;
        }
        for (rows, n, blocks, width) in [(64, 19, 5, 0), (79, 48, 9, 64), (67, 33, 3, 0)] {
            let shape = Shape { n, k: blocks * format.block, rows, ..format };
            let width = if width == 0 { shape.k } else { width };
            for beside in [None, Some(63), Some(192)] {
                let mut problem = Problem::<f32, f32>::new(shape, &mut random);
                for value in &mut problem.data {
                    // Often the least and the largest.
                    *value = (64 + i32::from(*value) * 2 - 192).clamp(64, 191) as u8;
                }
                if let Some(value) = beside {
                    *problem.data.last_mut().unwrap() = value;
                }
                let host = Threads::new(2);
                for engine in engines() {
                    let narrow = problem.weight().narrowed(engine, shape.level, rows, &host).format.narrow;
                    assert_eq!(narrow, engine.widens_bytes() && beside.is_none(), "{} {shape:?}", name(engine));
                }
                problem.everywhere(width, &|row, part| part < 2 || !(row + part).is_multiple_of(3));
            }
        }
        // Sums of two products that are as large as they can be.
        for (byte, sign) in [(64, 1.0), (191, 1.0), (64, -1.0), (191, -1.0)] {
            let mut problem =
                Problem::<f32, f32>::new(Shape { n: 18, k: 4 * format.block, rows: 70, ..format }, &mut random);
            problem.data.fill(byte);
            problem.x.fill(sign);
            problem.everywhere(4 * format.block, ALL);
        }
    });
}

#[test]
fn zeros_and_tiny_and_huge_activations() {
    let mut random = Random(5);
    formats(|format| {
        for rows in [1, 10] {
            let shape = Shape { n: 7, k: 4 * format.block, rows, ..format };
            let mut problem = Problem::<f32, f32>::new(shape, &mut random);
            let factors = [0.0, 1e30, 1e-30, -1.0];
            for (i, x) in problem.x.iter_mut().enumerate() {
                *x *= factors[i / format.block % 4];
            }
            problem.everywhere(shape.k, ALL);
        }
    });
}

/// As of a block with one outlier: sums of products and their correction would be large numbers that cancel.
#[test]
fn weights_near_their_zero_points_keep_their_digits() {
    let mut random = Random(8);
    formats(|format| {
        for (rows, k) in [(1, 4 * format.block), (3, 5 * format.block), (12, 2 * format.block)] {
            let shape = Shape { n: 6, k, rows, zero_points: true, level: Level::Float, ..format };
            let mut problem = Problem::<f32, f32>::new(shape, &mut random);
            problem.x.iter_mut().for_each(|x| *x = x.abs() + 3.0);
            // A value, or two, in which but the last bit is clear.
            let last = if format.bits == 4 { 0x11 } else { 1 };
            problem.data.iter_mut().for_each(|value| *value &= last);
            problem.zeros = problem.zeros.map(|zeros| vec![0; zeros.len()]);
            problem.everywhere(k, ALL);
            problem.data.iter_mut().for_each(|value| *value = !*value);
            problem.zeros = problem.zeros.map(|zeros| vec![0xff; zeros.len()]);
            problem.everywhere(k, ALL);
        }
    });
}

/// Where zero points are what kernels expect, nothing is subtracted from sums: those that have no room do not become NaN.
#[test]
fn sums_without_room_are_infinite() {
    let mut random = Random(7);
    formats(|format| {
        for rows in [1, 3, 12] {
            let shape = Shape { n: 5, k: 3 * format.block, rows, zero_points: false, level: Level::Float, ..format };
            let mut problem = Problem::<f32, f32>::new(shape, &mut random);
            // Weights of 3 and 7: sums of two products have no room.
            problem.x.fill(1e38);
            problem.data.fill(if format.bits == 4 { 0xbb } else { 135 });
            problem.scales.fill(1.0);
            for engine in engines() {
                let mut out = vec![0.0; rows * 5];
                let (weight, host) = (problem.weight(), Threads::new(1));
                let epilogue = (None, &Epilogue::nothing(weight.columns()));
                layer(engine, "test", &problem.x, &weight, epilogue, &mut out, shape.level, &host).unwrap();
                assert_eq!(out, vec![f32::INFINITY; rows * 5], "{} {shape:?}", name(engine));
            }
        }
    });
}

/// Whatever the bits of the NaN: rounding must not make a number of it.
#[test]
fn scales_that_are_nan_give_nan() {
    let mut random = Random(8);
    formats(|format| {
        for (rows, bits) in [(1, 0x7fff), (12, 0x7fff), (12, 0xffff), (12, 0x7e00)] {
            let shape = Shape { n: 5, k: 3 * format.block, rows, ..format };
            let mut problem = Problem::<f32, f16>::new(shape, &mut random);
            problem.scales[3 * 2 + 1] = f16::from_bits(bits);
            for engine in engines() {
                let mut out = vec![0.0; rows * 5];
                let (weight, host) = (problem.weight(), Threads::new(1));
                let epilogue = (None, &Epilogue::nothing(weight.columns()));
                layer(engine, "test", &problem.x, &weight, epilogue, &mut out, shape.level, &host).unwrap();
                for (i, number) in out.iter().enumerate() {
                    assert_eq!(number.is_nan(), i % 5 == 2, "{} {bits:x} {shape:?}", name(engine));
                }
            }
        }
    });
}

#[test]
fn activations_that_are_not_finite_give_nan() {
    let mut random = Random(6);
    formats(|format| {
        for (rows, bad) in [(1, f32::NAN), (1, f32::INFINITY), (12, f32::NEG_INFINITY)] {
            let shape = Shape { n: 5, k: 3 * format.block, rows, ..format };
            let mut problem = Problem::<f32, f32>::new(shape, &mut random);
            problem.x[format.block + 3] = bad;
            for engine in engines() {
                let mut out = vec![0.0; rows * 5];
                let (weight, host) = (problem.weight(), Threads::new(1));
                layer(
                    engine,
                    "test",
                    &problem.x,
                    &weight,
                    (None, &Epilogue::nothing(weight.columns())),
                    &mut out,
                    shape.level,
                    &host,
                )
                .unwrap();
                assert!(out[..5].iter().all(|x| !x.is_finite()), "{} {shape:?} {out:?}", name(engine));
                assert!(out[5..].iter().all(|x| x.is_finite()), "{} {shape:?} {out:?}", name(engine));
            }
        }
    });
}

fn dense<X: Element>(problem: Problem<X, X>, threads: usize, random: &mut Random) {
    let shape = problem.shape;
    let bias: Vec<X> = (0..shape.n).map(|_| X::from_f32(random.signed())).collect();
    for (engine, expected) in problem.judged(false, |row, rounding| problem.row(row, rounding, |_| true)) {
        // A unit rounds many rows in another way than the vectors do the few that are left.
        if engine.unit().is_some() && shape.rows > ROWS && shape.rows % ROWS <= FEW {
            continue;
        }
        for bias in [None, Some(bias.as_slice())] {
            let mut out = vec![X::from_f32(f32::NAN); shape.rows * shape.n];
            let (weight, host) = (problem.weight(), Threads::new(threads));
            layer(
                engine,
                "test",
                &problem.x,
                &weight,
                (bias, &Epilogue::nothing(weight.columns())),
                &mut out,
                shape.level,
                &host,
            )
            .unwrap();
            for (i, (found, &(expected, magnitude))) in out.iter().zip(&expected).enumerate() {
                let expected = expected + bias.map_or(0.0, |bias| f64::from(bias[i % shape.n].to_f32()));
                let error = (f64::from(found.to_f32()) - expected).abs();
                let tolerance = TOLERANCE * (magnitude + 1.0) + expected.abs() * epsilon::<X>();
                assert!(error <= tolerance, "{} {shape:?}: element {i}: {error:e} from {expected}", name(engine));
            }
        }
    }
}

/// Half a unit in the last place, relative.
fn epsilon<X: Element>() -> f64 {
    match X::DTYPE {
        moh_operators::DType::F16 => 2f64.powi(-11),
        moh_operators::DType::BF16 => 2f64.powi(-8),
        _ => 0.0,
    }
}

#[test]
fn dense_layers_with_bias() {
    let mut random = Random(7);
    formats(|format| {
        for (rows, n) in [(1, 70), (5, 33), (FEW, 16), (FEW + 1, 130), (40, 97)] {
            let shape = Shape { n, k: 2 * format.block, rows, ..format };
            dense::<f32>(Problem::new(shape, &mut random), rows % 4, &mut random);
            dense::<f16>(Problem::new(shape, &mut random), 2, &mut random);
            dense::<bf16>(Problem::new(shape, &mut random), 1, &mut random);
        }
    });
}

/// The first panel's products begin the sums, with the bias; those of the others are added.
#[test]
fn inner_indices_of_several_panels() {
    let mut random = Random(12);
    for bits in [4, 8] {
        for level in [Level::Float, Level::Int8] {
            for (zero_points, n) in [(false, 21), (true, 33)] {
                let shape = Shape { bits, block: 32, n, k: 4096 + 256, rows: FEW + 5, zero_points, level };
                dense::<f32>(Problem::new(shape, &mut random), 2, &mut random);
            }
        }
    }
}

#[test]
fn more_rows_than_are_converted_at_once() {
    for (bits, level) in [(4, Level::Float), (8, Level::Int8)] {
        let shape = Shape { bits, block: 16, n: 3, k: 16, rows: 2 * ROWS + FEW + 5, zero_points: true, level };
        dense::<f32>(Problem::new(shape, &mut Random(11)), 2, &mut Random(12));
    }
    // The last are few, for which the same weights are not narrow.
    let shape = Shape { bits: 8, block: 16, n: 3, k: 16, rows: ROWS + 3, zero_points: false, level: Level::Int8 };
    let mut problem = Problem::new(shape, &mut Random(13));
    for value in &mut problem.data {
        *value = *value % 128 + 64;
    }
    dense::<f32>(problem, 2, &mut Random(14));
}

#[test]
fn results_do_not_depend_on_threads() {
    let mut random = Random(8);
    formats(|format| {
        for rows in [3, 20] {
            let shape = Shape { n: 150, k: 1024, rows, ..format };
            let problem = Problem::<f32, f32>::new(shape, &mut random);
            for engine in engines() {
                let run = |threads: usize| {
                    let mut out = vec![0.0; rows * shape.n];
                    let (weight, host) = (problem.weight(), Threads::new(threads));
                    layer(
                        engine,
                        "test",
                        &problem.x,
                        &weight,
                        (None, &Epilogue::nothing(weight.columns())),
                        &mut out,
                        shape.level,
                        &host,
                    )
                    .unwrap();
                    out
                };
                assert_eq!(run(1), run(3), "{} {shape:?}", name(engine));
            }
        }
    });
}

#[test]
fn what_does_not_fit_is_refused() {
    let new = |bits, block, k, data: usize, scales: usize, zeros: Option<usize>| {
        let (data, scales) = (vec![0; data], vec![0.0f32; scales]);
        let zeros = zeros.map(|len| vec![0; len]);
        NBits::new("test", bits, block, [3, k], &data, &scales, zeros.as_deref()).map(|_| ()).unwrap_err()
    };
    assert!(matches!(new(5, 32, 32, 48, 3, None), Error::Attribute { attribute: "bits", .. }));
    assert!(matches!(new(4, 48, 48, 72, 3, None), Error::Attribute { attribute: "block_size", .. }));
    assert!(matches!(new(4, 32, 48, 72, 3, None), Error::Attribute { attribute: "block_size", .. }));
    assert!(matches!(new(4, 32, 96, 143, 9, None), Error::Length { tensor: "weight", expected: 144, .. }));
    assert!(matches!(new(4, 32, 96, 144, 8, None), Error::Length { tensor: "scales", expected: 9, .. }));
    assert!(matches!(new(4, 32, 96, 144, 9, Some(5)), Error::Length { tensor: "zero_points", expected: 6, .. }));
    let (data, scales) = (vec![0; 144], vec![0.0f32; 9]);
    let weight = NBits::new("test", 4, 32, [3, 96], &data, &scales, None).unwrap();
    let linear = |x: usize, bias: usize, out: usize| {
        let (x, bias, mut out) = (vec![0.0f32; x], vec![0.0; bias], vec![0.0; out]);
        super::linear("test", &x, &weight, Some(&bias), &mut out, Level::Int8, &Threads::new(1)).unwrap_err()
    };
    assert!(matches!(linear(191, 3, 6), Error::Length { tensor: "x", .. }));
    assert!(matches!(linear(192, 2, 6), Error::Length { tensor: "bias", expected: 3, .. }));
    assert!(matches!(linear(192, 3, 5), Error::Length { tensor: "output", expected: 6, .. }));
}
