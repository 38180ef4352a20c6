//! RoutedProjection's and RoutedCombine's CUDA kernels against the f64 reference, on a GPU or on the emulator.

use crate::device::{A100, B200, Device, RTX_30, on_device, rerun_on_other_gpu, seed};
use moh_conformance::head_linear::{COMBINE, Case, Gates, PROJECTION, each};
use moh_conformance::{Buffer, Call, Random};
use moh_operators::DType;

const HALVES: [DType; 2] = [DType::F16, DType::BF16];

fn check(device: &Device, case: &Case) {
    println!("{case:?}");
    let gates = case.draw_gates();
    let exact = |i: usize| match case.is_projection() {
        true => gates[i / case.block] == 0.0,
        false => !case.bias && gates[i / case.width * case.heads..][..case.heads].iter().all(|&gate| gate == 0.0),
    };
    device.check(&case.call(), exact);
}

#[test]
fn all_numbers_of_rows() {
    on_device(|device| {
        for q_len in [1, 15, 16, 17, 63, 65, 128, 129, 257] {
            for dtype in DType::ALL {
                for case in each(Case { q_len, dtype, heads: 2, block: 8, width: 24, bias: true, ..PROJECTION }) {
                    check(device, &case);
                }
            }
        }
    });
}

#[test]
fn all_block_and_token_widths() {
    on_device(|device| {
        for dtype in DType::ALL {
            for (block, width) in [
                (64, 128),
                (72, 64),
                (128, 72),
                (16, 200),
                (200, 16),
                (1, 1),
                (9, 7),
                (33, 70),
                (130, 5),
                (5, 130),
                (24, 33),
            ] {
                for case in each(Case { q_len: 21, heads: 3, block, width, dtype, bias: true, seed: 2, ..PROJECTION }) {
                    check(device, &case);
                }
            }
        }
    });
}

/// Few heads, most, none, all: covers gathered (routed) and dense kernels.
#[test]
fn few_most_no_and_all_heads() {
    on_device(|device| {
        for dtype in DType::ALL {
            let some = [0.03, 0.3, 0.6, 0.9].map(Gates::Random);
            for gates in [Gates::Off, Gates::On, Gates::Shared(2, 0.1), Gates::First(3)].into_iter().chain(some) {
                for (bias, q_len) in [(true, 133), (false, 33), (true, 9)] {
                    let case =
                        Case { q_len, heads: 6, block: 40, width: 48, gates, dtype, bias, seed: 3, ..PROJECTION };
                    for case in each(case) {
                        check(device, &case);
                    }
                }
                for case in each(Case { q_len: 70, heads: 5, block: 13, width: 11, gates, dtype, ..PROJECTION }) {
                    check(device, &case);
                }
            }
        }
    });
}

/// More heads than are listed at a time, few of them used per token.
#[test]
fn many_heads_of_which_few_are_on() {
    on_device(|device| {
        for dtype in DType::ALL {
            for (heads, q_len) in [(33, 67), (70, 40), (70, 5)] {
                let gates = Gates::Random(0.08);
                for case in each(Case { q_len, heads, block: 32, width: 40, gates, dtype, seed: 4, ..PROJECTION }) {
                    check(device, &case);
                }
            }
        }
    });
}

/// So few heads on that blocks of a combination process several tiles each.
#[test]
fn combination_blocks_with_several_tiles() {
    on_device(|device| {
        let gates = Gates::Random(0.03);
        for case in each(Case { q_len: 520, heads: 3, block: 128, width: 520, gates, dtype: DType::F16, ..PROJECTION })
        {
            check(device, &case);
        }
    });
}

/// The widths of Hopper's gathered tiles. First 72: in layout 1 its weights lie in one and an eighth panels, for which
/// there is no example but only the text of the PTX ISA (see `kernels/hopper.cuh`).
#[test]
fn widths_of_tiles() {
    on_device(|device| {
        for block in [72, 64, 128] {
            for per_head in [true, false] {
                for dtype in HALVES {
                    // Few enough rows for the gathered tiles, in several tiles of each head.
                    let gates = Gates::Random(0.4);
                    let case = Case { q_len: 350, heads: 4, block, width: 192, gates, dtype, seed: 8, ..PROJECTION };
                    check(device, &Case { per_head, bias: true, ..case });
                }
            }
        }
    });
}

/// The heights of Hopper's tiles, up to 256 rows: with 4 multiprocessors and a head of each token on or off, these
/// numbers of tokens select each of them.
#[test]
fn large_tiles() {
    on_device(|device| {
        for (i, q_len) in [512, 384, 256].into_iter().enumerate() {
            for gates in [Gates::Random(0.5), Gates::On] {
                let dtype = HALVES[i % 2];
                let case = Case { q_len, heads: 4, block: 128, width: 136, gates, dtype, seed: 9, ..PROJECTION };
                for case in each(case) {
                    check(device, &case);
                }
            }
        }
    });
}

/// All tile sizes of the kernels.
#[test]
fn all_tile_sizes() {
    on_device(|device| {
        for dtype in HALVES {
            for (q_len, block, width, p) in
                [(300, 128, 64, 0.5), (520, 64, 136, 0.95), (500, 64, 200, 0.9), (2050, 128, 8, 0.05)]
            {
                let gates = Gates::Shared(1, p);
                for case in each(Case { q_len, heads: 3, block, width, gates, dtype, bias: true, ..PROJECTION }) {
                    check(device, &case);
                }
            }
        }
    });
}

/// Head widths and inner lengths that do and do not fit the tiles of the Hopper kernels.
#[test]
fn widths_around_hopper_tile_sizes() {
    on_device(|device| {
        let widths = [(64, 584), (72, 64), (128, 72), (96, 40), (136, 24), (144, 328), (200, 16), (16, 200), (8, 64)];
        for (i, (block, width)) in widths.into_iter().enumerate() {
            for (q_len, gates) in [(70, Gates::Shared(1, 0.4)), (333, Gates::Random(0.8)), (65, Gates::On)] {
                let dtype = HALVES[i % 2];
                for case in each(Case { q_len, block, width, dtype, gates, bias: i % 3 > 0, seed: 5, ..PROJECTION }) {
                    check(device, &case);
                }
            }
        }
    });
}

/// Pairs of tiles of 128 columns, which the Hopper kernels multiply in clusters: one tile without a neighbour, odd numbers
/// of tiles, heads without rows, several pairs per block. With an even number of dense tiles side by side, blocks share
/// the rows of x, otherwise the weight.
#[test]
fn pairs_of_tiles() {
    on_device(|device| {
        for (i, (q_len, heads, block, gates)) in [
            (33, 1, 128, Gates::On),
            (40, 1, 128, Gates::Off),
            (65, 2, 128, Gates::On),
            (130, 2, 128, Gates::Random(0.5)),
            (200, 3, 128, Gates::On),
            (193, 3, 120, Gates::On),
            (330, 4, 128, Gates::First(3)),
            (140, 3, 256, Gates::Random(0.7)),
            (400, 5, 128, Gates::Shared(1, 0.3)),
            (1100, 1, 128, Gates::On),
            (1100, 1, 128, Gates::Random(0.6)),
            (900, 2, 128, Gates::On),
        ]
        .into_iter()
        .enumerate()
        {
            for per_head in [false, true] {
                let (dtype, bias) = (HALVES[(i + usize::from(per_head)) % 2], i % 3 > 0);
                let case =
                    Case { q_len, heads, block, width: 136, per_head, gates, dtype, bias, seed: 6, ..PROJECTION };
                check(device, &case);
            }
        }
    });
}

/// Blocks of heads that are off are zeros, as routed attention leaves them: on Hopper, the combination is one product without gates,
/// unless few heads are on. A weight that is not finite must not reach tokens that do not use its head.
#[test]
fn combinations_of_blocks_that_are_zero() {
    on_device(|device| {
        for (i, (q_len, heads, block, width)) in
            [(33, 2, 64, 136), (70, 4, 72, 40), (300, 3, 128, 264), (520, 5, 8, 384), (65, 40, 16, 24)]
                .into_iter()
                .enumerate()
        {
            for gates in [Gates::Random(0.6), Gates::Shared(1, 0.3), Gates::Random(0.03), Gates::Off, Gates::On] {
                for per_head in [false, true] {
                    let dtype = HALVES[(i + usize::from(per_head)) % 2];
                    let case = Case {
                        q_len,
                        heads,
                        block,
                        width,
                        gates,
                        dtype,
                        per_head,
                        bias: i % 2 == 0,
                        seed: 7,
                        ..COMBINE
                    };
                    println!("{case:?}");
                    let (drawn, mut call) = (case.draw_gates(), case.call());
                    let numbers = |call: &Call, input: usize| -> Vec<f32> {
                        call.inputs[input].1.values(&"nothing").into_iter().map(|x| x as f32).collect()
                    };
                    let mut x = numbers(&call, 0);
                    for (j, x) in x.iter_mut().enumerate().filter(|(j, _)| drawn[j / block] == 0.0) {
                        *x = if j % 3 == 0 { -0.0 } else { 0.0 };
                    }
                    call.inputs[0].1 = Buffer::new(dtype, &x);
                    device.check(&call, |_| false);
                    // One element that is not zero.
                    if let Some(off) = drawn.iter().rposition(|&gate| gate == 0.0) {
                        let mut dirty = call.clone();
                        x[off * block] = 3.0;
                        dirty.inputs[0].1 = Buffer::new(dtype, &x);
                        device.check(&dirty, |_| false);
                    }
                    let mut weight = numbers(&call, 1);
                    weight[0] = f32::INFINITY;
                    call.inputs[1].1 = Buffer::new(dtype, &weight);
                    let finite = |x: &[f64]| x.iter().map(|x| x.is_finite()).collect::<Vec<_>>();
                    let (expected, found) = (call.expected(), device.run(&call).unwrap());
                    assert_eq!(finite(&found), finite(&expected), "{case:?}");
                }
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
        for number in 0..if device.emulated { 25 } else { 400 } {
            let widths = [8, 16, 24, 32, 40, 64, 72, 80, 96, 128, 136, 192, 264];
            let shares = [Gates::Off, Gates::On, Gates::First(1), Gates::Shared(1, 0.5), Gates::Random(0.2)];
            let gates =
                if below(2) == 0 { shares[below(shares.len())] } else { Gates::Random(below(101) as f64 / 100.0) };
            let case = Case {
                batch: 1 + below(2),
                q_len: 1 + below(300),
                heads: 1 + below(5),
                block: widths[below(widths.len())],
                width: widths[below(widths.len())],
                bias: below(2) == 0,
                dtype: DType::ALL[below(3)],
                gates,
                seed: seed() + number,
                ..PROJECTION
            };
            for case in each(case) {
                check(device, &case);
            }
        }
    });
}

/// The kernels for GPUs before Hopper.
#[test]
fn rerun_with_kernels_for_older_gpus() {
    rerun_on_other_gpu(
        &A100,
        &[
            "head_linear::all_numbers_of_rows",
            "head_linear::few_most_no_and_all_heads",
            "head_linear::all_tile_sizes",
            "head_linear::widths_around_hopper_tile_sizes",
            "head_linear::nan_affects",
        ],
    );
    let small =
        ["head_linear::large_tiles", "head_linear::many_heads_of_which_few", "head_linear::combinations_of_long"];
    rerun_on_other_gpu(&RTX_30, &small);
    // Tiles of 256 rows without wgmma fit only there.
    rerun_on_other_gpu(&B200, &["head_linear::all_tile_sizes"]);
}

/// Inner dimensions around those for which the dense kernel's lists fit in shared memory: of few tokens, of tensors that are not aligned, and
/// of the least shared memory.
#[test]
fn combinations_of_long_inner_dimensions() {
    on_device(|device| {
        for (dtype, heads, block, per_head) in [
            (DType::F16, 64, 1401, false),
            (DType::F16, 64, 1401, true),
            (DType::BF16, 32, 801, true),
            (DType::F32, 64, 896, false),
            (DType::F16, 64, 1904, false),
        ] {
            for (q_len, bias) in [(3, true), (34, false)] {
                let gates = Gates::Shared(1, 0.2);
                let case = Case { q_len, heads, block, width: 8, per_head, bias, dtype, gates, seed: 12, ..COMBINE };
                check(device, &case);
            }
        }
    });
}

#[test]
fn empty_and_several_sequences() {
    on_device(|device| {
        for (batch, q_len) in [(0, 3), (3, 0), (3, 33)] {
            for case in each(Case { batch, q_len, block: 32, dtype: DType::F16, bias: true, ..PROJECTION }) {
                check(device, &case);
            }
        }
    });
}

/// A NaN in a weight must reach the tokens that use its head, and a NaN in x its token; neither may affect anything
/// else.
#[test]
fn nan_affects_exactly_the_outputs_that_use_it() {
    on_device(|device| {
        for q_len in [4, 40] {
            for p in [0.2, 0.9] {
                for block in [16, 20] {
                    let case = Case { q_len, heads: 4, block, width: 24, gates: Gates::Shared(1, p), ..PROJECTION };
                    for case in each(case) {
                        for input in [0, 1] {
                            for poison in [f32::NAN, f32::INFINITY] {
                                let mut call = case.call();
                                let numbers = call.inputs[input].1.numbers_mut();
                                *numbers.iter_mut().rev().find(|x| x.is_finite()).expect("an element is used") = poison;
                                let finite = |x: &[f64]| x.iter().map(|x| x.is_finite()).collect::<Vec<_>>();
                                let expected = call.expected();
                                assert!(expected.iter().any(|x| !x.is_finite()), "the case must poison something");
                                let found = device.run(&call).unwrap();
                                assert_eq!(finite(&found), finite(&expected), "{case:?} input {input} {poison}");
                            }
                        }
                    }
                }
            }
        }
    });
}

/// Sizes of published models, which fill a GPU and would take hours on the emulator.
#[test]
fn model_sizes_on_a_gpu() {
    on_device(|device| {
        if device.emulated {
            return println!("SKIPPED: too large for the emulator");
        }
        // The reference takes seconds for the larger sizes.
        for (q_len, heads, block, width, p, dtype) in [
            (1024, 16, 64, 512, 0.75, DType::F32),
            (1024, 16, 64, 512, 0.75, DType::BF16),
            (1000, 8, 72, 576, 0.9, DType::F16),
            (600, 32, 64, 1024, 0.5, DType::F16),
            (2500, 8, 128, 256, 0.25, DType::F16),
            (1, 32, 128, 4096, 0.75, DType::F16),
            (32, 32, 64, 2048, 0.5, DType::BF16),
            (700, 64, 128, 512, 0.125, DType::F16),
        ] {
            for case in each(Case { q_len, heads, block, width, gates: Gates::Random(p), dtype, ..PROJECTION }) {
                check(device, &case);
            }
        }
    });
}
