//! Every instruction set is tested against scalar code.

use super::{EXP2_MOST, Isa, Job, LARGEST_OF_DIGITS, MAX_LANES};
use half::{bf16, f16};
use moh_operators::Element;

/// Runs `job` on every instruction set that this processor supports.
fn everywhere<J: Job<Output = ()> + Copy>(job: J) {
    macro_rules! run_each {
        ($(#[$cfg:meta] $module:ident::$token:ident,)*) => {
            $(#[$cfg] run(<super::$module::$token as Isa>::detect(), job);)*
        };
    }
    super::each_isa!(run_each);
}

fn run<I: Isa, J: Job<Output = ()>>(isa: Option<I>, job: J) {
    if let Some(isa) = isa {
        isa.vectorize(job);
    }
}

fn lanes<I: Isa>(isa: I, x: I::V) -> Vec<f32> {
    let mut lanes = [0.0; MAX_LANES];
    // SAFETY: the array holds MAX_LANES floats.
    unsafe { isa.store(lanes.as_mut_ptr(), x) };
    lanes[..I::LANES].to_vec()
}

/// A vector whose lane i is `x(i)`.
fn vector<I: Isa>(isa: I, x: impl Fn(usize) -> f32) -> I::V {
    let lanes: [f32; MAX_LANES] = std::array::from_fn(x);
    // SAFETY: the array holds MAX_LANES floats.
    unsafe { isa.load(lanes.as_ptr()) }
}

#[derive(Clone, Copy)]
struct Exp2;

impl Job for Exp2 {
    type Output = ();
    fn run<I: Isa>(self, isa: I) {
        let exp2 = |x: f32| lanes(isa, isa.exp2(isa.splat(x)))[0];
        for i in -1_274_000..=1_260_000 {
            let x = -1e-4 * i as f32;
            let (found, expected) = (f64::from(exp2(x)), f64::from(x).exp2());
            // 2^-126 is the smallest normal number; below it, 0 is accepted.
            let close = (found / expected - 1.0).abs() < 2.5e-7 || (x <= -126.0 && found <= expected * 1.01);
            assert!(close, "2^{x} = {expected}, found {found}");
        }
        assert_eq!(exp2(0.0), 1.0);
        assert_eq!(exp2(-0.0), 1.0);
        assert_eq!(exp2(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp2(EXP2_MOST), f32::INFINITY);
        assert!(exp2(f32::NAN).is_nan());
        for x in [-126.5, -127.0, -127.5, -140.0, -1e4, -1e30, f32::MIN] {
            assert!((0.0..=1.2e-38).contains(&exp2(x)), "2^{x} = {}", exp2(x));
        }
    }
}

#[derive(Clone, Copy)]
struct Comparisons;

impl Job for Comparisons {
    type Output = ();
    fn run<I: Isa>(self, isa: I) {
        let one = |x: I::V| lanes(isa, x)[0];
        let (nan, inf) = (isa.splat(f32::NAN), isa.splat(f32::INFINITY));
        let (two, minus) = (isa.splat(2.0), isa.splat(f32::NEG_INFINITY));
        assert_eq!(one(isa.max(nan, two)), 2.0);
        assert!(one(isa.max(two, nan)).is_nan());
        assert_eq!(one(isa.max(minus, two)), 2.0);
        assert_eq!(one(isa.max(inf, two)), f32::INFINITY);
        assert_eq!(one(isa.finite_max(minus)), 0.0);
        assert_eq!(one(isa.finite_max(inf)), f32::INFINITY);
        assert_eq!(one(isa.finite_max(two)), 2.0);
        let zero = isa.splat(0.0);
        assert_eq!(one(isa.keep_less(zero, two, isa.splat(7.0))), 7.0);
        assert_eq!(one(isa.keep_less(two, two, isa.splat(7.0))), f32::NEG_INFINITY);
        assert_eq!(one(isa.keep_less(two, zero, nan)), f32::NEG_INFINITY);
        assert_eq!(one(isa.fma(two, isa.splat(3.0), isa.splat(0.5))), 6.5);
        assert_eq!(one(isa.sub(two, isa.splat(3.0))), -1.0);
        assert_eq!(one(isa.div(two, isa.splat(3.0))), 2.0 / 3.0);
        assert_eq!(one(isa.div(two, inf)), 0.0);
        for exponent in 0..126 {
            for part in 0..1000 {
                let b = (1.0 + part as f32 / 1000.0) * (exponent as f32).exp2();
                let error = (f64::from(one(isa.quotient(two, isa.splat(b)))) * f64::from(b) / 2.0 - 1.0).abs();
                assert!(error < 3.0 * f64::from(f32::EPSILON), "2 / {b}: {error}");
            }
        }
        assert_eq!(one(isa.quotient(two, inf)), 0.0);
        assert!(one(isa.quotient(minus, inf)).is_nan());
        assert!(one(isa.quotient(two, nan)).is_nan());
        let expected: f32 = (0..I::LANES).map(|i| i as f32 + 0.5).sum();
        assert_eq!(isa.sum(vector(isa, |i| i as f32 + 0.5)), expected);
    }
}

#[derive(Clone, Copy)]
struct Transpose;

impl Job for Transpose {
    type Output = ();
    fn run<I: Isa>(self, isa: I) {
        let mut rows: [I::V; MAX_LANES] = std::array::from_fn(|row| vector(isa, |i| (row * 100 + i) as f32));
        isa.transpose(&mut rows);
        for row in 0..I::LANES {
            let expected: Vec<f32> = (0..I::LANES).map(|i| (i * 100 + row) as f32).collect();
            assert_eq!(lanes(isa, rows[row]), expected);
        }
        let rows: [I::V; MAX_LANES] = std::array::from_fn(|row| vector(isa, |i| (row * row * 100 + i) as f32));
        let sum = |row: usize| (0..I::LANES).map(|i| (row * row * 100 + i) as f32).sum();
        assert_eq!(lanes(isa, isa.sums(rows)), (0..I::LANES).map(sum).collect::<Vec<f32>>());
    }
}

#[derive(Clone, Copy)]
struct Conversions;

impl Job for Conversions {
    type Output = ();
    fn run<I: Isa>(self, isa: I) {
        // Every 16-bit pattern, and values around each midpoint between two of them.
        for bits in 0..=u16::MAX {
            for half in [0u32, 0x7fff, 0x8000, 0x8001] {
                check::<I, bf16>(isa, f32::from_bits(u32::from(bits) << 16 | half));
            }
            let x = f16::from_bits(bits).to_f32();
            for x in [x, x * (1.0 + 1.0 / 2048.0), x * (1.0 + 1.5 / 2048.0)] {
                check::<I, f16>(isa, x);
            }
        }
        check::<I, f32>(isa, 1.25);
    }
}

fn check<I: Isa, T: Element>(isa: I, x: f32) {
    let mut narrow = [T::from_f32(0.0); MAX_LANES];
    let bits = |x: f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
    // SAFETY: the array holds MAX_LANES elements.
    unsafe {
        isa.narrow(narrow.as_mut_ptr(), isa.splat(x));
        let expected = bits(T::from_f32(x).to_f32());
        for (i, found) in narrow[..I::LANES].iter().enumerate() {
            assert_eq!(bits(found.to_f32()), expected, "{x} in lane {i}");
        }
        for (i, found) in lanes(isa, isa.widen(narrow.as_ptr())).into_iter().enumerate() {
            assert_eq!(bits(found), expected, "{x} in lane {i}");
        }
    }
}

#[derive(Clone, Copy)]
struct Parts;

impl Job for Parts {
    type Output = ();
    fn run<I: Isa>(self, isa: I) {
        parts::<I, f32>(isa);
        parts::<I, f16>(isa);
        parts::<I, bf16>(isa);
    }
}

fn parts<I: Isa, T: Element>(isa: I) {
    for n in 0..=I::LANES {
        let input: Vec<T> = (0..n).map(|i| T::from_f32(i as f32 + 1.0)).collect();
        let mut output = [T::from_f32(-1.0); MAX_LANES];
        // SAFETY: n <= LANES, and the buffers hold n elements.
        let found = unsafe {
            let x = isa.widen_part(input.as_ptr(), n);
            isa.narrow_part(output.as_mut_ptr(), x, n);
            lanes(isa, x)
        };
        for i in 0..I::LANES {
            assert_eq!(found[i], if i < n { i as f32 + 1.0 } else { 0.0 });
            assert_eq!(output[i].to_f32(), if i < n { i as f32 + 1.0 } else { -1.0 });
        }
    }
}

#[test]
fn exp2_is_accurate() {
    everywhere(Exp2);
}

#[test]
fn arithmetic_and_nan_handling() {
    everywhere(Comparisons);
}

#[test]
fn transpose_and_sums_equal_scalar_code() {
    everywhere(Transpose);
}

#[test]
fn conversions_round_to_nearest_even() {
    everywhere(Conversions);
}

#[test]
fn partial_loads_and_stores_stay_in_bounds() {
    everywhere(Parts);
}

#[derive(Clone, Copy)]
struct Halves;

impl Job for Halves {
    type Output = ();
    fn run<I: Isa>(self, isa: I) {
        let number = |i: usize| (i as f32 + 0.3) * if i.is_multiple_of(2) { -1.7e-5 } else { 3.1e7 };
        let (a, b) = (|i| number(i), |i| number(i + 100));
        let (paired, halves) = (isa.pair(vector(isa, a), vector(isa, b)), isa.halves(vector(isa, a), vector(isa, b)));
        let mut sums = vec![0.0; I::LANES];
        let mut rest = vector(isa, a);
        for _ in 0..3 {
            for (sum, bits) in sums.iter_mut().zip(lanes(isa, isa.halves(rest, rest))) {
                *sum += bf16::from_bits(bits.to_bits() as u16).to_f32();
            }
            rest = isa.rest(rest);
        }
        for i in 0..I::LANES {
            let bits = |x: f32| u32::from(bf16::from_f32(x).to_bits());
            assert_eq!(lanes(isa, paired)[i].to_bits(), bits(a(i)) | bits(b(i)) << 16);
            assert_eq!(lanes(isa, halves)[i].to_bits(), a(i).to_bits() >> 16 | b(i).to_bits() & 0xffff_0000);
            assert_eq!(sums[i], a(i), "three bf16 terms of 8 bits sum to the f32");
            let upper = |x: f32| f32::from_bits(x.to_bits() & 0xffff_0000);
            assert_eq!(isa.unpair(halves).map(|half| lanes(isa, half)[i]), [upper(a(i)), upper(b(i))]);
        }
        assert!(lanes(isa, isa.rest(isa.splat(f32::INFINITY)))[0].is_nan());
    }
}

#[test]
fn bf16_split_is_exact() {
    everywhere(Halves);
}

#[derive(Clone, Copy)]
struct Digits;

impl Job for Digits {
    type Output = ();
    fn run<I: Isa>(self, isa: I) {
        let most = LARGEST_OF_DIGITS as f32;
        for (scale, numbers) in
            [(1.0, [most, -most, 0.0, 128.0]), (0.5, [1.0, 3.0, -257.0, 65535.0]), (1e6, [1.5, -7.9, 2e-7, -3.3])]
        {
            let number = |vector: usize, lane: usize| numbers[vector] / (lane + 1) as f32;
            let vectors = std::array::from_fn(|i| vector(isa, |lane| number(i, lane)));
            let digits = isa.digits(vectors, isa.splat(scale));
            let digits = digits.map(|digit| lanes(isa, digit));
            for (byte, lane) in (0..4).flat_map(|byte| (0..I::LANES).map(move |lane| (byte, lane))) {
                let digit = |digit: &Vec<f32>| i32::from((digit[lane].to_bits() >> (8 * byte)) as u8 as i8);
                let found = digits.iter().fold(0, |sum, part| sum * 256 + digit(part));
                assert_eq!(found, (number(byte, lane) * scale).round_ties_even() as i32, "{} of {byte}", lane);
            }
        }
        let integers = |lane: usize| f32::from_bits((lane as i32 * -70_001).cast_unsigned());
        assert_eq!(lanes(isa, isa.widen_integers(vector(isa, integers)))[1..I::LANES][0], -70_001.0);
        let magnitude = |a: f32, b: f32| lanes(isa, isa.larger_magnitude(isa.splat(a), isa.splat(b)))[0];
        assert_eq!([magnitude(-3.0, 2.0), magnitude(1.0, -1.5), magnitude(-0.0, 0.0)], [3.0, 1.5, 0.0]);
        assert_eq!(magnitude(f32::NEG_INFINITY, 1.0), f32::INFINITY);
        assert!(magnitude(f32::NAN, f32::INFINITY).is_nan() && magnitude(1.0, -f32::NAN).is_nan());
        for first in [0, 1, I::LANES - 1, I::LANES, 40] {
            let found =
                lanes(isa, isa.without_first(vector(isa, |lane| [f32::NAN, 2.0][usize::from(lane >= first)]), first));
            assert!(
                (0..I::LANES).all(|lane| found[lane] == [0.0, 2.0][usize::from(lane >= first)]),
                "{first}: {found:?}"
            );
        }
    }
}

#[test]
fn numbers_are_sums_of_their_digits() {
    everywhere(Digits);
}

/// Random digits, the largest among them: both matrices and one.
#[cfg(target_arch = "x86_64")]
fn digit_products<U: super::Unit>() {
    use super::unit::{DigitProduct, Lines, Multiply, ROW_BYTES, TILE, TILE_BYTES};
    const STEPS: usize = 3;
    const WIDTH: usize = 2 * TILE;
    if U::MOST_TERMS < 2 || U::Vectors::detect().is_none() {
        return;
    }
    let Some(unit) = U::detect() else { return };
    let mut random = moh_conformance::Random(1);
    let mut bytes = |len: usize| -> Vec<i8> {
        let byte = |x: f64| if x.abs() > 0.9 { -128 } else { (x * 140.0) as i8 };
        (0..len).map(|_| byte(random.signed().into())).collect()
    };
    let a = [bytes(3 * STEPS * TILE_BYTES), bytes(3 * STEPS * TILE_BYTES)];
    let b = bytes(3 * STEPS * 2 * TILE_BYTES);
    let element = |place: usize, matrix: usize, row: usize, column: usize| -> i32 {
        let of_step = |digit: usize, step: usize| -> i32 {
            let x = &a[matrix][(digit * STEPS + step) * TILE_BYTES + row * ROW_BYTES..][..ROW_BYTES];
            let y = |k: usize| {
                b[((place - digit) * STEPS + step) * 2 * TILE_BYTES + k / 4 * 2 * ROW_BYTES + 4 * column + k % 4]
            };
            x.iter().enumerate().map(|(k, &x)| i32::from(x) * i32::from(y(k))).sum()
        };
        (0..=place)
            .flat_map(|digit| (0..STEPS).map(move |step| (digit, step)))
            .map(|(digit, step)| of_step(digit, step))
            .sum()
    };
    let multiplier = unit.start();
    for (digits, both) in [(3, true), (3, false), (2, true), (2, false)] {
        let mut c = vec![7i32; 3 * 2 * TILE * WIDTH];
        let product = DigitProduct {
            a: [a[0].as_ptr().cast(), a[1].as_ptr().cast()],
            b: b.as_ptr().cast(),
            b_stride: 2 * ROW_BYTES,
            b_step: 2 * TILE_BYTES,
            digit_strides: [STEPS * TILE_BYTES, STEPS * 2 * TILE_BYTES],
            steps: STEPS,
            digits,
            c: c.as_mut_ptr(),
            ahead: Lines::NONE,
        };
        // SAFETY: the factors have three digits and as many steps, and `c` all places.
        unsafe {
            match both {
                true => multiplier.multiply_digits::<true>(&product),
                false => multiplier.multiply_digits::<false>(&product),
            }
        }
        for (i, &found) in c.iter().enumerate() {
            let (place, matrix, row, column) =
                (i / (2 * TILE * WIDTH), i / (TILE * WIDTH) % 2, i / WIDTH % TILE, i % WIDTH);
            let expected =
                if place < digits && (matrix == 0 || both) { element(place, matrix, row, column) } else { 7 };
            assert_eq!(found, expected, "{} at {i}", U::NAME);
        }
    }
}

/// Random products of both matrices and of one, of every number of terms, alone and added.
#[cfg(target_arch = "x86_64")]
fn tile_products<U: super::Unit>() {
    use super::unit::{Lines, Multiply, TILE, TILE_BYTES, TileProduct};
    const TERMS: usize = 3;
    const STEPS: usize = 3;
    const WIDTH: usize = 2 * TILE;
    const FLOATS: usize = TILE_BYTES / size_of::<f32>();
    if U::Vectors::detect().is_none() {
        return;
    }
    let Some(unit) = U::detect() else { return };
    let mut random = moh_conformance::Random(1);
    let mut number = |term: usize| bf16::from_f32(random.signed() / 256f32.powi(term as i32));
    let mut pairs = |per_term: usize| -> Vec<[bf16; 2]> {
        (0..TERMS * per_term).map(|i| [number(i / per_term), number(i / per_term)]).collect()
    };
    // Terms of the matrices of `a`, one after the other; rows of `b` are those of two tiles.
    let a = [pairs(STEPS * FLOATS), pairs(STEPS * FLOATS)];
    let b = pairs(STEPS * TILE * WIDTH);
    let start: Vec<f32> = (0..2 * TILE * WIDTH).map(|i| i as f32 / 64.0 - 5.0).collect();
    let kept = |terms: usize, i: usize, j: usize| i < terms && j < terms && (terms < 3 || i + j < 3);
    let element = |terms: usize, matrix: usize, row: usize, column: usize| -> f64 {
        let mut sum = 0.0;
        for (i, j) in (0..9).map(|pair| (pair / 3, pair % 3)).filter(|&(i, j)| kept(terms, i, j)) {
            for p in 0..STEPS * TILE {
                let (step, pair) = (p / TILE, p % TILE);
                let x = a[matrix][(i * STEPS + step) * FLOATS + row * TILE + pair];
                let y = b[(j * STEPS * TILE + p) * WIDTH + column];
                sum += (0..2).map(|half| x[half].to_f64() * y[half].to_f64()).sum::<f64>();
            }
        }
        sum
    };
    let multiplier = unit.start();
    let ways = (1..=U::MOST_TERMS)
        .flat_map(|terms| [(false, true), (true, true), (true, false)].map(|(add, both)| (terms, add, both)));
    for (terms, add, both) in ways {
        let mut c = start.clone();
        let (first, stride) = (c.as_mut_ptr(), WIDTH * size_of::<f32>());
        let product = TileProduct {
            a: [a[0].as_ptr().cast(), a[1].as_ptr().cast()],
            b: b.as_ptr().cast(),
            b_stride: stride,
            b_step: TILE * stride,
            terms,
            term_strides: [STEPS * TILE_BYTES, STEPS * TILE * stride],
            steps: STEPS,
            last: TILE,
            c: [first, first.wrapping_add(TILE * WIDTH)],
            c_stride: stride,
            add,
            ahead: Lines::NONE,
        };
        // SAFETY: the factors have as many terms and steps, and `c` two matrices.
        unsafe {
            match both {
                true => multiplier.multiply::<true>(&product),
                false => multiplier.multiply::<false>(&product),
            }
        }
        for (i, (&found, &start)) in c.iter().zip(&start).enumerate() {
            let (matrix, row, column) = (i / (TILE * WIDTH), i / WIDTH % TILE, i % WIDTH);
            let expected = match (matrix == 0 || both, add) {
                (false, _) => f64::from(start),
                (true, true) => f64::from(start) + element(terms, matrix, row, column),
                (true, false) => element(terms, matrix, row, column),
            };
            let error = (f64::from(found) - expected).abs();
            assert!(error < 2e-5, "{} {terms} terms, {i}: {found} is not {expected}", U::NAME);
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn matrix_units_multiply_tiles() {
    #[cfg(target_os = "linux")]
    let _emulated = super::amx::emulator::emulate();
    macro_rules! each {
        ($(#[$cfg:meta] $module:ident::$token:ident,)*) => {
            $(#[$cfg] {
                tile_products::<super::$module::$token>();
                digit_products::<super::$module::$token>();
            })*
        };
    }
    super::each_unit!(each);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn matrix_units_name_their_vector_instruction_set() {
    assert_eq!(super::vectors_beside("avx512bf16"), Some("avx512"));
    #[cfg(target_os = "linux")]
    assert_eq!(super::vectors_beside("amx"), Some("avx512"));
    assert_eq!(super::vectors_beside("avx512"), None);
}
