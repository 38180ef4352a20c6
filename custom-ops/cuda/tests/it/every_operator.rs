//! Every operator with CUDA kernels on its own examples, on a GPU or on the emulator.

use crate::device::on_device;
use moh_conformance::examples;
use moh_operators::{DType, OPERATORS};

#[test]
fn kernels_equal_the_reference_on_the_operators_examples() {
    on_device(|device| {
        for operator in moh_cuda::operators() {
            for call in DType::ALL.into_iter().flat_map(|dtype| examples(operator, dtype)) {
                println!("{:?}", call.attributes);
                let expected = call.expected();
                device.check(&call, |i| expected[i] == 0.0);
            }
        }
    });
}

/// An operator without CUDA kernels would run on the CPU in a CUDA session.
#[test]
fn every_operator_has_kernels() {
    for operator in OPERATORS {
        assert!(moh_cuda::supports(operator), "{}", operator.name);
    }
}
