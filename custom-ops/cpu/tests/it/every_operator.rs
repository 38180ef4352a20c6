//! Every CPU kernel of every registered operator that this processor supports, on the operator's own examples.

use crate::support::{check, kernels_of};
use moh_conformance::examples;
use moh_cpu::Precision;
use moh_operators::{DType, OPERATORS};

#[test]
fn kernels_equal_the_reference_on_the_operators_examples() {
    for operator in OPERATORS {
        assert!(kernels_of(operator).next().is_some(), "{operator:?} has no CPU kernel: add a row to moh-cpu");
        for call in DType::ALL.into_iter().flat_map(|dtype| examples(operator, dtype)) {
            println!("{:?}", call.attributes);
            let expected = call.expected();
            check(&call, &[1, 3], |i| expected[i] == 0.0);
        }
    }
}

/// `moh-run doctor` expects a kernel of ours for all others.
#[test]
fn only_operators_that_say_so_are_left_to_their_bodies() {
    for operator in moh_operators::OPERATORS {
        let left = Precision::NAMES.map(|(_, precision)| moh_cpu::is_left_to_body(operator, precision, false));
        let left_if_packed = Precision::NAMES.map(|(_, precision)| moh_cpu::is_left_to_body(operator, precision, true));
        assert!(std::iter::zip(left, left_if_packed).all(|(left, if_packed)| left || !if_packed), "{}", operator.name);
        assert!(operator.may_be_left || !left.contains(&true), "{}: {left:?}", operator.name);
    }
}
