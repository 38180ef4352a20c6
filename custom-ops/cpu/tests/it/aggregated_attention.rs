//! RoutedAggregatedAttention: every CPU kernel that this processor supports, against the f64 reference.

use crate::support::{self, Accounts, kernels_of};
use moh_conformance::aggregated_attention::{Case, GATES, Gates, KEY, PLAIN, POOLED_KEY, POOLED_VALUE, QUERY, VALUE};
use moh_cpu::{Threads, Work};
use moh_operators::{DType, Definition, Error, Operator, RoutedAggregatedAttention};
use proptest::prelude::*;
use std::sync::atomic::Ordering;

const OPERATOR: &Operator = RoutedAggregatedAttention::OPERATOR;

fn check_with(case: &Case, numbers: &[Vec<f32>], threads: &[usize]) -> Vec<Work> {
    support::check(&case.call_with(numbers), threads, |i| numbers[GATES][i / case.dim] == 0.0)
}

fn check(case: &Case) {
    check_with(case, &case.numbers(), &[1, 2, 3]);
}

prop_compose! {
    fn cases()(
        batch in prop_oneof![1 => Just(0usize), 6 => Just(1), 3 => 2usize..4],
        grid in prop_oneof![3 => (1usize..8, 1usize..8), 2 => (1usize..20, 1usize..20), 1 => (1usize..3, 20usize..120)],
        window in prop::sample::select(vec![1usize, 3, 3, 3, 5, 7, 9]),
        pooled in prop_oneof![1 => Just(0usize), 1 => Just(1), 4 => 1usize..70],
        heads in 1usize..5,
        dim in prop_oneof![3 => 1usize..40, 2 => prop::sample::select(vec![16usize, 24, 32, 48, 64, 72])],
        dtype in prop_oneof![3 => Just(DType::F32), 1 => Just(DType::F16), 1 => Just(DType::BF16)],
        gates in prop_oneof![
            1 => Just(Gates::Off),
            1 => Just(Gates::On),
            4 => (0.02..0.98).prop_map(Gates::Random),
            1 => (0usize..40).prop_map(Gates::First),
        ],
        seed in any::<u64>(),
    ) -> Case {
        Case { batch, grid: [grid.0, grid.1], window, pooled, heads, dim, dtype, gates, seed }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn kernels_equal_the_reference(case in cases()) {
        check(&case);
    }
}

#[test]
fn query_counts_around_tile_sizes() {
    for rows in (1..=9).chain([15, 16, 17, 23, 24, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 120]) {
        check(&Case { grid: [10, 12], gates: Gates::First(rows), ..PLAIN });
    }
}

#[test]
fn all_head_widths() {
    for dim in (1..=72).chain([96, 127, 128, 200]) {
        check(&Case { grid: [3, 3], dim, ..PLAIN });
    }
}

#[test]
fn windows_at_every_grid_position() {
    for window in [1, 3, 5, 7] {
        for grid in [[1, 1], [1, 9], [9, 1], [2, 2], [5, 4], [7, 7]] {
            for token in 0..grid[0] * grid[1] {
                let case = Case { grid, window, gates: Gates::Only(token), heads: 1, pooled: 1, ..PLAIN };
                check_with(&case, &case.numbers(), &[2]);
            }
        }
    }
}

#[test]
fn all_numbers_of_pooled_tokens() {
    for pooled in (0..=18).chain([48, 49, 144, 300]) {
        check(&Case { pooled, ..PLAIN });
    }
}

/// Grid sizes of the published models, with several bands and tiles.
#[test]
fn grid_sizes_of_published_models() {
    for (grid, heads) in [([56, 56], 3), ([28, 28], 6), ([14, 14], 12)] {
        for gates in [Gates::On, Gates::Random(0.5), Gates::Random(0.01)] {
            check(&Case { grid, heads, dim: 24, pooled: 49, gates, batch: 2, ..PLAIN });
        }
    }
}

#[test]
fn output_is_zero_when_all_gates_are_zero() {
    for dtype in DType::ALL {
        for batch in [0, 1, 2] {
            let case = Case { batch, dtype, gates: Gates::Off, ..PLAIN };
            let gates = case.draw_gates();
            assert!(batch == 0 || gates.iter().any(|gate| gate.is_sign_negative()), "zeros of both signs");
            for work in check_with(&case, &case.numbers(), &[1, 2]) {
                assert_eq!(work.macs, 0);
            }
        }
    }
}

/// Vectors shorter than 1e-12, including 0, are divided by 1e-12 instead of their length.
#[test]
fn vectors_shorter_than_the_normalisation_bound() {
    for length in [0.0, -0.0, 3e-13, 1e-20, 1e-30, 1e-12, 2e-12] {
        let case = Case { gates: Gates::On, ..PLAIN };
        let mut numbers = case.numbers();
        for input in [QUERY, KEY, POOLED_KEY] {
            for (i, row) in numbers[input].chunks_exact_mut(case.dim).enumerate() {
                if i % 3 == 0 {
                    row.fill(0.0);
                    row[i % case.dim] = length;
                }
            }
        }
        check_with(&case, &numbers, &[1]);
    }
}

#[test]
fn large_scores_do_not_overflow() {
    for sign in [1.0, -1.0] {
        let case = Case { gates: Gates::On, ..PLAIN };
        let mut numbers = case.numbers();
        for bias in [8, 9] {
            for (i, x) in numbers[bias].iter_mut().enumerate() {
                *x = sign * 300.0 * (i % 7) as f32;
            }
        }
        let call = case.call_with(&numbers);
        let expected = call.expected();
        for kernel in kernels_of(OPERATOR) {
            let (found, _) = support::run(&call, kernel, case.len(), &Threads::new(1)).unwrap();
            for (found, expected) in found.iter().zip(&expected) {
                // Scores near 2000 are rounded to 1e-4.
                assert!((found - expected).abs() < 1e-3, "{kernel:?}: expected {expected}, found {found}");
            }
        }
    }
}

/// Bias and learnable tokens of cells outside the grid have no effect.
#[test]
fn window_cells_outside_the_grid_are_not_read() {
    for poison in [f32::NAN, f32::INFINITY] {
        let case = Case { gates: Gates::Only(0), grid: [4, 4], ..PLAIN };
        let mut numbers = case.numbers();
        for cell in [0, 1, 2, 3, 6] {
            for head in 0..case.heads {
                numbers[8][head * 9 + cell] = poison;
                numbers[11][head * 9 + cell] = poison;
                (0..case.dim).for_each(|d| numbers[10][(head * case.dim + d) * 9 + cell] = poison);
            }
        }
        check_with(&case, &numbers, &[1]);
    }
}

#[test]
fn nan_and_infinity_affect_only_tokens_whose_window_contains_them() {
    let case = Case { grid: [9, 11], dim: 20, gates: Gates::Random(0.7), window: 5, ..PLAIN };
    for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for input in [QUERY, KEY, VALUE, POOLED_KEY, POOLED_VALUE] {
            let mut numbers = case.numbers();
            let at = numbers[input].len() / 2 + 3;
            numbers[input][at] = poison;
            let call = case.call_with(&numbers);
            let finite = |x: &[f64]| x.iter().map(|x| x.is_finite()).collect::<Vec<_>>();
            let expected = call.expected();
            for kernel in kernels_of(OPERATOR) {
                let (found, _) = support::run(&call, kernel, case.len(), &Threads::new(2)).unwrap();
                assert_eq!(finite(&found), finite(&expected), "{kernel:?} {poison} in input {input}");
            }
        }
    }
}

#[test]
fn macs_match_the_gates() {
    const VECTOR: usize = 16;
    for p in [0.0, 0.02, 0.25, 0.5, 1.0] {
        let case = Case { grid: [12, 40], heads: 3, batch: 2, dim: 24, pooled: 20, gates: Gates::Random(p), ..PLAIN };
        let numbers = case.numbers();
        let (mut least, mut most) = (0, 0);
        for batch in 0..case.batch {
            for head in 0..case.heads {
                for row in 0..case.grid[0] {
                    let tokens = (0..case.grid[1]).map(|x| row * case.grid[1] + x);
                    let used: Vec<usize> = tokens
                        .filter(|token| numbers[GATES][(batch * case.tokens() + token) * case.heads + head] != 0.0)
                        .collect();
                    // Values of cells outside the grid are skipped; everything else is computed in whole vectors.
                    let inside: usize = used.iter().map(|&token| case.window(token).len()).sum();
                    least += used.len() * (2 * 9 + 2 * case.pooled) + inside;
                    most += used.len().next_multiple_of(VECTOR) * (2 * 9 + 2 * case.pooled) + inside;
                }
            }
        }
        let bounds = least * case.dim..=most * case.dim;
        for work in check_with(&case, &numbers, &[1, 2]) {
            assert!(bounds.contains(&(work.macs as usize)), "{case:?}: {work:?} not in {bounds:?}");
        }
    }
}

/// Storing the keys of all windows would take 11 MiB, all scores 17 MiB.
#[test]
fn memory_is_released_and_does_not_grow_with_the_grid() {
    let call = Case { grid: [64, 64], heads: 1, dim: 64, pooled: 1024, gates: Gates::Random(0.3), ..PLAIN }.call();
    for kernel in kernels_of(OPERATOR) {
        let host = Accounts::new(3 << 20);
        support::run(&call, kernel, 64 * 64 * 64, &host).unwrap();
        assert_eq!(host.outstanding.load(Ordering::SeqCst), 0, "{kernel:?}");
        assert!(host.peak.load(Ordering::SeqCst) > 0, "{kernel:?} must use the host's memory");
    }
}

#[test]
fn failed_allocation_returns_an_error() {
    for kernel in kernels_of(OPERATOR) {
        for limit in [0, 2000] {
            let host = Accounts::new(limit);
            let error = support::run(&PLAIN.call(), kernel, PLAIN.len(), &host).err();
            assert!(matches!(error, Some(Error::OutOfMemory { .. })), "{kernel:?} {limit}: {error:?}");
            assert_eq!(host.outstanding.load(Ordering::SeqCst), 0, "{kernel:?}");
        }
    }
}
