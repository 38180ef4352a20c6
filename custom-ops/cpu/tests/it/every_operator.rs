//! Every CPU kernel of every registered operator that this processor supports, on the operator's own examples.

use crate::support::{check, kernels_of};
use moh_conformance::examples;
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
