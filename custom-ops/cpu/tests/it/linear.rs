//! Linear and LinearActivation: every CPU kernel that this processor supports, against the f64 reference.

use crate::support::{self, Accounts, kernels_of};
use moh_conformance::linear::{Case, Then};
use moh_conformance::{Buffer, Call};
use moh_cpu::{Input, Packing, Precision, Threads};
use moh_operators::routed_mlp::Activation;
use moh_operators::{DType, Data, Definition, Error, Linear, Tensor};
use proptest::prelude::*;
use std::sync::atomic::Ordering;

const CASE: Case =
    Case { rows: 5, width: 40, out_width: 24, bias: true, then: Then::Nothing, dtype: DType::F32, seed: 1 };

fn check(case: Case, threads: &[usize]) -> Vec<u64> {
    println!("{case:?}");
    support::check(&case.call(), threads, |_| false).iter().map(|work| work.macs).collect()
}

prop_compose! {
    fn cases()(
        // Around the numbers of rows from which, and in whose multiples, matrix units are used.
        rows in prop_oneof![3 => 0usize..40, 1 => 60usize..100, 1 => 505usize..520, 1 => 1020usize..1060],
        width in prop_oneof![2 => 1usize..70, 1 => 120usize..140, 1 => 250usize..300],
        out_width in prop_oneof![2 => 1usize..70, 1 => 250usize..300],
        bias in any::<bool>(),
        then in prop::sample::select(Then::all(4)),
        dtype in prop_oneof![3 => Just(DType::F32), 1 => Just(DType::F16), 1 => Just(DType::BF16)],
        seed in any::<u64>(),
    ) -> Case {
        Case { rows, width, out_width, bias, then, dtype, seed }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn equals_the_reference(case in cases()) {
        check(case, &[1, 3]);
    }
}

/// Whatever is done with the sums, on each way of computing them: few rows, a matrix unit, vectors; by several workers.
#[test]
fn what_becomes_of_the_sums() {
    for then in Then::all(7) {
        for (rows, bias) in [(7, true), (70, false), (525, true)] {
            check(Case { rows, width: 43, out_width: 301, bias, then, ..CASE }, &[1, 3]);
        }
        check(Case { rows: 70, width: 64, out_width: 301, then, dtype: DType::BF16, ..CASE }, &[1, 2]);
        // Several blocks of inner indices, with sums in the output and beside it.
        for out_width in [48, 45] {
            check(Case { rows: 70, width: 1100, out_width, then, ..CASE }, &[1, 2]);
        }
    }
}

/// The work is that of the product, up to the padding of tiles.
#[test]
fn macs_are_those_of_the_product() {
    for (rows, padded) in [(4, 4), (64, 64), (70, 80)] {
        for macs in check(Case { rows, width: 64, out_width: 160, ..CASE }, &[2]) {
            assert!((rows as u64 * 64 * 160..=padded * 64 * 160).contains(&macs), "{macs} with {rows} rows");
        }
    }
}

/// Each number of rows up to one more than are multiplied at once, with inner indices and columns that fill no vector.
#[test]
fn few_rows() {
    for rows in 1..10 {
        check(Case { rows, width: 43, out_width: 301, ..CASE }, &[1, 2]);
    }
}

#[test]
fn errors_are_those_of_the_precision() {
    // The last inner indices fill the first half of a tile's pairs and not the second.
    for then in [Then::Nothing, Then::Gate] {
        support::check_precisions(Case { rows: 100, width: 310, out_width: 70, then, ..CASE }.call(), &[0, 1], false);
    }
}

/// A weight that has no room in a bfloat16 is not packed as one, though few rows are multiplied without a look at their sums.
#[test]
fn few_rows_of_weights_beyond_bfloat16() {
    for rows in [1, 7] {
        let mut call = Case { rows, width: 64, out_width: 48, bias: false, ..CASE }.call();
        call.inputs[1].1.numbers_mut()[5 * 48 + 7] = 3.4e38;
        let x: Vec<f32> = (0..rows * 64).map(|i| if i % 64 == 5 { 0.0 } else { 1e-3 }).collect();
        call.inputs[0].1 = Buffer::new(DType::F32, &x);
        let expected = call.expected();
        assert!(expected.iter().all(|x| x.is_finite()));
        for kernel in kernels_of(Linear::OPERATOR) {
            for (_, precision) in Precision::NAMES {
                let packed = support::pack_for(&call, kernel, Packing { precision, ..support::BESIDE });
                let inputs = support::with_packed(&call, &packed);
                let host = support::AtPrecision(Threads::new(2), precision);
                let (found, _) = support::run_on(&call, &inputs, kernel, expected.len(), &host).unwrap();
                let right = |(found, expected): &(&f64, &f64)| (*found - *expected).abs() <= 1e-2;
                let wrong = found.iter().zip(&expected).find(|both| !right(both));
                assert_eq!(wrong, None, "{kernel:?} at {}", precision.name());
            }
        }
    }
}

/// Numbers that the terms of a narrower type do not add up to.
#[test]
fn infinities_large_and_small_numbers() {
    let case = Case { rows: 40, width: 64, out_width: 48, bias: false, ..CASE };
    let mut call = case.call();
    let mut numbers = call.inputs[0].1.values(&"x");
    // The whole row becomes infinite, without a NaN: the weights that it meets have the same sign.
    numbers[3 * 64 + 5] = f64::INFINITY;
    numbers[7 * 64] = f64::NAN;
    numbers[9 * 64 + 1] = 1e30;
    for x in &mut numbers[11 * 64..12 * 64] {
        *x *= 1e-30;
    }
    let numbers: Vec<f32> = numbers.iter().map(|&x| x as f32).collect();
    let mut weights: Vec<f32> = call.inputs[1].1.values(&"weight").iter().map(|&w| w as f32).collect();
    for (i, weight) in weights[5 * 48..6 * 48].iter_mut().enumerate() {
        *weight = if i % 2 == 0 { 0.5 } else { -0.5 };
    }
    call.inputs[0].1 = Buffer::new(DType::F32, &numbers);
    call.inputs[1].1 = Buffer::new(DType::F32, &weights);
    let expected = call.expected();
    for kernel in kernels_of(Linear::OPERATOR) {
        let (found, _) = support::run(&call, kernel, expected.len(), &Threads::new(2)).unwrap();
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let row = i / 48;
            if expected.is_finite() {
                let largest = match row {
                    9 => 1e30,
                    11 => 1e-30,
                    _ => 4.0,
                };
                assert!((found - expected).abs() <= 4e-6 * largest, "{kernel:?}, row {row}: {found}, not {expected}");
            } else {
                assert!(found == expected || found.is_nan() && expected.is_nan(), "{kernel:?}, row {row}: {found}");
            }
        }
    }
}

/// Of a sum that is not finite becomes what the definition says, and of the others of its row what becomes of them elsewhere.
#[test]
fn what_becomes_of_infinities() {
    for then in Then::all(20) {
        let mut call = Case { rows: 40, width: 64, out_width: 48, then, ..CASE }.call();
        let mut numbers: Vec<f32> = call.inputs[0].1.values(&"x").iter().map(|&x| x as f32).collect();
        numbers[3 * 64 + 5] = f32::INFINITY;
        call.inputs[0].1 = Buffer::new(DType::F32, &numbers);
        let expected = call.expected();
        for kernel in kernels_of(call.operator()) {
            let (found, _) = support::run(&call, kernel, expected.len(), &Threads::new(2)).unwrap();
            let is_same = |(found, expected): (&f64, &f64)| match expected.is_finite() {
                true => (found - expected).abs() <= 4e-6,
                false => found == expected || found.is_nan() && expected.is_nan(),
            };
            let wrong = found.iter().zip(&expected).position(|both| !is_same(both));
            assert_eq!(wrong.map(|i| (found[i], expected[i])), None, "{kernel:?}, {then:?}");
            assert!(expected.iter().any(|x| !x.is_finite()), "{then:?}");
        }
    }
}

/// Sums are rounded once, after what becomes of them: in float16, these have no room before.
#[test]
fn sums_are_not_rounded_before_what_becomes_of_them() {
    for (then, expected) in [(Then::Gate, -51200.0), (Then::Activation(Activation::Silu), 0.0)] {
        // Each way of computing them has its own numbers of rows.
        for rows in [1, 8, 9, 20, 70] {
            let case = Case { rows, width: 64, out_width: 19, bias: false, then, dtype: DType::F16, ..CASE };
            let mut call = case.call();
            for (input, number) in [(0, 40.0), (1, -40.0), (3, 0.5)] {
                if let Some((_, buffer)) = call.inputs.get_mut(input) {
                    let all = vec![number; buffer.values(&"input").len()];
                    *buffer = Buffer::new(DType::F16, &all);
                }
            }
            for kernel in kernels_of(call.operator()) {
                let (found, _) = support::run(&call, kernel, rows * 19, &Threads::new(2)).unwrap();
                assert_eq!(found, vec![expected; rows * 19], "{kernel:?}, {rows} rows, {then:?}");
            }
        }
    }
}

/// x in bf16 terms would take 24 MiB at once.
#[test]
fn memory_is_released_and_does_not_grow_with_the_rows() {
    let call = Case { rows: 16384, width: 256, out_width: 64, ..CASE }.call();
    for kernel in kernels_of(Linear::OPERATOR) {
        let host = Accounts::new(8 << 20);
        support::run(&call, kernel, 16384 * 64, &host).unwrap();
        assert_eq!(host.outstanding.load(Ordering::SeqCst), 0, "{kernel:?}");
        assert!(host.peak.load(Ordering::SeqCst) > 0, "{kernel:?} must use the host's memory");
        let poor = Accounts::new(1 << 10);
        let error = support::run(&call, kernel, 16384 * 64, &poor).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { .. }), "{kernel:?}: {error}");
        assert_eq!(poor.outstanding.load(Ordering::SeqCst), 0, "{kernel:?}");
    }
}

/// A weight that was packed for vectors is used as it is by the kernel of a matrix unit.
#[test]
fn weights_packed_for_vectors() {
    let call: Call = Case { rows: 40, ..CASE }.call();
    let expected = call.expected();
    let vectors = kernels_of(Linear::OPERATOR).find(|kernel| support::pack(&call, kernel)[1].is_some());
    let vectors = vectors.expect("a kernel of vectors");
    let packed = support::pack(&call, vectors);
    let Some(weight) = &packed[1] else { panic!("the weight is packed") };
    let tensors = call.tensors();
    let [Some(x), _, Some(bias)] = tensors[..] else { panic!("three inputs") };
    let inputs = [Some(Input::from(x)), Some(Input::Packed(weight)), Some(Input::from(bias))];
    let mut output = vec![0.0f32; expected.len()];
    let data = moh_operators::DataMut::F32(&mut output);
    vectors.run(&call.attributes, &inputs, data, &Threads::new(1)).unwrap();
    let found: Vec<f64> = output.iter().map(|&x| x.into()).collect();
    call.compare(&format!("{vectors:?}"), &found, &expected, |_| false);
    let wrong = Tensor { shape: &[40, 24], data: Data::I64(&[]) };
    assert!(vectors.pack(&call.attributes, 1, wrong, Packing::default()).is_err());
}
