//! RoutedAggregatedAttention.

use moh_operators::shape::OutputDim;
use moh_operators::{Attributes, DType, Definition, Error, Operator, RoutedAggregatedAttention, Value};

const OPERATOR: &Operator = RoutedAggregatedAttention::OPERATOR;

/// 2 images of 3 x 4 tokens, windows of 3 x 3, 5 pooled tokens, 2 heads of 6 channels.
fn shapes() -> Vec<Vec<usize>> {
    let rows = |len: usize| vec![2, len, 12];
    vec![
        rows(12),
        rows(12),
        rows(12),
        rows(5),
        rows(5),
        vec![2, 12, 2],
        vec![2, 6],
        vec![12, 2],
        vec![2, 9],
        vec![2, 12, 5],
        vec![2, 6, 9],
        vec![2, 9],
    ]
}

fn attributes(change: &[(&str, i64)]) -> Result<Attributes, Error> {
    let value = |name: &str| match change.iter().find(|(changed, _)| *changed == name) {
        Some(&(_, value)) => value,
        None => match name {
            "num_heads" => 2,
            "height" | "window" => 3,
            _ => 4,
        },
    };
    Attributes::read(OPERATOR, |def| Some(Value::Int(value(def.name))))
}

fn output_shape(attributes: &Attributes, shapes: &[Vec<usize>]) -> Result<Vec<usize>, Error> {
    let shapes: Vec<Option<&[usize]>> = shapes.iter().map(|shape| Some(shape.as_slice())).collect();
    OPERATOR.output_shape(attributes, &shapes)
}

#[test]
fn valid_call_is_accepted() {
    assert_eq!(output_shape(&attributes(&[]).unwrap(), &shapes()).unwrap(), [2, 12, 12]);
    let mut empty = shapes();
    (0..=5).for_each(|input| empty[input][0] = 0);
    assert_eq!(output_shape(&attributes(&[]).unwrap(), &empty).unwrap(), [0, 12, 12]);
}

#[test]
fn wrong_dimension_is_refused() {
    for input in 0..shapes().len() {
        for axis in 0..shapes()[input].len() {
            for change in [|dim: usize| dim + 1, |dim: usize| dim - 1, |dim: usize| dim * 3] {
                let mut shapes = shapes();
                shapes[input][axis] = change(shapes[input][axis]);
                let found = shapes[input].clone();
                // The first input with a shared dimension defines it, so a wrong size there is reported for the next
                // input.
                let agreed = match (input, axis) {
                    (0, 0) => Some(1),
                    (0, 2) if found[2].is_multiple_of(2) => Some(1),
                    (3, 1) => Some(4),
                    _ => None,
                };
                match output_shape(&attributes(&[]).unwrap(), &shapes) {
                    Err(Error::Shape { operator: "RoutedAggregatedAttention", input: name, .. }) => {
                        assert_eq!(name, OPERATOR.inputs[agreed.unwrap_or(input)].name, "{found:?}");
                    }
                    other => panic!("input {input}, {found:?}: {other:?}"),
                }
            }
        }
        let mut shapes = shapes();
        shapes[input].push(1);
        assert!(
            matches!(output_shape(&attributes(&[]).unwrap(), &shapes), Err(Error::Shape { .. })),
            "rank of input {input}"
        );
    }
}

#[test]
fn shape_error_names_expected_shape() {
    let mut shapes = shapes();
    shapes[9][2] = 7;
    let message = output_shape(&attributes(&[]).unwrap(), &shapes).unwrap_err().to_string();
    assert_eq!(
        message,
        "RoutedAggregatedAttention: input pooled_bias: expected shape (2, height * width = 12, pooled = 5), found (2, 12, 7)"
    );
}

#[test]
fn invalid_attributes_are_refused() {
    for (name, value) in [
        ("num_heads", 0),
        ("num_heads", -2),
        ("height", 0),
        ("width", i64::MAX),
        ("window", 0),
        ("window", 2),
        ("window", 1 << 20),
        ("window", -3),
    ] {
        match attributes(&[(name, value)]) {
            Err(Error::Attribute { attribute, found, .. }) => {
                assert_eq!((attribute, found), (name, value.to_string()));
            }
            other => panic!("{name} = {value}: {other:?}"),
        }
    }
    for (name, value) in [("num_heads", 5), ("height", 4), ("width", 3), ("window", 5)] {
        let found = output_shape(&attributes(&[(name, value)]).unwrap(), &shapes());
        assert!(matches!(found, Err(Error::Shape { .. })), "{name} = {value}: {found:?}");
    }
}

#[test]
fn shapes_with_unknown_dimensions_are_accepted() {
    let infer = |known: &[Vec<Option<usize>>]| {
        let known: Vec<Option<&[Option<usize>]>> = known.iter().map(|dims| Some(dims.as_slice())).collect();
        OPERATOR.infer(&attributes(&[]).unwrap(), &known).unwrap()
    };
    let nothing: Vec<Vec<Option<usize>>> = shapes().iter().map(|shape| vec![None; shape.len()]).collect();
    let batch = OutputDim::SameAs { input: 0, axis: 0 };
    assert_eq!(infer(&nothing), [batch, OutputDim::Size(12), OutputDim::Unknown]);
    // The output's width follows from any input that has the width of a head.
    for (input, axis, size) in [(0, 2, 12), (2, 2, 12), (4, 2, 12), (6, 1, 6), (10, 1, 6)] {
        let mut some = nothing.clone();
        some[input][axis] = Some(size);
        assert_eq!(infer(&some), [batch, OutputDim::Size(12), OutputDim::Size(12)], "input {input}");
    }
}

#[test]
fn missing_inputs_and_wrong_types_are_refused() {
    let shapes = shapes();
    let tensor = |i: usize, half: bool| Some((shapes[i].as_slice(), if half { DType::F16 } else { DType::F32 }));
    let mixed: Vec<_> = (0..12).map(|i| tensor(i, i != 5 && i != 7)).collect();
    assert_eq!(OPERATOR.validate(&attributes(&[]).unwrap(), &mixed).unwrap().0, DType::F16);
    for i in 0..12 {
        let mut inputs: Vec<_> = (0..12).map(|i| tensor(i, false)).collect();
        assert_eq!(OPERATOR.validate(&attributes(&[]).unwrap(), &inputs).unwrap(), (DType::F32, vec![2, 12, 12]));
        inputs[i] = tensor(i, true);
        // The first input defines T, so a wrong type there is reported for the second.
        let refused = OPERATOR.inputs[i.max(1)].name;
        match OPERATOR.validate(&attributes(&[]).unwrap(), &inputs) {
            Err(Error::Type { input, .. }) => assert_eq!(input, refused),
            other => panic!("type of input {i}: {other:?}"),
        }
        inputs[i] = None;
        assert!(
            matches!(OPERATOR.validate(&attributes(&[]).unwrap(), &inputs), Err(Error::InputCount { .. })),
            "input {i}"
        );
    }
}
