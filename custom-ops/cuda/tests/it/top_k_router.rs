//! TopKRouter's CUDA kernel against the f64 reference, on a GPU or on the emulator.

use crate::device::{Device, seed};
use moh_conformance::top_k_router::{Case, kinds, plain};
use moh_operators::top_k_router::Kind;
use moh_operators::{DType, Error};

fn check(device: &Device, case: &Case) {
    println!("{case:?}");
    let call = case.call_with(&case.numbers());
    let expected = call.expected();
    device.check(&call, |i| expected[i] == 0.0);
}

#[test]
fn all_kinds_and_types() {
    let Some(device) = Device::get() else { return };
    for case in kinds() {
        for dtype in DType::ALL {
            for tokens in [1, 2, 3, 5, 17, 64] {
                check(device, &Case { tokens, dtype, seed: seed() + tokens as u64, ..case.clone() });
            }
        }
    }
}

/// Groups of 8, 16 and 32 lanes, and the maximum number of scores.
#[test]
fn all_numbers_of_experts() {
    let Some(device) = Device::get() else { return };
    for heads in [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 1000, 3000, 6144] {
        let tokens = if heads > 100 { 2 } else { 9 };
        let case =
            Case { kind: Kind::Probabilities, heads, shared: vec![], top_k: heads.div_ceil(8), tokens, ..plain() };
        check(device, &case);
    }
    let case = Case { kind: Kind::Renormalized, heads: 6145, shared: vec![], top_k: 1, tokens: 1, ..plain() };
    let call = case.call_with(&case.numbers());
    assert!(matches!(device.run(&call), Err(Error::Attribute { .. })));
}

#[test]
fn shared_heads_at_any_index() {
    let Some(device) = Device::get() else { return };
    for kind in [Kind::TwoStage, Kind::QueryNorms] {
        let shared = vec![0, 1, 31, 32, 33, 63, 64, 98];
        check(device, &Case { kind, heads: 99, shared, top_k: 7, dim: 3, tokens: 5, ..plain() });
        let beyond = Case { kind, heads: 1030, shared: vec![1, 1028], top_k: 7, dim: 2, tokens: 1, ..plain() };
        let call = beyond.call_with(&beyond.numbers());
        assert!(matches!(device.run(&call), Err(Error::Attribute { .. })));
    }
}

#[test]
fn nan_and_infinite_scores_equal_the_reference() {
    let Some(device) = Device::get() else { return };
    for case in kinds() {
        for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let case = Case { tokens: 8, ..case.clone() };
            let mut numbers = case.numbers();
            numbers.iter_mut().step_by(3).for_each(|x| *x = poison);
            for numbers in [&numbers, &vec![poison; numbers.len()]] {
                let call = case.call_with(numbers);
                let class = |x: &f64| (x.is_nan(), x.is_infinite(), *x == 0.0);
                let expected: Vec<_> = call.expected().iter().map(class).collect();
                let found = device.run(&call).unwrap();
                assert_eq!(found.iter().map(class).collect::<Vec<_>>(), expected, "{case:?} {poison}");
            }
        }
    }
}
