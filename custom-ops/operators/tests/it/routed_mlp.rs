//! RoutedMLP.

use moh_conformance::routed_mlp::{CASE, Case};
use moh_conformance::{Buffer, Call};
use moh_operators::routed_mlp::Activation;
use moh_operators::{Attributes, DType, Definition, Error, Operator, RoutedMlp, Value};

const OPERATOR: &Operator = RoutedMlp::OPERATOR;

fn error(case: Case, change: impl FnOnce(&mut Call)) -> Error {
    let mut call = case.call();
    change(&mut call);
    OPERATOR.reference(&call.attributes, &call.tensors()).unwrap_err()
}

#[test]
fn attributes_out_of_range_are_refused() {
    for (name, experts, activation) in [
        ("num_experts", 0, 0),
        ("num_experts", -1, 0),
        ("num_experts", i64::MAX, 0),
        ("activation", 3, 5),
        ("activation", 3, -1),
    ] {
        let value = |attribute: &str| Value::Int(if attribute == "num_experts" { experts } else { activation });
        match Attributes::read(OPERATOR, |def| Some(value(def.name))) {
            Err(Error::Attribute { attribute, .. }) => assert_eq!(attribute, name),
            other => panic!("{name}: {other:?}"),
        }
    }
    for missing in ["num_experts", "activation"] {
        let read = Attributes::read(OPERATOR, |def| (def.name != missing).then_some(Value::Int(1)));
        assert!(matches!(read, Err(Error::Attribute { attribute, .. }) if attribute == missing), "{missing}");
    }
}

#[test]
fn shape_error_names_the_wrong_input() {
    let case = Case { batch: 2, q_len: 3, width: 5, hidden: 4, out_width: 6, activation: Activation::SwiGlu, ..CASE };
    let cases: [(usize, &[usize]); 22] = [
        (0, &[2, 3]),
        (0, &[2, 3, 0]),
        (0, &[2, 3, 5, 1]),
        (1, &[3, 5]),
        (1, &[2, 5, 8]),
        (1, &[3, 4, 8]),
        (1, &[3, 5, 7]),
        (1, &[3, 5, 0]),
        (2, &[2, 4, 6]),
        (2, &[3, 5, 6]),
        (2, &[3, 4, 0]),
        (2, &[3, 4]),
        (3, &[2, 3, 2]),
        (3, &[2, 2, 3]),
        (3, &[1, 3, 3]),
        (3, &[6, 3]),
        (4, &[3, 4]),
        (4, &[2, 8]),
        (4, &[8]),
        (5, &[3, 5]),
        (5, &[2, 6]),
        (5, &[3, 6, 1]),
    ];
    for (i, shape) in cases {
        match error(case, |call| call.inputs[i].0 = shape.to_vec()) {
            Error::Shape { input, .. } => assert_eq!(input, OPERATOR.inputs[i].name, "{shape:?}"),
            other => panic!("{i} {shape:?}: {other}"),
        }
    }
}

#[test]
fn wrong_input_count_type_or_length_is_refused() {
    for (n, found) in [(0, 0), (3, 3), (5, 5)] {
        let error = error(CASE, |call| call.inputs.truncate(n));
        assert!(matches!(error, Error::InputCount { found: f, .. } if f == found), "{error}");
    }
    for i in 0..6 {
        let name = |i: usize| OPERATOR.inputs[i].name;
        let half = |call: &mut Call| {
            let numbers = vec![0.5; call.inputs[i].0.iter().product()];
            call.inputs[i].1 = Buffer::new(DType::F16, &numbers);
        };
        let found = error(CASE, half);
        // x defines T, so a wrong type there is reported for the first matrix.
        let expected = name(if i == 0 { 1 } else { i });
        assert!(matches!(found, Error::Type { input, .. } if input == expected), "{found}");
        let short = |call: &mut Call| {
            let numbers = vec![0.5; call.inputs[i].0.iter().product::<usize>() - 1];
            call.inputs[i].1 = Buffer::new(DType::F32, &numbers);
        };
        let found = error(CASE, short);
        assert!(matches!(found, Error::Length { tensor, .. } if tensor == name(i)), "{found}");
    }
}
