//! RoutedMLP's CUDA kernels against the f64 reference, on a GPU or on the emulator.

use crate::device::{A100, Device, RTX_30, on_device, rerun_on_other_gpu, seed};
use moh_conformance::routed_mlp::{CASE, Case, Gates};
use moh_conformance::{Buffer, Random};
use moh_operators::DType;
use moh_operators::routed_mlp::Activation;

fn check(device: &Device, case: &Case) {
    println!("{case:?}");
    let gates = case.draw_gates();
    let unused = |i: usize| gates[i / case.out_width * case.experts..][..case.experts].iter().all(|&gate| gate == 0.0);
    device.check(&case.call(), unused);
}

#[test]
fn all_numbers_of_rows_and_activations() {
    on_device(|device| {
        for (q_len, bias) in [(1, true), (17, false), (130, true)] {
            for &activation in Activation::ALL {
                for dtype in DType::ALL {
                    let case = Case { q_len, activation, dtype, bias, experts: 3, gates: Gates::TopK(2), ..CASE };
                    check(device, &case);
                    check(device, &Case { width: 7, hidden: 9, out_width: 5, ..case });
                }
            }
        }
    });
}

#[test]
fn all_widths() {
    on_device(|device| {
        for dtype in DType::ALL {
            for (width, hidden, out_width) in [(64, 136, 64), (8, 16, 200), (130, 33, 70), (200, 64, 8)] {
                for activation in [Activation::Silu, Activation::SwiGlu] {
                    let case = Case { q_len: 19, width, hidden, out_width, activation, dtype, experts: 2, ..CASE };
                    check(device, &case);
                }
            }
        }
    });
}

/// Tiles of the Hopper kernels, then a rerun with the kernels for GPUs before Hopper.
#[test]
fn all_tile_sizes() {
    on_device(|device| {
        for (i, activation) in Activation::ALL.iter().copied().enumerate() {
            let dtype = [DType::F16, DType::BF16][i % 2];
            let case =
                Case { q_len: 150, width: 72, hidden: 136, out_width: 40, activation, dtype, experts: 3, ..CASE };
            check(device, &Case { gates: Gates::TopK(2), bias: i % 2 == 0, seed: 4, ..case });
            check(device, &Case { q_len: 270, gates: Gates::First(1), bias: i % 2 == 1, seed: 5, ..case });
        }
        rerun_on_other_gpu(
            &A100,
            &[
                "routed_mlp::all_tile_sizes",
                "routed_mlp::all_numbers_of_rows",
                "routed_mlp::few_most_no_and_all_experts",
            ],
        );
        rerun_on_other_gpu(&RTX_30, &["routed_mlp::all_tile_sizes"]);
    });
}

/// Inputs for which Hopper multiplies every expert's rows before it adds a token's experts.
const LONG: Case = Case { q_len: 64, hidden: 256, dtype: DType::F16, ..CASE };
const HALVES: [DType; 2] = [DType::F16, DType::BF16];

/// Lists that end before, at and after the end of a unit of 64 rows and of a tile, in several tiles a block.
#[test]
fn lists_around_tile_sizes() {
    on_device(|device| {
        for (i, q_len) in [64, 65, 127, 129, 192, 255, 256, 257, 321].into_iter().enumerate() {
            let case = Case { q_len, width: 8, out_width: 8, dtype: HALVES[i % 2], bias: i % 3 > 0, seed: 7, ..LONG };
            check(device, &Case { gates: Gates::First(1), experts: 2, ..case });
            check(device, &Case { gates: Gates::TopK(1), ..case });
            check(device, &Case { gates: Gates::Random(0.4), out_width: 264, ..case });
        }
        // On four multiprocessors, tiles of 192 and 256 rows.
        for q_len in [768, 1024] {
            check(device, &Case { q_len, width: 8, out_width: 8, gates: Gates::First(1), experts: 2, ..LONG });
        }
        rerun_on_other_gpu(&A100, &["routed_mlp::lists_around", "routed_mlp::one_to_four", "routed_mlp::long_hidden"]);
    });
}

/// Experts without tokens and tokens without experts among them.
#[test]
fn one_to_four_of_many_experts() {
    on_device(|device| {
        for (i, (experts, top_k)) in [(2, 1), (4, 2), (8, 3), (33, 4), (64, 2), (70, 1)].into_iter().enumerate() {
            let case = Case { q_len: 66, experts, out_width: 24, bias: i % 2 == 0, dtype: HALVES[i % 2], ..LONG };
            check(device, &Case { gates: Gates::TopK(top_k), seed: 8, ..case });
            check(device, &Case { gates: Gates::Random(1.0 / experts as f64), seed: 9, ..case });
            check(device, &Case { gates: Gates::First(1), seed: 10, ..case });
            check(device, &Case { gates: Gates::Off, ..case });
        }
    });
}

/// Widths that are no multiples of a step or tile, all activations, and numbers of pairs around those that have room.
#[test]
fn long_hidden_layers_and_wide_outputs() {
    on_device(|device| {
        for (i, activation) in Activation::ALL.iter().copied().enumerate() {
            let widths = [(256, 136), (264, 520), (328, 72), (584, 16), (376, 200)];
            let (hidden, out_width) = widths[i % widths.len()];
            let case = Case { q_len: 90, hidden, out_width, activation, dtype: HALVES[i % 2], seed: 11, ..LONG };
            check(device, &Case { gates: Gates::TopK(2), ..case });
            check(device, &Case { gates: Gates::Random(0.5), bias: false, ..case });
        }
        // There is room for two experts a token. On the emulator, the products of all would exceed the workspace.
        for (gates, experts, out_width) in [(Gates::TopK(2), 4, 520), (Gates::TopK(3), 4, 520), (Gates::On, 8, 1032)] {
            check(device, &Case { q_len: 131, experts, out_width, gates, seed: 12, ..LONG });
        }
    });
}

/// Random calls, seeded by `MOH_SEED`: few on the emulator, many on a GPU.
#[test]
fn random_calls() {
    on_device(|device| {
        let mut random = Random(seed());
        let mut below = |n: usize| (random.bits() % n as u64) as usize;
        for number in 0..if device.emulated { 6 } else { 60 } {
            let experts = 1 + below(9);
            let gates = match below(4) {
                0 => Gates::Random(below(101) as f64 / 100.0),
                1 => Gates::First(1 + below(experts)),
                _ => Gates::TopK(1 + below(experts.min(4))),
            };
            let case = Case {
                batch: 1 + below(2),
                q_len: 32 + below(if device.emulated { 40 } else { 300 }),
                experts,
                width: [8, 40, 72][below(3)],
                hidden: [40, 256, 264, 320, 520][below(5)],
                out_width: [8, 64, 136, 264, 520][below(5)],
                activation: Activation::ALL[below(Activation::ALL.len())],
                bias: below(2) == 0,
                dtype: HALVES[below(2)],
                gates,
                seed: seed() + number,
            };
            check(device, &case);
        }
    });
}

/// Few tokens and a long inner dimension, which is split over several blocks.
#[test]
fn inner_dimension_split_over_blocks() {
    on_device(|device| {
        for dtype in DType::ALL {
            for (q_len, hidden, out_width, bias) in [(1, 520, 136, true), (5, 1000, 24, false), (40, 513, 33, true)] {
                let case = Case { q_len, hidden, out_width, bias, dtype, experts: 4, seed: 6, ..CASE };
                check(device, &Case { gates: Gates::TopK(2), ..case });
                check(device, &Case { gates: Gates::Off, ..case });
            }
        }
    });
}

#[test]
fn few_most_no_and_all_experts() {
    on_device(|device| {
        for dtype in DType::ALL {
            for gates in [Gates::Off, Gates::On, Gates::First(2), Gates::TopK(1), Gates::Random(0.5)] {
                check(device, &Case { q_len: 70, experts: 5, hidden: 40, gates, dtype, seed: 2, ..CASE });
            }
            check(device, &Case { q_len: 33, experts: 40, gates: Gates::TopK(3), dtype, seed: 3, ..CASE });
        }
    });
}

#[test]
fn empty_and_several_sequences() {
    on_device(|device| {
        for (batch, q_len) in [(0, 3), (3, 0), (3, 11)] {
            check(device, &Case { batch, q_len, ..CASE });
        }
    });
}

/// Large and small gates multiply the finished sum, in float32.
#[test]
fn gates_multiply_the_finished_sum() {
    on_device(|device| {
        for factor in [1e30, 1e-30, -3.0] {
            let mut call = Case { q_len: 30, experts: 1, gates: Gates::On, ..CASE }.call();
            call.inputs[3].1.numbers_mut().fill(factor);
            let found = device.run(&call).unwrap();
            for (found, expected) in found.iter().zip(&call.expected()) {
                assert!((found - expected).abs() <= 4e-6 * f64::from(factor.abs()), "{expected}, found {found}");
            }
        }
    });
}

#[test]
fn nan_affects_exactly_the_outputs_that_use_it() {
    on_device(|device| {
        let case = Case { gates: Gates::TopK(2), activation: Activation::Silu, ..CASE };
        let long = Case { q_len: 70, hidden: 264, out_width: 136, dtype: DType::BF16, ..case };
        for case in [Case { q_len: 4, ..case }, Case { q_len: 40, ..case }, long] {
            for input in [0, 1, 2, 4, 5] {
                let mut call = case.call();
                let buffer = &mut call.inputs[input].1;
                let data = buffer.data();
                let mut numbers: Vec<f32> = (0..data.len()).map(|i| data.at(i) as f32).collect();
                *numbers.iter_mut().rev().find(|x| x.is_finite()).expect("an element is used") = f32::NAN;
                *buffer = Buffer::new(data.dtype(), &numbers);
                let finite = |x: &[f64]| x.iter().map(|x| x.is_finite()).collect::<Vec<_>>();
                let expected = call.expected();
                assert!(expected.iter().any(|x| !x.is_finite()), "the case must poison something");
                let found = device.run(&call).unwrap();
                assert_eq!(finite(&found), finite(&expected), "{case:?} input {input}");
            }
        }
    });
}

/// Sizes of published models, which fill a GPU.
#[test]
fn model_sizes_on_a_gpu() {
    on_device(|device| {
        if device.emulated {
            return println!("SKIPPED: too large for the emulator");
        }
        for dtype in DType::ALL {
            for activation in [Activation::Gelu, Activation::SwiGlu] {
                let case = Case { q_len: 600, experts: 8, width: 512, hidden: 688, out_width: 512, ..CASE };
                check(device, &Case { activation, dtype, gates: Gates::TopK(2), ..case });
            }
        }
        // On 132 multiprocessors, tiles of 192 and 256 rows.
        for (dtype, top_k) in [(DType::F16, 2), (DType::BF16, 3)] {
            let case = Case { q_len: 2500, experts: 8, width: 64, hidden: 688, out_width: 512, dtype, ..CASE };
            check(device, &Case { gates: Gates::TopK(top_k), ..case });
        }
    });
}
