//! TopKRouter.

use moh_operators::shape::OutputDim;
use moh_operators::{Attributes, Definition, Error, Operator, TopKRouter, Value};

const OPERATOR: &Operator = TopKRouter::OPERATOR;

fn attributes(kind: i64, heads: i64, top_k: i64, shared: &[i64]) -> Result<Attributes, Error> {
    let value = |name: &str| match name {
        "kind" => Value::Int(kind),
        "num_heads" => Value::Int(heads),
        "top_k" => Value::Int(top_k),
        _ => Value::Ints(shared.to_vec()),
    };
    Attributes::read(OPERATOR, |def| Some(value(def.name)))
}

#[test]
fn invalid_attributes_are_refused() {
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
        (attributes(0, 1, 0, &[0]), "num_heads: expected 2 or more if all heads are shared, found 1"),
    ] {
        assert_eq!(attributes.unwrap_err().to_string(), format!("TopKRouter: attribute {message}"));
    }
}

#[test]
fn wrong_shapes_are_refused() {
    let two_stage = attributes(0, 6, 2, &[0, 5]).unwrap();
    assert_eq!(OPERATOR.output_shape(&two_stage, &[Some(&[2, 3, 8])]).unwrap(), [2, 3, 6]);
    let error =
        |attributes, shape: &[usize]| OPERATOR.output_shape(attributes, &[Some(shape)]).unwrap_err().to_string();
    let expected = "TopKRouter: input scores: expected shape (batch, q_len, 8), found (2, 3, 7)";
    assert_eq!(error(&two_stage, &[2, 3, 7]), expected);
    assert!(error(&two_stage, &[3, 8]).ends_with("found (3, 8)"));
    let norms = attributes(3, 6, 2, &[0, 5]).unwrap();
    assert_eq!(OPERATOR.output_shape(&norms, &[Some(&[1, 0, 48])]).unwrap(), [1, 0, 6]);
    let expected = "TopKRouter: input scores: expected shape (batch, q_len, 6 * head_dim), found (2, 3, 20)";
    assert_eq!(error(&norms, &[2, 3, 20]), expected);

    let same = |axis| OutputDim::SameAs { input: 0, axis };
    let inferred = OPERATOR.infer(&norms, &[Some(&[None, None, None])]).unwrap();
    assert_eq!(inferred, [same(0), same(1), OutputDim::Size(6)]);
}
