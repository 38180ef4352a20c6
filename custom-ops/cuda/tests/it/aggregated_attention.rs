//! RoutedAggregatedAttention's CUDA kernels against the f64 reference, on a GPU or on the emulator.

use crate::device::{Device, compare, on_device};
use moh_conformance::aggregated_attention::{Case, GATES, Gates, KEY, PLAIN, POOLED_KEY, POOLED_VALUE, QUERY, VALUE};
use moh_operators::{DType, Error};

fn check_with(device: &Device, case: &Case, numbers: &[Vec<f32>]) {
    println!("{case:?}");
    device.check(&case.call_with(numbers), |i| numbers[GATES][i / case.dim] == 0.0);
}

fn check(device: &Device, case: &Case) {
    check_with(device, case, &case.numbers());
}

#[test]
fn all_grid_and_window_sizes() {
    on_device(|device| {
        for window in [1, 3, 5] {
            for grid in [[1, 1], [1, 9], [9, 1], [2, 2], [5, 4], [7, 11]] {
                for dtype in DType::ALL {
                    check(device, &Case { grid, window, dtype, ..PLAIN });
                }
            }
        }
    });
}

#[test]
fn all_head_widths() {
    on_device(|device| {
        for dtype in DType::ALL {
            for dim in [1, 3, 24, 32, 33, 64, 72, 128, 200, 257, 512] {
                check(device, &Case { grid: [3, 3], dim, dtype, seed: 2, ..PLAIN });
            }
        }
        let call = Case { grid: [1, 1], dim: 513, ..PLAIN }.call();
        assert!(matches!(device.run(&call), Err(Error::Shape { .. })));
    });
}

#[test]
fn all_numbers_of_pooled_tokens() {
    on_device(|device| {
        for pooled in [0, 1, 31, 32, 33, 49, 144] {
            check(device, &Case { pooled, seed: 3, ..PLAIN });
        }
    });
}

#[test]
fn gate_patterns_and_batches() {
    on_device(|device| {
        for dtype in DType::ALL {
            for gates in [Gates::Off, Gates::On, Gates::Random(0.5), Gates::Random(0.02), Gates::Only(17)] {
                check(device, &Case { batch: 2, heads: 3, dim: 24, gates, dtype, seed: 4, ..PLAIN });
            }
        }
        check(device, &Case { batch: 0, ..PLAIN });
    });
}

/// More images than a grid has blocks along z.
#[test]
fn many_images() {
    on_device(|device| {
        let case =
            Case { batch: 65_537, grid: [1, 1], window: 1, pooled: 1, heads: 1, gates: Gates::Random(0.5), ..PLAIN };
        let call = case.call();
        compare(case.dtype, &device.run(&call).unwrap(), &call.expected(), |_| false);
    });
}

#[test]
fn vectors_shorter_than_the_normalisation_bound() {
    on_device(|device| {
        for length in [0.0, 3e-13, 1e-20, 1e-30, 2e-12] {
            let case = Case { gates: Gates::On, ..PLAIN };
            let mut numbers = case.numbers();
            for input in [QUERY, KEY, POOLED_KEY] {
                for (i, row) in numbers[input].chunks_exact_mut(case.dim).enumerate().filter(|(i, _)| i % 3 == 0) {
                    row.fill(0.0);
                    row[i % case.dim] = length;
                }
            }
            check_with(device, &case, &numbers);
        }
    });
}

#[test]
fn large_scores_do_not_overflow() {
    on_device(|device| {
        for sign in [1.0, -1.0] {
            let case = Case { gates: Gates::On, ..PLAIN };
            let mut numbers = case.numbers();
            for bias in [8, 9] {
                for (i, x) in numbers[bias].iter_mut().enumerate() {
                    *x = sign * 300.0 * (i % 7) as f32;
                }
            }
            let call = case.call_with(&numbers);
            let found = device.run(&call).unwrap();
            for (found, expected) in found.iter().zip(&call.expected()) {
                // Scores near 2000 are rounded to 1e-4.
                assert!((found - expected).abs() < 1e-3, "expected {expected}, found {found}");
            }
        }
    });
}

#[test]
fn nan_and_infinity_affect_only_tokens_whose_window_contains_them() {
    on_device(|device| {
        let case = Case { grid: [5, 7], dim: 20, gates: Gates::Random(0.7), ..PLAIN };
        for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for input in [QUERY, KEY, VALUE, POOLED_KEY, POOLED_VALUE] {
                let mut numbers = case.numbers();
                let at = numbers[input].len() / 2 + 3;
                numbers[input][at] = poison;
                let call = case.call_with(&numbers);
                let finite = |x: &[f64]| x.iter().map(|x| x.is_finite()).collect::<Vec<_>>();
                let found = device.run(&call).unwrap();
                assert_eq!(finite(&found), finite(&call.expected()), "{poison} in input {input}");
            }
        }
    });
}

/// Grid sizes of the published models.
#[test]
fn grid_sizes_of_published_models() {
    on_device(|device| {
        if device.emulated {
            return println!("SKIPPED: too large for the emulator");
        }
        for dtype in DType::ALL {
            for (grid, heads) in [([56, 56], 3), ([28, 28], 6), ([14, 14], 12)] {
                check(device, &Case { grid, heads, dim: 24, pooled: 49, batch: 2, dtype, ..PLAIN });
            }
        }
    });
}
