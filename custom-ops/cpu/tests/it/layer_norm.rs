//! LayerNorm: every CPU kernel that this processor supports, against the f64 reference.

use crate::support::{self, kernels_of};
use moh_conformance::layer_norm::{CASE, Case, Modulation};
use moh_conformance::{Buffer, Call};
use moh_cpu::Threads;
use moh_operators::{DType, Definition, LayerNorm};
use proptest::prelude::*;

prop_compose! {
    fn cases()(
        sequences in 0usize..4,
        rows in prop_oneof![4 => 1usize..30, 1 => 200usize..300],
        // Up to, at and beyond vectors and blocks of four of them.
        width in prop_oneof![3 => 1usize..80, 1 => 120usize..140, 1 => 1000usize..1100],
        bias in any::<bool>(),
        modulation in prop::sample::select(&Modulation::ALL[..]),
        mean in prop_oneof![Just(0.0f32), Just(-3.0)],
        dtype in prop_oneof![3 => Just(DType::F32), 1 => Just(DType::F16), 1 => Just(DType::BF16)],
        seed in any::<u64>(),
    ) -> Case {
        Case { rows: [sequences, rows], width, bias, modulation, mean, dtype, seed }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn equals_the_reference(case in cases()) {
        println!("{case:?}");
        support::check(&case.call(), &[1, 3], |_| false);
    }
}

/// Items have several sequences, or end within one: each row has its own modulation.
#[test]
fn rows_have_the_modulation_of_their_sequence() {
    for modulation in Modulation::ALL {
        for rows in [[40, 3], [3, 700], [1, 500]] {
            support::check(&Case { rows, modulation, ..CASE }.call(), &[1, 4], |_| false);
        }
    }
}

/// Numbers with a large mean: the variance is that of their distances from it.
#[test]
fn a_large_mean_does_not_hide_the_variance() {
    let call = Case { rows: [1, 9], width: 77, mean: 3000.0, ..CASE }.call();
    let expected = call.expected();
    for kernel in kernels_of(LayerNorm::OPERATOR) {
        let (found, _) = support::run(&call, kernel, expected.len(), &Threads::new(1)).unwrap();
        for (found, expected) in found.iter().zip(&expected) {
            // The mean itself is rounded by up to 1e-4.
            assert!((found - expected).abs() < 2e-3, "{kernel:?}: {found}, not {expected}");
        }
    }
}

/// A row that is not finite is NaN, and no other row is.
#[test]
fn rows_that_are_not_finite_stay_alone() {
    let mut call: Call = Case { rows: [1, 12], width: 70, ..CASE }.call();
    let mut numbers: Vec<f32> = call.inputs[0].1.values(&"x").iter().map(|&x| x as f32).collect();
    numbers[3 * 70 + 5] = f32::INFINITY;
    numbers[7 * 70 + 69] = f32::NAN;
    call.inputs[0].1 = Buffer::new(DType::F32, &numbers);
    let expected = call.expected();
    for kernel in kernels_of(LayerNorm::OPERATOR) {
        let (found, _) = support::run(&call, kernel, expected.len(), &Threads::new(2)).unwrap();
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let near = (found - expected).abs() <= 4e-6 * 4.0;
            assert!(near || (found.is_nan() && matches!(i / 70, 3 | 7)), "{kernel:?}, row {}: {found}", i / 70);
            assert_eq!(found.is_nan(), matches!(i / 70, 3 | 7), "{kernel:?}, row {}", i / 70);
        }
    }
}
