//! Linear and LinearActivation: shapes, and what they imply.

use moh_operators::routed_mlp::Activation;
use moh_operators::shape::OutputDim;
use moh_operators::{Attributes, Error, Linear, LinearActivation, linear, linear_activation, problem_of};

type Shape<'a> = &'a [Option<usize>];

fn infer(shapes: &[Option<Shape<'_>>]) -> Result<Vec<OutputDim>, Error> {
    let attributes = Attributes::new::<Linear>(linear::Attributes {}).unwrap();
    attributes.operator().infer(&attributes, shapes)
}

const X: Shape<'_> = &[Some(2), Some(3), Some(5)];
const WEIGHT: Shape<'_> = &[Some(5), Some(7)];

fn with(gate: Option<Shape<'_>>, residual: Option<Shape<'_>>) -> Result<Vec<OutputDim>, Error> {
    infer(&[Some(X), Some(WEIGHT), None, gate, residual])
}

#[test]
fn gates_have_rows_for_all_of_some_dimensions() {
    let fitting: [Shape<'_>; 6] = [
        &[Some(1)],
        &[Some(2), Some(3), Some(7)],
        &[Some(2), Some(1), Some(7)],
        &[Some(1), Some(1), Some(7)],
        &[None, Some(1), Some(7)],
        &[None, None, None],
    ];
    for gate in fitting {
        assert!(with(Some(gate), None).is_ok(), "{gate:?}");
    }
    let others: [Shape<'_>; 5] = [
        &[Some(7)],
        &[Some(1), Some(3), Some(7)],
        &[Some(2), Some(3), Some(1)],
        &[Some(3), Some(1), Some(7)],
        &[Some(2), Some(7)],
    ];
    for gate in others {
        let message = with(Some(gate), None).unwrap_err().to_string();
        let expected = "Linear: input gate: expected shape (2, 3, out_width = 7) or (1), where dimensions from one on may be 1, found (";
        assert!(message.starts_with(expected), "{message}");
    }
}

#[test]
fn residuals_have_the_shape_of_the_output() {
    for residual in [&[Some(1)][..], &[Some(2), None, Some(7)]] {
        assert!(with(None, Some(residual)).is_ok(), "{residual:?}");
    }
    for residual in [&[Some(7)][..], &[Some(2), Some(1), Some(7)], &[Some(2), Some(3), Some(6)]] {
        let message = with(None, Some(residual)).unwrap_err().to_string();
        let expected = "Linear: input residual: expected shape (2, 3, out_width = 7) or (1), found (";
        assert!(message.starts_with(expected), "{message}");
    }
    let message = infer(&[Some(X), Some(WEIGHT), Some(&[Some(6)])]).unwrap_err().to_string();
    assert_eq!(message, "Linear: input bias: expected shape (out_width = 7) or (1), found (6)");
}

#[test]
fn rows_that_share_a_gate() {
    let attributes = Attributes::new::<Linear>(linear::Attributes {}).unwrap();
    let of = |x: &[usize], gate: Option<&[usize]>| {
        problem_of::<Linear>(&attributes, [Some(x), Some(&[5, 7]), None, gate].into_iter()).unwrap()
    };
    for (gate, rows) in [(Some(&[2, 3, 7][..]), 1), (Some(&[2, 1, 7]), 3), (Some(&[1, 1, 7]), 6), (None, 1)] {
        let problem = of(&[2, 3, 5], gate);
        assert_eq!((problem.rows, problem.rows_per_gate, problem.gate_is_number), (6, rows, false), "{gate:?}");
    }
    assert!(of(&[2, 3, 5], Some(&[1])).gate_is_number);
    assert_eq!(of(&[0, 3, 5], Some(&[0, 1, 7])).rows_per_gate, 1);
}

#[test]
fn activations_of_two_columns_are_refused() {
    let attributes = linear_activation::Attributes { activation: Activation::SwiGlu };
    let message = Attributes::new::<LinearActivation>(attributes).unwrap_err().to_string();
    assert_eq!(message, "LinearActivation: attribute activation: expected 0 to 3, found 4");
}
