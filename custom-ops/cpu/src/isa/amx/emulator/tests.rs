//! Instructions with results that were computed by hand.

use super::{Instruction, Place, Product, decode, emulate};
use std::arch::asm;

/// Configures the first tiles with rows of bytes; the others have none.
fn configure(shapes: &[(u8, u8)]) {
    #[repr(C, align(64))]
    struct Configuration([u8; 64]);
    let mut configuration = Configuration([0; 64]);
    configuration.0[0] = 1;
    for (tile, &(rows, columns)) in shapes.iter().enumerate() {
        configuration.0[16 + 2 * tile] = columns;
        configuration.0[48 + tile] = rows;
    }
    // SAFETY: the emulator or the processor knows the instruction; the configuration is that of palette 1.
    unsafe { asm!("ldtilecfg [{}]", in(reg) configuration.0.as_ptr(), options(nostack)) }
}

fn release() {
    // SAFETY: the emulator or the processor knows the instruction.
    unsafe { asm!("tilerelease", options(nomem, nostack)) }
}

/// `c` after the instruction multiplied `a` with `b`: words are sums, bytes or pairs of bfloat16.
macro_rules! multiplied {
    ($instruction:literal, $c:expr, $a:expr, $b:expr) => {{
        let (mut c, a, b) = ($c, $a, $b);
        let _emulated = emulate();
        let (rows, inner, columns) = (c.len(), b.len(), c[0].len());
        assert_eq!((a.len(), a[0].len(), b[0].len()), (rows, inner, columns));
        let (m, k, n) = (rows as u8, 4 * inner as u8, 4 * columns as u8);
        configure(&[(m, n), (m, k), (inner as u8, n)]);
        // SAFETY: the tiles have the shapes of the matrices.
        unsafe {
            asm!(
                "tileloadd tmm0, [{c} + {n}]",
                "tileloadd tmm1, [{a} + {k}]",
                "tileloadd tmm2, [{b} + {n}]",
                concat!($instruction, " tmm0, tmm1, tmm2"),
                "tilestored [{c} + {n}], tmm0",
                c = in(reg) c.as_mut_ptr(), a = in(reg) a.as_ptr(), b = in(reg) b.as_ptr(),
                n = in(reg) usize::from(n), k = in(reg) usize::from(k), options(nostack),
            );
        }
        release();
        c
    }};
}

#[test]
fn bytes_are_signed() {
    let (a, b) = ([[u32::from_le_bytes([0xff, 2, 0x80, 1])]], [[u32::from_le_bytes([3, 0xff, 0x80, 0x7f])]]);
    assert_eq!(multiplied!("tdpbssd", [[10u32]], a, b), [[10 - 3 - 2 + 16384 + 127]]);
    let word = |a: u8, b: u8| u32::from_le_bytes([a, b, 0, 0]);
    let a = [[word(1, 2), word(3, 4)], [word(5, 6), word(7, 8)], [word(0, 1), word(0, 0)]];
    let b = [[word(1, 0), word(0, 1), word(1, 1), word(10, 0)], [word(0, 1), word(1, 0), word(2, 0), word(0, 10)]];
    let c = [[100, 200, 300, 400], [500, 600, 700, 800], [0u32; 4]];
    let expected = [[105, 205, 309, 450], [513, 613, 725, 930], [0, 1, 1, 0]];
    assert_eq!(multiplied!("tdpbssd", c, a, b), expected);
}

/// A pair of bfloat16.
fn pair(low: f32, high: f32) -> u32 {
    assert_eq!((low.to_bits() | high.to_bits()) & 0xffff, 0, "not bfloat16: {low}, {high}");
    low.to_bits() >> 16 | high.to_bits()
}

#[test]
fn pairs_are_multiplied_as_a_matrix() {
    let a = [pairs([(1.0, 2.0), (3.0, 4.0)]), pairs([(5.0, 6.0), (7.0, 8.0)]), pairs([(0.0, 1.0), (0.0, 0.0)])];
    let b = [
        pairs([(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (10.0, 0.0)]),
        pairs([(0.0, 1.0), (1.0, 0.0), (2.0, 0.0), (0.0, 10.0)]),
    ];
    let bits = |row: [f32; 4]| row.map(f32::to_bits);
    let c = [bits([100.0, 200.0, 300.0, 400.0]), bits([500.0, 600.0, 700.0, 800.0]), bits([0.0; 4])];
    let expected = [[105.0, 205.0, 309.0, 450.0], [513.0, 613.0, 725.0, 930.0], [0.0, 1.0, 1.0, 0.0]].map(bits);
    assert_eq!(multiplied!("tdpbf16ps", c, a, b), expected);
}

fn pairs<const N: usize>(numbers: [(f32, f32); N]) -> [u32; N] {
    numbers.map(|(low, high)| pair(low, high))
}

/// `start` plus the products of pairs, in one element.
fn bf16<const K: usize>(start: f32, a: [(f32, f32); K], b: [(f32, f32); K]) -> f32 {
    let a = [pairs(a)];
    let b = b.map(|(low, high)| [pair(low, high)]);
    f32::from_bits(multiplied!("tdpbf16ps", [[start.to_bits()]], a, b)[0][0])
}

#[test]
fn bf16_sums_are_of_even_and_odd_pairs() {
    let large = 2f32.powi(24);
    assert_eq!(bf16(1.0, [(2.0, 3.0), (4.0, -5.0)], [(6.0, 7.0), (8.0, 9.0)]), 1.0 + 12.0 + 21.0 + 32.0 - 45.0);
    // 2^24 + 1 is rounded to even, -2^24 + 1 is exact. One after the other they would give 2.
    assert_eq!(bf16(0.5, [(large, -large), (1.0, 1.0)], [(1.0, 1.0); 2]), 1.5);
    // Products are summed before they are added: 2^24 + 1 + 1 would stay 2^24.
    assert_eq!(bf16(large, [(1.0, 1.0)], [(1.0, 1.0)]), large + 2.0);
    // The tie 2^24 + 3 is rounded to the even one.
    assert_eq!(bf16(large, [(1.0, 2.0)], [(1.0, 1.0)]), large + 4.0);
}

#[test]
fn bf16_products_are_fused_and_denormal_numbers_are_0() {
    let power = |exponent: i32| 2f32.powi(exponent);
    let least = f32::MIN_POSITIVE;
    // The second product alone would be denormal.
    let fused = bf16(0.0, [(power(-63), 0.0), (power(-70), 0.0)], [(power(-63), 0.0), (power(-70), 0.0)]);
    assert_eq!(fused, least * (1.0 + power(-14)));
    assert_eq!(bf16(0.0, [(power(-64), 0.0)], [(power(-63), 0.0)]), 0.0, "a denormal result");
    let denormal = f32::from_bits(0x0001_0000);
    assert_eq!(bf16(0.0, [(denormal, 0.0)], [(power(120), 0.0)]), 0.0, "a denormal factor");
    assert_eq!(bf16(denormal, [(least, 0.0)], [(1.0, 0.0)]), least, "a denormal start");
    assert!(bf16(0.0, [(f32::INFINITY, 0.0)], [(0.0, 0.0)]).is_nan());
    assert_eq!(bf16(0.0, [(f32::INFINITY, 0.0)], [(-1.0, 0.0)]), f32::NEG_INFINITY);
}

#[test]
fn loads_and_stores_stay_in_the_tile() {
    let _emulated = emulate();
    // Three rows of eight bytes, 20 bytes apart.
    let input: [u8; 64] = std::array::from_fn(|i| i as u8);
    let mut output = [[0xffu8; 16]; 5];
    configure(&[(3, 8), (4, 12)]);
    // SAFETY: the memory holds the tiles' rows.
    unsafe {
        asm!(
            "tileloadd tmm0, [{input} + {index} * 4 + 2]", "tilestored [{output} + {stride} + 16], tmm0",
            "tilezero tmm1", "tilezero tmm0", "tilestored [{output} + {stride}], tmm0",
            input = in(reg) input.as_ptr(), index = in(reg) 5usize, output = in(reg) output.as_mut_ptr(),
            stride = in(reg) 16usize, options(nostack),
        );
    }
    release();
    let row = |start: u8| std::array::from_fn(|i| if i < 8 { start + i as u8 } else { 0xff });
    let zero = std::array::from_fn(|i| if i < 8 { 0 } else { 0xff });
    assert_eq!(output, [zero, zero, zero, row(42), [0xff; 16]]);
}

#[test]
fn a_thread_has_tiles_of_its_own() {
    let _emulated = emulate();
    configure(&[(1, 4)]);
    let mut word = 7u32;
    // SAFETY: the tile is a word.
    unsafe { asm!("tileloadd tmm0, [{}]", in(reg) &raw const word, options(nostack)) };
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(bf16(1.0, [(2.0, 0.0)], [(3.0, 0.0)]), 7.0));
    });
    word = 0;
    // SAFETY: the tile is a word.
    unsafe { asm!("tilestored [{}], tmm0", in(reg) &raw mut word, options(nostack)) };
    release();
    assert_eq!(word, 7);
}

#[test]
fn instructions_are_decoded() {
    let general: [u64; 16] = std::array::from_fn(|register| 1000 * register as u64);
    // SAFETY: the arrays hold whole instructions.
    let decoded = |bytes: &[u8]| unsafe {
        decode(bytes.as_ptr(), &general).map(|(instruction, end)| (instruction, end.addr() - bytes.as_ptr().addr()))
    };
    // tileloadd tmm3, [r12 + r9 * 2 - 128]
    let place = Place { start: 12000 - 128, stride: 18000 };
    assert_eq!(decoded(&[0xc4, 0x82, 0x7b, 0x4b, 0x5c, 0x4c, 0x80]), Some((Instruction::Load(3, place), 7)));
    // tilestored [rbp + 0x1234], tmm7: no index
    let place = Place { start: 5000 + 0x1234, stride: 0 };
    let bytes = [0xc4, 0xe2, 0x7a, 0x4b, 0xbc, 0x25, 0x34, 0x12, 0, 0];
    assert_eq!(decoded(&bytes), Some((Instruction::Store(place, 7), 10)));
    // ldtilecfg [rip + 16]
    let bytes = [0xc4, 0xe2, 0x78, 0x49, 0x05, 16, 0, 0, 0];
    let configuration = bytes.as_ptr().wrapping_add(9 + 16);
    assert_eq!(decoded(&bytes), Some((Instruction::Configure(configuration), 9)));
    // tdpbf16ps and tdpbssd tmm1, tmm2, tmm5
    for (opcode, second, product) in [(0x5c, 0x52, Product::Bf16), (0x5e, 0x53, Product::Bytes)] {
        let multiply = Instruction::Multiply { product, sum: 1, left: 2, right: 5 };
        assert_eq!(decoded(&[0xc4, 0xe2, second, opcode, 0xca]), Some((multiply, 5)));
    }
    // ud2; vbroadcastss xmm0, [rax]; vpdpbusd of AVX-VNNI; tdpbsud tmm1, tmm2, tmm5
    let others: [&[u8]; 4] = [
        &[0x0f, 0x0b],
        &[0xc4, 0xe2, 0x79, 0x18, 0x00],
        &[0xc4, 0xe2, 0x71, 0x50, 0xc2],
        &[0xc4, 0xe2, 0x52, 0x5e, 0xca],
    ];
    for other in others {
        assert_eq!(decoded(other), None);
    }
}
