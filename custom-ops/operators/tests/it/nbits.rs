//! The operators with quantised weights.

use moh_conformance::{Buffer, Call, examples};
use moh_operators::nbits::Format;
use moh_operators::routed_mlp::Activation;
use moh_operators::{
    Attributes, DType, Definition, Error, LinearActivationNBits, LinearNBits, Operator, RoutedCombineNBits,
    RoutedMlpNBits, RoutedProjectionNBits, Value,
};

const ALL: [&Operator; 5] = [
    RoutedProjectionNBits::OPERATOR,
    RoutedCombineNBits::OPERATOR,
    RoutedMlpNBits::OPERATOR,
    LinearNBits::OPERATOR,
    LinearActivationNBits::OPERATOR,
];

fn attributes(operator: &'static Operator, changed: (&str, i64)) -> Result<Attributes, Error> {
    let valid = |name: &str| match name {
        "bits" => 4,
        "block_size" => 32,
        "accuracy_level" => 0,
        "activation" => Activation::Silu as i64,
        _ => 3,
    };
    let value = |name: &str| if name == changed.0 { changed.1 } else { valid(name) };
    Attributes::read(operator, |def| Some(Value::Int(value(def.name))))
}

/// The example with all inputs.
fn complete(operator: &'static Operator) -> Call {
    let mut all = examples(operator, DType::F32).into_iter();
    all.find(|call| call.inputs.len() == operator.inputs.len()).unwrap()
}

fn error(call: &Call, change: impl FnOnce(&mut Call)) -> Error {
    let mut call = call.clone();
    change(&mut call);
    call.operator().reference(&call.attributes, &call.tensors()).unwrap_err()
}

#[test]
fn attributes_out_of_range_are_refused() {
    for operator in ALL {
        for (name, values) in
            [("bits", &[0, 2, 5, 16][..]), ("block_size", &[0, 8, 24, 512]), ("accuracy_level", &[-1, 1, 2, 3, 5])]
        {
            for &value in values {
                match attributes(operator, (name, value)) {
                    Err(Error::Attribute { attribute, .. }) => assert_eq!(attribute, name),
                    other => panic!("{operator:?} {name} = {value}: {other:?}"),
                }
            }
        }
        for (name, value) in [("bits", 8), ("block_size", 16), ("block_size", 256), ("accuracy_level", 4)] {
            assert!(attributes(operator, (name, value)).is_ok(), "{operator:?} {name} = {value}");
        }
    }
}

/// Each dimension of each input but x in turn, and the rank.
#[test]
fn shape_error_names_the_wrong_input() {
    for operator in ALL {
        let call = complete(operator);
        for (i, operand) in operator.inputs.iter().enumerate().skip(1) {
            let shape = call.inputs[i].0.clone();
            let mut wrong: Vec<Vec<usize>> = vec![shape[1..].to_vec(), [&[1], &shape[..]].concat()];
            for axis in 0..shape.len() {
                let mut shape = shape.clone();
                shape[axis] += 1;
                wrong.push(shape);
            }
            for shape in wrong {
                match error(&call, |call| call.inputs[i].0 = shape.clone()) {
                    // Another number of rows agrees with the weight, and is refused where the next input has not as many.
                    Error::Shape { input, .. } if operand.name.ends_with("weight") => {
                        assert!(operator.inputs[i..].iter().any(|later| later.name == input), "{operator:?} {shape:?}");
                    }
                    Error::Shape { input, .. } => assert_eq!(input, operand.name, "{operator:?} {shape:?}"),
                    other => panic!("{operator:?} {} {shape:?}: {other}", operand.name),
                }
            }
        }
    }
}

#[test]
fn a_block_that_does_not_divide_is_refused() {
    for operator in ALL {
        let error = error(&complete(operator), |call| call.inputs[0].0[2] = 40 * 3);
        let message = error.to_string();
        assert!(message.contains("a multiple of block_size = "), "{message}");
    }
}

#[test]
fn a_weight_of_another_shape_is_refused_with_the_expected_one() {
    let call = complete(RoutedProjectionNBits::OPERATOR);
    let message = error(&call, |call| call.inputs[1].0 = vec![12, 3, 32]).to_string();
    assert_eq!(
        message,
        "RoutedProjectionNBits: input weight: expected shape (3 * head_dim, 3, 16) for 4 bits in blocks of 32, \
         found (12, 3, 32)"
    );
}

#[test]
fn a_dense_layer_takes_rows_of_any_shape() {
    let mut call = complete(LinearNBits::OPERATOR);
    // A gate and a residual of rows have x's dimensions, numbers have not.
    for (input, number) in [(4, 1.5), (5, 0.5)] {
        call.inputs[input] = (vec![1], Buffer::new(call.dtype, &[number]));
    }
    let (width, expected) = (call.inputs[0].0[2], call.expected());
    for shape in [vec![10, width], vec![1, 5, 2, width]] {
        let mut call = call.clone();
        call.inputs[0].0 = shape.clone();
        assert_eq!(call.expected(), expected);
        let shapes: Vec<Option<&[usize]>> = call.inputs.iter().map(|(shape, _)| Some(&shape[..])).collect();
        let found = call.operator().output_shape(&call.attributes, &shapes).unwrap();
        assert_eq!(found, [&shape[..shape.len() - 1], &[13]].concat());
    }
    for shape in [vec![], vec![10, 0]] {
        let message = error(&call, |call| call.inputs[0].0 = shape.clone()).to_string();
        assert!(message.starts_with("LinearNBits: input x: expected shape (.., width), found ("), "{message}");
    }
    let message = error(&call, |call| call.inputs[1].0[1] = 2).to_string();
    assert!(message.contains("expected shape (out_width, 3, 16) for 4 bits in blocks of 32"), "{message}");
}

#[test]
fn a_dense_layer_has_no_function_of_two_columns() {
    for activation in [4, 5, -1] {
        match attributes(LinearActivationNBits::OPERATOR, ("activation", activation)) {
            Err(Error::Attribute { operator, attribute, .. }) => {
                assert_eq!((operator, attribute), ("LinearActivationNBits", "activation"));
            }
            other => panic!("{activation}: {other:?}"),
        }
    }
}

#[test]
fn optional_inputs_of_an_mlp_come_in_pairs() {
    let call = complete(RoutedMlpNBits::OPERATOR);
    for found in [7, 9] {
        let error = error(&call, |call| call.inputs.truncate(found));
        let pair = if found == 7 { "fc2_bias beside fc1_bias" } else { "fc2_zero_points beside fc1_zero_points" };
        assert_eq!(error.to_string(), format!("RoutedMLPNBits: expected {pair}, found {found} inputs"));
    }
    // As many inputs as a pair makes, but halves of two.
    let mut shapes: Vec<Option<&[usize]>> = call.inputs.iter().map(|(shape, _)| Some(&shape[..])).collect();
    (shapes[6], shapes[9]) = (None, None);
    let error = call.operator().output_shape(&call.attributes, &shapes).unwrap_err();
    assert_eq!(error.to_string(), "RoutedMLPNBits: expected fc1_bias beside fc2_bias, found 8 inputs");
}

#[test]
fn output_follows_from_partly_known_shapes() {
    let known = |shape: &[i64]| shape.iter().map(|&dim| usize::try_from(dim).ok()).collect::<Vec<_>>();
    let attributes = attributes(RoutedProjectionNBits::OPERATOR, ("bits", 4)).unwrap();
    let shapes = [known(&[-1, -1, -1]), known(&[12, 2, 16]), known(&[-1, -1]), known(&[-1, -1, 3])];
    let shapes: Vec<_> = shapes.iter().map(|shape| Some(&shape[..])).collect();
    let output = RoutedProjectionNBits::OPERATOR.infer(&attributes, &shapes).unwrap();
    assert_eq!(output[2], moh_operators::shape::OutputDim::Size(12));
}

/// Bytes, scales and zero points written out by hand.
#[test]
fn values_are_unpacked_low_half_first() {
    let attributes = |bits: i64, block: i64| {
        let value = |name: &str| match name {
            "num_heads" => 1,
            "bits" => bits,
            "block_size" => block,
            _ => 0,
        };
        Attributes::read(RoutedProjectionNBits::OPERATOR, |def| Some(Value::Int(value(def.name)))).unwrap()
    };
    // One output; x picks value `at` of the row.
    let value = |bits: usize, weight: &[u8], scales: &[f32], zero_points: Option<&[u8]>, at: usize| {
        let blocks = scales.len();
        let mut call = Call::new(attributes(bits as i64, 16), DType::F32);
        let one_hot: Vec<f32> = (0..16 * blocks).map(|k| if k == at { 1.0 } else { 0.0 }).collect();
        call.input(&[1, 1, 16 * blocks], &one_hot);
        call.bytes(&[1, blocks, 2 * bits], weight);
        call.input(&[1, blocks], scales);
        call.gates(&[1, 1, 1], &[1.0]);
        if let Some(packed) = zero_points {
            call.input(&[1], &[0.0]);
            call.bytes(&[1, packed.len()], packed);
        }
        call.expected()[0]
    };
    let mut four = [0x88; 24];
    (four[0], four[8], four[17]) = (0x2f, 0x70, 0x1e);
    let scales = [0.5, 2.0, -1.0];
    for (at, symmetric, zero_points) in
        [(0, 3.5, 6.0), (1, -3.0, -0.5), (16, -16.0, -30.0), (17, -2.0, -16.0), (34, -6.0, -9.0), (35, 7.0, 4.0)]
    {
        assert_eq!(value(4, &four, &scales, None, at), symmetric, "value {at}");
        // Zero points 3, 15 and 5; the last half is to spare.
        assert_eq!(value(4, &four, &scales, Some(&[0xf3, 0xc5]), at), zero_points, "value {at}");
    }
    let mut eight = [128; 32];
    (eight[0], eight[17]) = (255, 0);
    for (at, symmetric, zero_points) in [(0, 63.5, 127.0), (17, -256.0, -510.0), (18, 0.0, -254.0)] {
        assert_eq!(value(8, &eight, &scales[..2], None, at), symmetric, "value {at}");
        assert_eq!(value(8, &eight, &scales[..2], Some(&[1, 255]), at), zero_points, "value {at}");
    }
}

#[test]
fn sizes_of_a_format() {
    let four = Format { bits: 4, block: 32 };
    assert_eq!((four.bytes(), four.zero_point_bytes(3), four.zero_point(), four.zero_point_byte()), (16, 2, 8, 0x88));
    let eight = Format { bits: 8, block: 16 };
    assert_eq!(
        (eight.bytes(), eight.zero_point_bytes(3), eight.zero_point(), eight.zero_point_byte()),
        (16, 3, 128, 128)
    );
}
