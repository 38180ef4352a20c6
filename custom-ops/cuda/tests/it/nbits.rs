//! The CUDA kernels for quantised weights against the f64 reference, on a GPU or on the emulator.

use crate::device::{A100, Device, RTX_30, compare, on_device, rerun_on_other_gpu, seed};
use moh_conformance::head_linear::{self, COMBINE, Gates, PROJECTION};
use moh_conformance::linear::Then;
use moh_conformance::nbits::{Case, LinearCase, MlpCase, Quantisation};
use moh_conformance::{Buffer, Random, routed_mlp};
use moh_operators::routed_mlp::Activation;
use moh_operators::{DType, Definition, RoutedCombine};

const HALVES: [DType; 2] = [DType::F16, DType::BF16];
const INT4: Quantisation = Quantisation { bits: 4, block: 32, zero_points: false, int8: false };
/// Widths that are multiples of 32.
const LINEAR: head_linear::Case = head_linear::Case { block: 32, width: 96, dtype: DType::F16, ..PROJECTION };

/// Checks a projection, and a combination of as many heads. Where blocks do not divide its inner dimension, its heads are wider.
fn check(device: &Device, linear: head_linear::Case, quantisation: Quantisation) {
    let divides = (linear.heads * linear.block).is_multiple_of(quantisation.block);
    let block = if divides { linear.block } else { linear.block.next_multiple_of(quantisation.block) };
    check_one(device, Case { linear, quantisation, then: Then::Nothing });
    // (Another one for each number of tokens.)
    let then = Then::linear(linear.q_len)[linear.q_len % 5];
    let linear = head_linear::Case { operator: RoutedCombine::OPERATOR, block, ..linear };
    check_one(device, Case { linear, quantisation, then });
}

fn check_one(device: &Device, case: Case) {
    println!("{case:?}");
    let linear = case.linear;
    let (gates, row) = (linear.draw_gates(), linear.heads * linear.block);
    let off = |i: usize| linear.is_projection() && gates[i / row * linear.heads + i % row / linear.block] == 0.0;
    device.check(&case.call(), off);
}

#[test]
fn all_formats() {
    on_device(|device| {
        for (i, block) in [16, 32, 64, 128, 256].into_iter().enumerate() {
            for bits in [4, 8] {
                for dtype in DType::ALL {
                    for q_len in [1, 34] {
                        let quantisation = Quantisation { bits, block, zero_points: (i + q_len) % 3 > 0, int8: false };
                        let linear = head_linear::Case { q_len, dtype, bias: i % 2 == 0, seed: 2, ..LINEAR };
                        let block = 2 * block.min(64);
                        check(device, head_linear::Case { width: 256, block, heads: 4, ..linear }, quantisation);
                    }
                }
            }
        }
    });
}

/// Around the numbers of tokens that kernels take.
#[test]
fn all_numbers_of_tokens() {
    on_device(|device| {
        for (i, q_len) in [2, 7, 8, 9, 16, 17, 32, 33, 65].into_iter().enumerate() {
            for bits in [4, 8] {
                let quantisation = Quantisation { bits, zero_points: i % 2 == 1, ..INT4 };
                let linear = head_linear::Case { q_len, dtype: HALVES[i % 2], width: 160, bias: i % 4 == 0, ..LINEAR };
                check(device, head_linear::Case { gates: Gates::Shared(1, 0.4), seed: 3, ..linear }, quantisation);
                let sparse = head_linear::Case { batch: 2, heads: 5, gates: Gates::Random(0.1), ..linear };
                check(device, sparse, quantisation);
            }
        }
    });
}

/// Rows of a tile that belong to several heads, blocks that do, and widths that are no multiples of a tile or a step.
#[test]
fn all_widths() {
    on_device(|device| {
        for (i, (heads, head, width, block)) in [
            (3, 16, 144, 16), // a row of 4 bits has no multiple of 16 bytes
            (6, 16, 64, 32),  // a block has two heads
            (16, 8, 272, 16), // a lane's 16 bytes have several heads
            (4, 24, 96, 32),  // blocks and heads straddle each other
            (8, 20, 80, 16),  // heads of no multiple of 8
            (2, 128, 1056, 32),
            (5, 160, 416, 32),
            (1, 64, 64, 64),
        ]
        .into_iter()
        .enumerate()
        {
            for bits in [4, 8] {
                for q_len in [1, 6] {
                    let dtype = HALVES[(i + q_len) % 2];
                    let linear = head_linear::Case { q_len, heads, block: head, width, dtype, seed: 4, ..LINEAR };
                    let quantisation = Quantisation { bits, block, zero_points: i % 2 == 0, int8: false };
                    check(device, head_linear::Case { bias: true, ..linear }, quantisation);
                    check(device, head_linear::Case { gates: Gates::First(1), ..linear }, quantisation);
                }
            }
        }
    });
}

#[test]
fn no_and_all_heads() {
    on_device(|device| {
        for dtype in DType::ALL {
            for q_len in [0, 1, 12, 40] {
                for gates in [Gates::Off, Gates::On, Gates::First(1)] {
                    let linear = head_linear::Case { q_len, gates, dtype, bias: true, seed: 5, ..LINEAR };
                    check(device, linear, INT4);
                    let many = head_linear::Case { heads: 40, block: 16, batch: 2, ..linear };
                    check(device, many, Quantisation { bits: 8, ..INT4 });
                }
            }
        }
    });
}

/// More steps of the inner dimension than a ballot has bits, and more than all warps load ahead.
#[test]
fn long_rows() {
    on_device(|device| {
        for (bits, dtype) in [(4, DType::F16), (8, DType::BF16)] {
            let linear = head_linear::Case { q_len: 3, seed: 6, dtype, ..LINEAR };
            let quantisation = Quantisation { bits, ..INT4 };
            let projection = head_linear::Case { width: 8224, block: 8, heads: 2, ..linear };
            check_one(device, Case { linear: projection, quantisation, then: Then::Nothing });
            let combination =
                head_linear::Case { operator: COMBINE.operator, heads: 70, block: 128, width: 32, ..linear };
            for gates in [Gates::Random(0.3), Gates::First(3)] {
                let linear = head_linear::Case { gates, ..combination };
                check_one(device, Case { linear, quantisation, then: Then::Nothing });
            }
        }
    });
}

/// A NaN in a scale reaches the tokens that use its heads, and one in x its token; neither affects anything else.
#[test]
fn nan_affects_exactly_the_outputs_that_use_it() {
    on_device(|device| {
        for q_len in [4, 12, 40] {
            for (operator, input) in
                [(PROJECTION.operator, 0), (PROJECTION.operator, 2), (COMBINE.operator, 0), (COMBINE.operator, 2)]
            {
                for (poison, block) in [(f32::NAN, 16), (f32::INFINITY, 16), (f32::NAN, 32)] {
                    let gates = Gates::Shared(1, 0.4);
                    let linear = head_linear::Case { operator, q_len, heads: 6, block: 16, gates, seed: 7, ..LINEAR };
                    let quantisation = Quantisation { block, ..INT4 };
                    let case = Case { linear, quantisation, then: Then::Nothing };
                    let mut call = case.call();
                    let buffer = &mut call.inputs[input].1;
                    let data = buffer.data();
                    let mut numbers: Vec<f32> = (0..data.len()).map(|i| data.at(i) as f32).collect();
                    *numbers.iter_mut().rev().find(|x| x.is_finite()).expect("an element is used") = poison;
                    *buffer = Buffer::new(data.dtype(), &numbers);
                    let finite = |x: &[f64]| x.iter().map(|x| x.is_finite()).collect::<Vec<_>>();
                    let expected = call.expected();
                    assert!(expected.iter().any(|x| !x.is_finite()), "the case must poison something");
                    let found = device.run(&call).unwrap();
                    assert_eq!(finite(&found), finite(&expected), "{case:?} input {input} {poison}");
                }
            }
        }
    });
}

/// The calls differ in their gates only; the second is a launch of the first one's graph.
#[test]
fn captured_calls_read_the_gates_of_the_launch() {
    on_device(|device| {
        for rows in [2, 40] {
            let call = |seed| LinearCase { rows, seed, ..DENSE }.call();
            let found = device.run_captured(&call(8), &call(9)).unwrap_or_else(|error| panic!("{error}"));
            compare(DENSE.dtype, &found, &call(9).expected(), |_| false);
        }
        for operator in [PROJECTION.operator, COMBINE.operator] {
            for q_len in [2, 40] {
                let call = |gates, seed| {
                    let linear = head_linear::Case { operator, q_len, gates, seed, ..LINEAR };
                    Case { linear, quantisation: INT4, then: Then::Nothing }.call()
                };
                let (first, second) = (call(Gates::First(1), 8), call(Gates::Random(0.8), 9));
                let found = device.run_captured(&first, &second).unwrap_or_else(|error| panic!("{error}"));
                compare(second.output_dtype(), &found, &second.expected(), |_| false);
            }
        }
    });
}

/// Random calls, seeded by `MOH_SEED`: few on the emulator, many on a GPU.
#[test]
fn random_calls() {
    on_device(|device| {
        let mut random = Random(seed());
        let mut below = |n: usize| (random.bits() % n as u64) as usize;
        for number in 0..if device.emulated { 10 } else { 300 } {
            let block = [16, 32, 64, 128][below(4)];
            let most = [16, 16, 70][below(3)];
            let linear = head_linear::Case {
                batch: 1 + below(2),
                q_len: 1 + below(most),
                heads: 1 + below(8),
                block: [8, 16, 24, 32, 40, 64, 128][below(7)],
                width: block * (1 + below(7)),
                bias: below(2) == 0,
                gates: Gates::Random(below(101) as f64 / 100.0),
                dtype: DType::ALL[below(3)],
                seed: seed() + number,
                ..LINEAR
            };
            let quantisation = Quantisation { bits: 4 + 4 * below(2), block, zero_points: below(2) == 0, int8: false };
            check(device, linear, quantisation);
        }
    });
}

/// Few tokens and many, experts without tokens, tokens without experts.
#[test]
fn mixtures_of_experts() {
    on_device(|device| {
        for (i, &activation) in Activation::ALL.iter().enumerate() {
            for bits in [4, 8] {
                for (q_len, gates) in [
                    (1, routed_mlp::Gates::TopK(2)),
                    (20, routed_mlp::Gates::Random(0.2)),
                    (70, routed_mlp::Gates::TopK(1)),
                    (9, routed_mlp::Gates::First(1)),
                    (3, routed_mlp::Gates::Off),
                ] {
                    let dtype = DType::ALL[(i + q_len) % 3];
                    let mlp = routed_mlp::Case {
                        q_len,
                        experts: 5,
                        width: 96,
                        hidden: 160,
                        out_width: 40,
                        activation,
                        dtype,
                        gates,
                        bias: q_len % 2 == 1,
                        ..routed_mlp::CASE
                    };
                    let quantisation = Quantisation { bits, zero_points: i % 2 == 0, ..INT4 };
                    let case = MlpCase { mlp, quantisation };
                    println!("{case:?}");
                    let gates = mlp.draw_gates();
                    let unused = |i: usize| {
                        gates[i / mlp.out_width * mlp.experts..][..mlp.experts].iter().all(|&gate| gate == 0.0)
                    };
                    device.check(&case.call(), unused);
                }
            }
        }
    });
}

const DENSE: LinearCase = LinearCase {
    rows: 1,
    width: 96,
    out_width: 40,
    bias: false,
    then: Then::Nothing,
    dtype: DType::F16,
    seed: 11,
    quantisation: INT4,
};

/// Every number of rows that has kernels of its own, in all types; outputs of no multiple of a tile, nor of 16 bytes.
#[test]
fn dense_layers() {
    on_device(|device| {
        for (i, rows) in [0, 1, 9, 17, 33, 70].into_iter().enumerate() {
            for (j, dtype) in DType::ALL.into_iter().enumerate() {
                for (k, (width, out_width)) in [(96, 40), (272, 13), (160, 136)].into_iter().enumerate() {
                    let quantisation = Quantisation {
                        bits: [4, 8][(i + j) % 2],
                        block: [16, 32][k / 2],
                        zero_points: (i + k) % 3 == 0,
                        int8: k == 1,
                    };
                    let case =
                        LinearCase { rows, width, out_width, bias: (j + k) % 2 == 0, dtype, quantisation, ..DENSE };
                    println!("{case:?}");
                    device.check(&case.call(), |_| false);
                }
            }
        }
    });
}

/// All that can be done with the sums, of outputs of no multiple of 16 bytes too.
#[test]
fn what_follows_dense_layers() {
    on_device(|device| {
        for (k, (rows, out_width, len)) in [(1, 40, 1), (9, 13, 3), (34, 136, 17)].into_iter().enumerate() {
            for (i, then) in Then::all(len).into_iter().enumerate() {
                for (j, dtype) in DType::ALL.into_iter().enumerate() {
                    let zero_points = (i + k) % 3 == 0;
                    let quantisation = Quantisation { bits: [4, 8][(i + j) % 2], zero_points, ..INT4 };
                    let bias = (j + k) % 2 == 0;
                    let case = LinearCase { rows, out_width, bias, then, dtype, quantisation, ..DENSE };
                    println!("{case:?}");
                    device.check(&case.call(), |_| false);
                }
            }
        }
    });
}

/// Sums that float16 has no room for, where an activation makes them finite.
#[test]
fn sums_beyond_the_range_of_float16() {
    const WIDTH: usize = 64;
    on_device(|device| {
        for &activation in Activation::ALL.iter().filter(|activation| activation.columns() == 1) {
            for (dtype, rows) in DType::ALL.into_iter().flat_map(|dtype| [(dtype, 3), (dtype, 70)]) {
                let then = Then::Activation(activation);
                let case = LinearCase { rows, width: WIDTH, out_width: 40, bias: false, then, dtype, ..DENSE };
                println!("{case:?}");
                let mut call = case.call();
                // Of even columns all weights are -8 * 160, of odd ones 1 * 0.5: sums of -81280 and of 31.75.
                let even = |i: usize, per_row: usize| (i / per_row).is_multiple_of(2);
                let blocks = WIDTH / INT4.block;
                let weight = (0..40 * WIDTH / 2).map(|i| if even(i, WIDTH / 2) { 0x00 as f32 } else { 0x99 as f32 });
                let scales = (0..40 * blocks).map(|i| if even(i, blocks) { 160.0 } else { 0.5 });
                call.inputs[0].1 = Buffer::new(dtype, &vec![127.0 / 128.0; rows * WIDTH]);
                call.inputs[1].1 = Buffer::new(DType::U8, &weight.collect::<Vec<f32>>());
                call.inputs[2].1 = Buffer::new(dtype, &scales.collect::<Vec<f32>>());
                device.check(&call, |_| false);
            }
        }
    });
}

/// Several tiles, of which Hopper multiplies two in a cluster: one below the other, and side by side.
#[test]
fn dense_layers_of_many_rows() {
    on_device(|device| {
        for (rows, out_width, dtype) in [(300, 136, DType::F16), (530, 256, DType::BF16), (200, 384, DType::F16)] {
            let case = LinearCase { rows, out_width, dtype, bias: rows == 300, ..DENSE };
            println!("{case:?}");
            device.check(&case.call(), |_| false);
        }
    });
}

/// x may be rounded to integers, but is not on a GPU.
#[test]
fn accuracy_level_changes_nothing() {
    on_device(|device| {
        for q_len in [2, 40] {
            let linear = head_linear::Case { q_len, ..LINEAR };
            let quantisation = Quantisation { int8: true, ..INT4 };
            let rough = Case { linear, quantisation, then: Then::Nothing };
            assert_eq!(device.run(&rough.call()).unwrap(), device.run(&rough.exact().call()).unwrap());
        }
    });
}

/// The kernels for GPUs before Hopper.
#[test]
fn rerun_with_kernels_for_older_gpus() {
    rerun_on_other_gpu(
        &A100,
        &[
            "nbits::all_numbers_of_tokens",
            "nbits::nan_affects",
            "nbits::mixtures_of_experts",
            "nbits::dense_layers_of_many_rows",
            "nbits::sums_beyond",
        ],
    );
    rerun_on_other_gpu(&RTX_30, &["nbits::all_formats"]);
}

/// Sizes of published models, which would take long on the emulator.
#[test]
fn model_sizes_on_a_gpu() {
    on_device(|device| {
        if device.emulated {
            return println!("SKIPPED: too large for the emulator");
        }
        for (q_len, bits, dtype) in [(1, 4, DType::F16), (8, 4, DType::BF16), (32, 8, DType::F16), (512, 4, DType::F16)]
        {
            let linear = head_linear::Case { q_len, dtype, heads: 32, block: 128, width: 4096, bias: true, ..LINEAR };
            check(device, head_linear::Case { gates: Gates::Random(0.75), ..linear }, Quantisation { bits, ..INT4 });
        }
        // The last one's weight is dequantised in two parts.
        for (rows, width, out_width, dtype) in
            [(1, 4096, 14336, DType::F16), (512, 4096, 1024, DType::BF16), (3, 2048, 33_000, DType::F32)]
        {
            device.check(&LinearCase { rows, width, out_width, dtype, ..DENSE }.call(), |_| false);
        }
    });
}
