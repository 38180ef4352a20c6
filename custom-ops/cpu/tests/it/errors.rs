//! Errors that every kernel returns in addition to its operator's: an output that does not fit, and invalid inputs.

use crate::support::{self, kernels_of};
use moh_conformance::{Buffer, Call, examples};
use moh_cpu::{Input, Threads};
use moh_operators::{DType, Error, OPERATORS, Operator};

/// Errors of the operators, or of the host's own functions.
#[derive(Debug, PartialEq)]
enum Failure {
    Host(&'static str),
    Operator(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Operator(error)
    }
}

/// A call of every operator with all inputs.
fn calls() -> Vec<Call> {
    let complete = |operator: &&'static Operator| {
        let mut calls = examples(operator, DType::F32).into_iter();
        calls.find(|call| call.inputs.len() == operator.inputs.len()).unwrap()
    };
    OPERATORS.iter().map(complete).collect()
}

#[test]
fn output_of_wrong_type_or_length_is_refused() {
    for call in calls() {
        let len = call.expected().len();
        for kernel in kernels_of(call.operator()) {
            for wrong in [0, len - 1, len + 1] {
                match support::run(&call, kernel, wrong, &Threads::new(1)) {
                    Err(Error::Length { tensor, found, .. }) => {
                        assert_eq!((tensor, found), (call.operator().output.name, wrong));
                    }
                    other => panic!("{kernel:?}: {other:?}"),
                }
            }
            let wrong = if call.output_dtype() == DType::F32 { DType::F16 } else { DType::F32 };
            let mut output = Buffer::unwritten(wrong, len);
            let inputs: Vec<_> = call.tensors().into_iter().map(|tensor| tensor.map(Input::from)).collect();
            match kernel.run(&call.attributes, &inputs, output.data_mut(), &Threads::new(1)) {
                Err(Error::Type { input, found, .. }) => {
                    assert_eq!((input, found), (call.operator().output.name, wrong));
                }
                other => panic!("{kernel:?}: {other:?}"),
            }
        }
    }
}

#[test]
fn output_made_by_the_host_with_wrong_type_or_length_is_refused() {
    for call in calls() {
        let (output, len) = (call.operator().output.name, call.expected().len());
        let inputs: Vec<_> = call.tensors().into_iter().map(|tensor| tensor.map(Input::from)).collect();
        for kernel in kernels_of(call.operator()) {
            let run = |made: Result<&mut Buffer, Failure>| {
                kernel.run_into(&call.attributes, &inputs, &Threads::new(1), |dtype, shape| {
                    assert_eq!((dtype, shape.iter().product()), (call.output_dtype(), len), "{kernel:?}");
                    made.map(Buffer::data_mut)
                })
            };
            assert!(run(Ok(&mut Buffer::unwritten(call.output_dtype(), len))).is_ok(), "{kernel:?}");
            // The host's own error is returned unchanged.
            assert_eq!(run(Err(Failure::Host("no output"))), Err(Failure::Host("no output")), "{kernel:?}");
            match run(Ok(&mut Buffer::unwritten(call.output_dtype(), len - 1))) {
                Err(Failure::Operator(Error::Length { tensor, .. })) => assert_eq!(tensor, output),
                other => panic!("{kernel:?}: {other:?}"),
            }
            match run(Ok(&mut Buffer::unwritten(DType::BF16, len))) {
                Err(Failure::Operator(Error::Type { input, .. })) => assert_eq!(input, output),
                other => panic!("{kernel:?}: {other:?}"),
            }
        }
    }
}

#[test]
fn inputs_of_wrong_type_or_length_are_refused() {
    for call in calls() {
        let len = call.expected().len();
        for kernel in kernels_of(call.operator()) {
            let refused = |change: &dyn Fn(&mut Call)| {
                let mut call = call.clone();
                change(&mut call);
                support::run(&call, kernel, len, &Threads::new(1)).unwrap_err()
            };
            assert!(matches!(refused(&|call| call.inputs.clear()), Error::InputCount { found: 0, .. }), "{kernel:?}");
            for i in 0..call.inputs.len() {
                let elements = |call: &Call| call.inputs[i].0.iter().product::<usize>();
                let error = refused(&|call| call.inputs[i].0.push(7));
                assert!(matches!(error, Error::Shape { .. }), "{kernel:?} {error}");
                let short = |call: &mut Call| {
                    let dtype = call.inputs[i].1.data().dtype();
                    call.inputs[i].1 = Buffer::new(dtype, &vec![0.5; elements(call) - 1]);
                };
                match refused(&short) {
                    Error::Length { tensor, .. } => assert_eq!(tensor, call.operator().inputs[i].name, "{kernel:?}"),
                    other => panic!("{kernel:?}: {other}"),
                }
                let other_type = |call: &mut Call| {
                    call.inputs[i].1 = Buffer::new(DType::BF16, &vec![0.5; elements(call)]);
                };
                // If only one input has type T, any type is valid.
                if call.inputs.len() > 1 {
                    assert!(matches!(refused(&other_type), Error::Type { .. }), "{kernel:?}");
                }
            }
        }
    }
}

#[test]
fn attributes_of_another_operator_are_refused() {
    let calls = calls();
    for (i, call) in calls.iter().enumerate() {
        let other = &calls[(i + 1) % calls.len()];
        for kernel in kernels_of(other.operator()) {
            let (expected, found) = (other.operator().name, call.operator().name);
            let error = support::run(call, kernel, call.expected().len(), &Threads::new(1)).unwrap_err();
            // Operators are compared by name, since some share an attribute struct.
            assert_eq!(error, Error::Operator { expected, found }, "{kernel:?}");
        }
    }
}
