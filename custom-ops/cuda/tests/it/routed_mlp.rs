//! RoutedMLP's CUDA kernels against the f64 reference, on a GPU or on the emulator.

use crate::device::{A100, Device, RTX_30, on_device, rerun_on_older_gpu};
use moh_conformance::routed_mlp::{CASE, Case, Gates};
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
        rerun_on_older_gpu(
            &A100,
            &[
                "routed_mlp::all_tile_sizes",
                "routed_mlp::all_numbers_of_rows",
                "routed_mlp::few_most_no_and_all_experts",
            ],
        );
        rerun_on_older_gpu(&RTX_30, &["routed_mlp::all_tile_sizes"]);
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
        for q_len in [4, 40] {
            let case = Case { q_len, gates: Gates::TopK(2), activation: Activation::Silu, ..CASE };
            for input in [0, 1, 2, 4, 5] {
                let mut call = case.call();
                let numbers = call.inputs[input].1.numbers_mut();
                *numbers.iter_mut().rev().find(|x| x.is_finite()).expect("an element is used") = f32::NAN;
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
    });
}
