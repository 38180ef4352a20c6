//! RoutedProjection and RoutedCombine: every CPU kernel that this processor supports, against the f64 reference.

use crate::support::{self, Accounts, kernels_of};
use moh_conformance::head_linear::{Case, Gates, PROJECTION, each};
use moh_cpu::Threads;
use moh_operators::{DType, Definition, Error, RoutedCombine, RoutedProjection};
use proptest::prelude::*;
use std::sync::atomic::Ordering;

/// Runs all kernels; returns their multiply-accumulate operations.
fn check(case: &Case, threads: &[usize]) -> Vec<u64> {
    let gates = case.draw_gates();
    // The blocks of heads that are off, and the outputs of tokens without heads, must be exact.
    let exact = |i: usize| match case.is_projection() {
        true => gates[i / case.block] == 0.0,
        false => gates[i / case.width * case.heads..][..case.heads].iter().all(|&gate| gate == 0.0),
    };
    println!("{case:?}");
    support::check(&case.call(), threads, exact).iter().map(|work| work.macs).collect()
}

fn gates() -> impl Strategy<Value = Gates> {
    prop_oneof![
        1 => Just(Gates::Off),
        1 => Just(Gates::On),
        3 => (0.02..0.98).prop_map(Gates::Random),
        2 => (0usize..6, 0.02..0.98).prop_map(|(n, p)| Gates::Shared(n, p)),
        1 => (0usize..6).prop_map(Gates::First),
    ]
}

prop_compose! {
    fn cases()(
        flags in any::<(bool, bool, bool)>(),
        batch in prop_oneof![1 => Just(0usize), 6 => Just(1), 3 => 2usize..4],
        q_len in prop_oneof![4 => 0usize..20, 2 => 20usize..200, 1 => 380usize..390],
        heads in 1usize..9,
        block in prop_oneof![3 => 1usize..40, 1 => prop::sample::select(vec![16, 32, 64, 72, 80])],
        width in prop_oneof![3 => 1usize..80, 1 => prop::sample::select(vec![64, 96, 128, 256, 257, 300])],
        dtype in prop_oneof![3 => Just(DType::F32), 1 => Just(DType::F16), 1 => Just(DType::BF16)],
        gates in gates(),
        seed in any::<u64>(),
    ) -> Case {
        let operator = if flags.0 { RoutedProjection::OPERATOR } else { RoutedCombine::OPERATOR };
        let (per_head, bias) = (flags.1, flags.2);
        Case { operator, batch, q_len, heads, block, width, per_head, bias, dtype, gates, seed }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn kernels_equal_the_reference(case in cases()) {
        check(&case, &[1, 2, 3]);
    }
}

#[test]
fn all_numbers_of_rows() {
    for q_len in (1..=15).chain([47, 48, 49, 383, 384, 385, 769]) {
        for dtype in DType::ALL {
            for case in each(Case { q_len, dtype, heads: 2, block: 7, width: 9, bias: true, ..PROJECTION }) {
                check(&case, &[1, 3]);
            }
        }
    }
}

#[test]
fn all_block_and_token_widths() {
    for size in (1..=80).chain([96, 127, 128, 129, 192, 255, 256, 257, 320, 511, 512, 513]) {
        for q_len in [1, 3, 5, 8] {
            for case in each(Case { q_len, heads: 2, bias: true, ..PROJECTION }) {
                check(&Case { block: size, width: 5, ..case }, &[2]);
                check(&Case { block: 5, width: size, ..case }, &[2]);
            }
        }
    }
}

#[test]
fn heads_used_by_all_tokens_equal_the_reference() {
    for (q_len, block) in [(1, 72), (5, 24), (60, 72), (60, 64), (61, 5)] {
        for dtype in [DType::F32, DType::F16] {
            let gates = Gates::Shared(5, 0.5);
            for case in each(Case { q_len, block, dtype, heads: 9, width: 70, gates, bias: true, ..PROJECTION }) {
                check(&case, &[1, 2, 3, 16]);
            }
        }
    }
}

#[test]
fn empty_batches_and_sequences_do_no_work() {
    for (batch, q_len) in [(0, 3), (3, 0), (0, 0)] {
        for case in each(Case { batch, q_len, bias: true, ..PROJECTION }) {
            assert!(check(&case, &[1, 2]).iter().all(|&macs| macs == 0));
        }
    }
}

/// Inputs that are used must be multiplied even by 0: 0 * NaN is NaN.
#[test]
fn nan_affects_exactly_the_outputs_that_use_it() {
    for q_len in [1, 4, 40] {
        for case in each(Case { q_len, block: 20, width: 20, gates: Gates::Shared(1, 0.5), ..PROJECTION }) {
            for input in [0, 1] {
                for poison in [f32::NAN, f32::INFINITY] {
                    let mut call = case.call();
                    let numbers = call.inputs[input].1.numbers_mut();
                    let Some(target) = numbers.iter_mut().rev().find(|x| x.is_finite()) else {
                        panic!("the input has no element that is used")
                    };
                    *target = poison;
                    let classes = |x: &[f64]| x.iter().map(|x| x.is_finite()).collect::<Vec<_>>();
                    let expected = call.expected();
                    assert!(expected.iter().any(|x| !x.is_finite()), "the case must poison something");
                    for kernel in kernels_of(case.operator) {
                        let found = support::run(&call, kernel, expected.len(), &Threads::new(2)).unwrap().0;
                        assert_eq!(classes(&found), classes(&expected), "{kernel:?} {case:?} input {input}");
                    }
                }
            }
        }
    }
}

#[test]
fn errors_are_those_of_the_precision() {
    for case in each(Case { q_len: 130, heads: 3, block: 72, width: 200, gates: Gates::Shared(2, 0.7), ..PROJECTION }) {
        support::check_precisions(case.call(), &[0, 1], !case.is_projection());
    }
}

/// Register tiles have up to 64 columns; those of matrix units, which are used for many tokens, 16 rows and 64 inner indices.
#[test]
fn macs_match_the_gates() {
    for q_len in [1, 4, 33, 400] {
        for p in [0.0, 0.1, 0.5, 1.0] {
            for case in each(Case { q_len, heads: 6, block: 24, width: 40, gates: Gates::Random(p), ..PROJECTION }) {
                let on = case.draw_gates().iter().filter(|&&gate| gate != 0.0).count();
                let least = on * case.block * case.width;
                let most = match q_len < 64 || on == 0 {
                    true => on * case.block.next_multiple_of(16) * case.width.next_multiple_of(16),
                    false => (on + 15 * case.heads) * case.block.next_multiple_of(64) * case.width.next_multiple_of(64),
                };
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
        for case in each(Case { q_len, heads: 4, block: 64, width: 128, gates: Gates::Shared(2, 0.5), ..PROJECTION }) {
            let on = case.draw_gates().iter().filter(|&&gate| gate != 0.0).count();
            for macs in check(&case, &[1]) {
                assert_eq!(macs as usize, on * 64 * 128, "{case:?}");
            }
        }
    }
}

#[test]
fn heads_used_by_no_token_do_no_work() {
    for q_len in [1, 7, 70] {
        for case in each(Case { q_len, heads: 8, block: 64, width: 64, gates: Gates::First(8), ..PROJECTION }) {
            let few = check(&case, &[2]);
            assert_eq!(few, check(&Case { heads: 64, ..case }, &[2]), "{case:?}");
            assert!(few.iter().all(|&macs| macs > 0));
        }
    }
}

/// Sums for all tokens would take 8 MiB.
#[test]
fn memory_is_released_and_does_not_grow_with_the_tokens() {
    for dtype in [DType::F32, DType::F16] {
        for case in each(Case { q_len: 16384, heads: 4, block: 32, width: 128, dtype, ..PROJECTION }) {
            let call = case.call();
            for kernel in kernels_of(case.operator) {
                let host = Accounts::new(2 << 20);
                support::run(&call, kernel, 16384 * 128, &host).unwrap();
                assert_eq!(host.outstanding.load(Ordering::SeqCst), 0, "{kernel:?}");
                assert!(host.peak.load(Ordering::SeqCst) > 0, "{kernel:?} must use the host's memory");
            }
        }
    }
}

#[test]
fn failed_allocation_returns_an_error() {
    for case in each(Case { q_len: 40, heads: 4, block: 64, width: 64, ..PROJECTION }) {
        for kernel in kernels_of(case.operator) {
            for limit in [0, 1000, 2000] {
                let host = Accounts::new(limit);
                let error =
                    support::run(&case.call(), kernel, 40 * if case.is_projection() { 256 } else { 64 }, &host).err();
                assert!(matches!(error, Some(Error::OutOfMemory { .. })), "{kernel:?} {limit}: {error:?}");
                assert_eq!(host.outstanding.load(Ordering::SeqCst), 0, "{kernel:?}");
            }
        }
    }
}
