//! TopKRouter: every CPU kernel that this processor supports against the f64 reference, and what it refuses.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[allow(dead_code)]
#[path = "support/call.rs"]
mod call;
#[allow(dead_code)]
#[path = "support/data.rs"]
mod data;
#[path = "support/router.rs"]
mod router;

use data::{Accounts, Random, kernels_of};
use moh_kernels::schema::TOP_K_ROUTER as OPERATOR;
use moh_kernels::shape::OutputDim;
use moh_kernels::shape::top_k_router::Kind;
use moh_kernels::{DType, Error, Threads};
use proptest::prelude::*;
use router::{Case, attributes, kinds, plain};
use std::sync::atomic::Ordering;

impl Case {
    fn check(&self) {
        let call = self.call_with(&self.numbers());
        let expected = call.expected();
        for gates in expected.chunks(self.heads) {
            let on = gates.iter().filter(|gate| **gate != 0.0).count();
            assert_eq!(on, self.shared.len() + self.top_k, "{self:?}: {gates:?}");
        }
        call.check(&[1, 3], |i| expected[i] == 0.0);
    }
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
    fn kernels_agree_with_the_reference(case in cases()) {
        case.check();
    }
}

#[test]
fn every_kind_and_every_edge_of_a_tile() {
    for case in kinds() {
        for tokens in (1..=9).chain([15, 16, 17, 31, 33]) {
            Case { tokens, ..case.clone() }.check();
        }
    }
}

#[test]
fn the_first_of_equal_scores_wins() {
    for (heads, kind) in [(9, Kind::TwoStage), (90, Kind::Probabilities), (9, Kind::QueryNorms)] {
        let case = Case { kind, heads, shared: vec![], top_k: 4, ..plain() };
        let call = case.call_with(&vec![-0.5; case.shape().iter().product()]);
        for kernel in kernels_of(&OPERATOR) {
            let (gates, _) = call.run(kernel, case.tokens * heads, &Threads::new(1)).unwrap();
            for gates in gates.chunks(heads) {
                let on: Vec<usize> = (0..heads).filter(|&head| gates[head] != 0.0).collect();
                assert_eq!(on, [0, 1, 2, 3], "{kernel:?}");
            }
        }
    }
}

/// What no number stands for spreads over the selected heads of its token, and switches no head on or off.
#[test]
fn not_a_number_and_infinities() {
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
            for kernel in kernels_of(&OPERATOR) {
                let (found, _) = call.run(kernel, expected.len(), &Threads::new(2)).unwrap();
                assert_eq!(found.iter().map(class).collect::<Vec<_>>(), expected, "{kernel:?} {case:?} {poison}");
            }
        }
        // Scores that are no numbers at all.
        let nothing = case.call_with(&vec![f32::NAN; case.shape().iter().product()]);
        let active = case.shared.len() + case.top_k;
        for kernel in kernels_of(&OPERATOR) {
            let (found, _) = nothing.run(kernel, case.tokens * case.heads, &Threads::new(1)).unwrap();
            assert!(found.chunks(case.heads).all(|row| row.iter().filter(|x| **x != 0.0).count() == active));
        }
    }
}

#[test]
fn no_memory_is_an_error_and_none_is_left_behind() {
    let call = plain().call_with(&plain().numbers());
    for kernel in kernels_of(&OPERATOR) {
        let host = Accounts::new(usize::MAX);
        call.run(kernel, 37 * 6, &host).unwrap();
        assert_eq!(host.outstanding.load(Ordering::SeqCst), 0);
        assert!(host.peak.load(Ordering::SeqCst) < 1 << 16);
        let refused = call.run(kernel, 37 * 6, &Accounts::new(0));
        assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{refused:?}");
    }
}

#[test]
fn attributes_must_fit() {
    for (attributes, message) in [
        (attributes(4, 6, 2, &[]), "kind: expected 0 to 3, found 4"),
        (attributes(0, 0, 0, &[]), "num_heads: expected a number from 1 to 1048576, found 0"),
        (attributes(0, 6, 2, &[1, 1]), "shared_heads: expected ascending heads below num_heads = 6, found [1, 1]"),
        (attributes(0, 6, 2, &[2, 1]), "shared_heads: expected ascending heads below num_heads = 6, found [2, 1]"),
        (attributes(3, 6, 2, &[6]), "shared_heads: expected ascending heads below num_heads = 6, found [6]"),
        (attributes(0, 6, 2, &[-1]), "shared_heads: expected ascending heads below num_heads = 6, found [-1]"),
        (attributes(1, 6, 2, &[0]), "shared_heads: expected none in kind 1, found [0]"),
        (attributes(0, 6, 0, &[0]), "top_k: expected 1 to 5, found 0"),
        (attributes(0, 6, 6, &[0]), "top_k: expected 1 to 5, found 6"),
        (attributes(2, 6, -1, &[]), "top_k: expected 1 to 6, found -1"),
        (attributes(3, 6, 0, &[]), "top_k: expected 1 to 6, found 0"),
        (
            attributes(0, 1, 0, &[0]),
            "num_heads: expected heads that a token chooses from, or two of them or more, found 1",
        ),
    ] {
        let error = OPERATOR.output_shape(&attributes, &[Some(&[2, 3, 8])]).unwrap_err().to_string();
        assert_eq!(error, format!("TopKRouter: attribute {message}"));
    }
}

#[test]
fn shapes_must_fit() {
    let two_stage = attributes(0, 6, 2, &[0, 5]);
    assert_eq!(OPERATOR.output_shape(&two_stage, &[Some(&[2, 3, 8])]).unwrap(), [2, 3, 6]);
    let error =
        |attributes, shape: &[usize]| OPERATOR.output_shape(attributes, &[Some(shape)]).unwrap_err().to_string();
    let expected = "TopKRouter: input scores: expected shape (batch, q_len, 8), found (2, 3, 7)";
    assert_eq!(error(&two_stage, &[2, 3, 7]), expected);
    assert!(error(&two_stage, &[3, 8]).ends_with("found (3, 8)"));
    let norms = attributes(3, 6, 2, &[0, 5]);
    assert_eq!(OPERATOR.output_shape(&norms, &[Some(&[1, 0, 48])]).unwrap(), [1, 0, 6]);
    let expected = "TopKRouter: input scores: expected shape (batch, q_len, 6 * head_dim), found (2, 3, 20)";
    assert_eq!(error(&norms, &[2, 3, 20]), expected);

    let same = |axis| OutputDim::SameAs { input: 0, axis };
    let inferred = (OPERATOR.infer)(&norms, &[Some(&[None, None, None])]).unwrap();
    assert_eq!(inferred, [same(0), same(1), OutputDim::Size(6)]);
}
