//! RoutedMLP: every CPU kernel that this processor supports, against the f64 reference.

use crate::support::{self, Accounts, kernels_of};
use moh_conformance::routed_mlp::{CASE, Case, Gates};
use moh_cpu::Threads;
use moh_operators::routed_mlp::Activation;
use moh_operators::{DType, Definition, Error, Operator, RoutedMlp};
use proptest::prelude::*;
use std::sync::atomic::Ordering;

const OPERATOR: &Operator = RoutedMlp::OPERATOR;

/// Runs all kernels; returns their multiply-accumulate operations.
fn check(case: &Case, threads: &[usize]) -> Vec<u64> {
    let gates = case.draw_gates();
    let unused = |i: usize| gates[i / case.out_width * case.experts..][..case.experts].iter().all(|&gate| gate == 0.0);
    println!("{case:?}");
    support::check(&case.call(), threads, unused).iter().map(|work| work.macs).collect()
}

fn gates() -> impl Strategy<Value = Gates> {
    prop_oneof![
        1 => Just(Gates::Off),
        1 => Just(Gates::On),
        3 => (0.02..0.98).prop_map(Gates::Random),
        1 => (0usize..6).prop_map(Gates::First),
        3 => (0usize..6).prop_map(Gates::TopK),
    ]
}

fn dims() -> impl Strategy<Value = usize> {
    prop_oneof![3 => 1usize..40, 1 => prop::sample::select(vec![48, 64, 65, 96, 128, 257, 300])]
}

prop_compose! {
    fn cases()(
        batch in prop_oneof![1 => Just(0usize), 6 => Just(1), 3 => 2usize..4],
        q_len in prop_oneof![4 => 0usize..20, 2 => 20usize..120],
        experts in 1usize..7,
        dims in (dims(), dims(), dims()),
        activation in prop::sample::select(Activation::ALL.to_vec()),
        bias in any::<bool>(),
        dtype in prop_oneof![3 => Just(DType::F32), 1 => Just(DType::F16), 1 => Just(DType::BF16)],
        gates in gates(),
        seed in any::<u64>(),
    ) -> Case {
        let (width, hidden, out_width) = dims;
        Case { batch, q_len, experts, width, hidden, out_width, activation, bias, dtype, gates, seed }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn kernels_equal_the_reference(case in cases()) {
        check(&case, &[1, 2, 3]);
    }
}

#[test]
fn all_numbers_of_rows_and_activations() {
    for q_len in (1..=15).chain([48, 383, 385, 800]) {
        for &activation in Activation::ALL {
            for dtype in DType::ALL {
                check(
                    &Case { q_len, activation, dtype, experts: 2, width: 7, hidden: 9, out_width: 5, ..CASE },
                    &[1, 3],
                );
            }
        }
    }
}

#[test]
fn all_widths() {
    for size in (1..=70).chain([127, 128, 129, 255, 256, 257, 320, 511, 513, 1030]) {
        for q_len in [1, 3, 9] {
            for activation in [Activation::Silu, Activation::SwiGlu] {
                let case = Case { q_len, experts: 2, width: 5, hidden: 6, out_width: 7, activation, ..CASE };
                check(&Case { width: size, ..case }, &[2]);
                check(&Case { hidden: size, ..case }, &[2]);
                check(&Case { out_width: size, ..case }, &[2]);
            }
        }
    }
}

/// More hidden activations than the maximum per tile (4.2 million), and more tokens than the maximum per tile.
#[test]
fn inputs_larger_than_a_tile() {
    let wide = Case { q_len: 300, width: 2, hidden: 16384, out_width: 3, gates: Gates::On, bias: false, ..CASE };
    check(&wide, &[1, 3]);
    check(&Case { q_len: 9000, width: 2, hidden: 3, out_width: 3, ..CASE }, &[1, 3]);
}

#[test]
fn empty_batches_and_sequences_do_no_work() {
    for (batch, q_len) in [(0, 3), (3, 0), (0, 0)] {
        assert!(check(&Case { batch, q_len, ..CASE }, &[1, 2]).iter().all(|&macs| macs == 0));
    }
}

/// Large, small and negative gates: the gate multiplies the finished sum, in float32.
#[test]
fn gates_multiply_the_finished_sum() {
    for q_len in [1, 30] {
        for factor in [1e30, 1e-30, -3.0] {
            let mut call = Case { q_len, experts: 1, gates: Gates::On, ..CASE }.call();
            call.inputs[3].1.numbers_mut().fill(factor);
            let expected = call.expected();
            for kernel in kernels_of(OPERATOR) {
                let found = support::run(&call, kernel, expected.len(), &Threads::new(1)).unwrap().0;
                for (found, expected) in found.iter().zip(&expected) {
                    assert!(
                        (found - expected).abs() <= 4e-6 * f64::from(factor.abs()),
                        "{kernel:?}: {expected}, found {found}"
                    );
                }
            }
        }
    }
}

#[test]
fn nan_affects_exactly_the_outputs_that_use_it() {
    for q_len in [1, 4, 40] {
        let case = Case { q_len, gates: Gates::TopK(2), activation: Activation::Silu, ..CASE };
        for input in [0, 1, 2, 4, 5] {
            let mut call = case.call();
            let numbers = call.inputs[input].1.numbers_mut();
            let Some(target) = numbers.iter_mut().rev().find(|x| x.is_finite()) else { panic!("no element is used") };
            *target = f32::NAN;
            let classes = |x: &[f64]| x.iter().map(|x| x.is_finite()).collect::<Vec<_>>();
            let expected = call.expected();
            assert!(expected.iter().any(|x| !x.is_finite()), "the case must poison something");
            for kernel in kernels_of(OPERATOR) {
                let found = support::run(&call, kernel, expected.len(), &Threads::new(2)).unwrap().0;
                assert_eq!(classes(&found), classes(&expected), "{kernel:?} {case:?} input {input}");
            }
        }
    }
}

#[test]
fn macs_match_the_gates() {
    for q_len in [1, 4, 33] {
        for top_k in [0, 1, 2, 6] {
            for activation in [Activation::Relu, Activation::SwiGlu] {
                let case = Case { q_len, experts: 6, width: 40, hidden: 24, out_width: 20, activation, ..CASE };
                let case = Case { gates: Gates::TopK(top_k), ..case };
                let least = q_len * top_k * 24 * (40 * activation.columns() + 20);
                let most = q_len * top_k * (40 * 32 * activation.columns() + 24 * 32);
                for macs in check(&case, &[2]) {
                    assert!((least..=most).contains(&(macs as usize)), "{case:?}: {macs} not in {least}..={most}");
                }
            }
        }
    }
}

#[test]
fn macs_are_exact_for_whole_tiles() {
    for q_len in [1, 5, 60] {
        let case = Case { q_len, width: 40, hidden: 128, out_width: 64, gates: Gates::TopK(2), ..CASE };
        for macs in check(&case, &[1, 2]) {
            assert_eq!(macs as usize, q_len * 2 * 128 * (40 + 64), "{case:?}");
        }
    }
}

#[test]
fn experts_used_by_no_token_do_no_work() {
    for q_len in [1, 7, 70] {
        let case = Case { q_len, experts: 8, width: 64, hidden: 64, out_width: 64, gates: Gates::First(8), ..CASE };
        let few = check(&case, &[2]);
        assert_eq!(few, check(&Case { experts: 64, ..case }, &[2]), "{case:?}");
        assert!(few.iter().all(|&macs| macs > 0));
    }
}

/// Hidden activations of all tokens would take 64 MiB; those of a tile take 16 MiB.
#[test]
fn memory_is_released_and_bounded() {
    let case = Case { q_len: 8192, experts: 1, width: 4, hidden: 2048, out_width: 4, gates: Gates::On, ..CASE };
    let call = case.call();
    for kernel in kernels_of(OPERATOR) {
        let host = Accounts::new(20 << 20);
        support::run(&call, kernel, 8192 * 4, &host).unwrap();
        assert_eq!(host.outstanding.load(Ordering::SeqCst), 0, "{kernel:?}");
        assert!(host.peak.load(Ordering::SeqCst) > 0, "{kernel:?} must use the host's memory");
    }
}

#[test]
fn failed_allocation_returns_an_error() {
    let call = Case { q_len: 40, experts: 4, width: 64, hidden: 64, out_width: 64, ..CASE }.call();
    for kernel in kernels_of(OPERATOR) {
        for limit in [0, 4000, 20000] {
            let host = Accounts::new(limit);
            let error = support::run(&call, kernel, 40 * 64, &host).err();
            assert!(matches!(error, Some(Error::OutOfMemory { .. })), "{kernel:?} {limit}: {error:?}");
            assert_eq!(host.outstanding.load(Ordering::SeqCst), 0, "{kernel:?}");
        }
    }
}
