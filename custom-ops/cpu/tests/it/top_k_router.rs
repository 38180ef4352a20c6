//! TopKRouter: every CPU kernel that this processor supports against the f64 reference.

use crate::support::{self, Accounts, kernels_of};
use moh_conformance::Random;
use moh_conformance::top_k_router::{Case, kinds, plain};
use moh_cpu::Threads;
use moh_operators::top_k_router::Kind;
use moh_operators::{DType, Definition, Error, Operator, TopKRouter};
use proptest::prelude::*;
use std::sync::atomic::Ordering;

const OPERATOR: &Operator = TopKRouter::OPERATOR;

fn check(case: &Case) {
    let call = case.call_with(&case.numbers());
    let expected = call.expected();
    for gates in expected.chunks(case.heads) {
        let on = gates.iter().filter(|gate| **gate != 0.0).count();
        assert_eq!(on, case.shared.len() + case.top_k, "{case:?}: {gates:?}");
    }
    support::check(&call, &[1, 3], |i| expected[i] == 0.0);
}

prop_compose! {
    fn cases()(
        kind in prop::sample::select(vec![Kind::TwoStage, Kind::Probabilities, Kind::Renormalized, Kind::QueryNorms]),
        tokens in prop_oneof![1 => Just(0usize), 6 => 1usize..40, 1 => 1000usize..3000],
        heads in prop_oneof![6 => 1usize..40, 1 => 60usize..70],
        shares in 0.0..0.8f64,
        top_k in 0usize..70,
        dim in 1usize..40,
        dtype in prop_oneof![3 => Just(DType::F32), 1 => Just(DType::F16), 1 => Just(DType::BF16)],
        seed in any::<u64>(),
    ) -> Case {
        let mut random = Random(seed);
        let mut shared: Vec<usize> = (0..heads).filter(|_| random.unit() < shares).collect();
        if matches!(kind, Kind::Probabilities | Kind::Renormalized) || (kind == Kind::TwoStage && heads == 1) {
            shared.clear();
        }
        let routed = heads - shared.len();
        let least = usize::from(kind != Kind::QueryNorms || shared.is_empty()).min(routed);
        Case { kind, tokens, heads, shared, top_k: top_k.clamp(least, routed), dim, dtype, seed }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn kernels_equal_the_reference(case in cases()) {
        check(&case);
    }
}

#[test]
fn all_kinds_with_token_counts_around_tile_sizes() {
    for case in kinds() {
        for tokens in (1..=9).chain([15, 16, 17, 31, 33]) {
            check(&Case { tokens, ..case.clone() });
        }
    }
}

#[test]
fn ties_select_the_lower_head() {
    for (heads, kind) in [(9, Kind::TwoStage), (90, Kind::Probabilities), (9, Kind::QueryNorms)] {
        let case = Case { kind, heads, shared: vec![], top_k: 4, ..plain() };
        let call = case.call_with(&vec![-0.5; case.shape().iter().product()]);
        for kernel in kernels_of(OPERATOR) {
            let (gates, _) = support::run(&call, kernel, case.tokens * heads, &Threads::new(1)).unwrap();
            for gates in gates.chunks(heads) {
                let on: Vec<usize> = (0..heads).filter(|&head| gates[head] != 0.0).collect();
                assert_eq!(on, [0, 1, 2, 3], "{kernel:?}");
            }
        }
    }
}

/// NaN and infinities propagate to the selected heads of their token, and do not change which heads are selected by
/// other scores.
#[test]
fn nan_and_infinite_scores_equal_the_reference() {
    for case in kinds() {
        let case = Case { tokens: 64, ..case };
        for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut numbers = case.numbers();
            let mut random = Random(case.seed);
            let width = numbers.len() / case.tokens;
            for row in numbers.chunks_mut(width).step_by(2) {
                for _ in 0..=random.bits() as usize % width {
                    row[random.bits() as usize % width] = poison;
                }
            }
            let call = case.call_with(&numbers);
            let class = |x: &f64| (x.is_nan(), x.is_infinite(), *x == 0.0);
            let expected: Vec<_> = call.expected().iter().map(class).collect();
            for kernel in kernels_of(OPERATOR) {
                let (found, _) = support::run(&call, kernel, expected.len(), &Threads::new(2)).unwrap();
                assert_eq!(found.iter().map(class).collect::<Vec<_>>(), expected, "{kernel:?} {case:?} {poison}");
            }
        }
        // All scores are NaN.
        let nothing = case.call_with(&vec![f32::NAN; case.shape().iter().product()]);
        let active = case.shared.len() + case.top_k;
        for kernel in kernels_of(OPERATOR) {
            let (found, _) = support::run(&nothing, kernel, case.tokens * case.heads, &Threads::new(1)).unwrap();
            assert!(found.chunks(case.heads).all(|row| row.iter().filter(|x| **x != 0.0).count() == active));
        }
    }
}

#[test]
fn failed_allocation_returns_an_error_and_leaks_nothing() {
    let call = plain().call_with(&plain().numbers());
    for kernel in kernels_of(OPERATOR) {
        let host = Accounts::new(usize::MAX);
        support::run(&call, kernel, 37 * 6, &host).unwrap();
        assert_eq!(host.outstanding.load(Ordering::SeqCst), 0);
        assert!(host.peak.load(Ordering::SeqCst) < 1 << 16);
        let refused = support::run(&call, kernel, 37 * 6, &Accounts::new(0));
        assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{refused:?}");
    }
}
