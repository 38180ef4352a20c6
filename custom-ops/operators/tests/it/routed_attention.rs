//! RoutedAttention.

use half::f16;
use moh_operators::{Attributes, DType, Data, Definition, Error, RoutedAttention, Tensor, Value};

/// (name, shape) of every input, in order.
type Shapes = Vec<(&'static str, Vec<usize>)>;

/// 2 sequences, 3 queries, 4 keys, 4 query heads, 2 KV heads, head_dim 5, value_dim 6.
fn shapes() -> Shapes {
    vec![
        ("query", vec![2, 3, 20]),
        ("key", vec![2, 4, 10]),
        ("value", vec![2, 4, 12]),
        ("head_gates", vec![2, 3, 4]),
        ("attn_bias", vec![2, 1, 1, 4]),
    ]
}

fn attribute(name: &str, change: &[(&str, Value)]) -> Option<Value> {
    let default = match name {
        "num_heads" => Value::Int(4),
        "kv_num_heads" => Value::Int(2),
        "scale" => Value::Float(0.5),
        _ => Value::Int(0),
    };
    Some(change.iter().find(|(changed, _)| *changed == name).map_or(default, |(_, value)| value.clone()))
}

fn attributes(change: &[(&str, Value)]) -> Result<Attributes, Error> {
    Attributes::read(RoutedAttention::OPERATOR, |def| attribute(def.name, change))
}

fn run(attributes: &Attributes, shapes: &Shapes) -> Result<Vec<f64>, Error> {
    let buffers: Vec<Vec<f32>> = shapes.iter().map(|(_, shape)| vec![0.5; shape.iter().product()]).collect();
    let pairs = shapes.iter().zip(&buffers);
    let inputs: Vec<_> = pairs.map(|((_, shape), buffer)| Some(Tensor { shape, data: Data::F32(buffer) })).collect();
    RoutedAttention::OPERATOR.reference(attributes, &inputs)
}

#[test]
fn valid_call_is_accepted() {
    assert_eq!(run(&attributes(&[]).unwrap(), &shapes()).unwrap().len(), 2 * 3 * 4 * 6);
    let mut without_bias = shapes();
    without_bias.pop();
    assert!(run(&attributes(&[]).unwrap(), &without_bias).is_ok());
}

#[test]
fn missing_attributes_and_wrong_attribute_types_are_refused() {
    for missing in ["num_heads", "kv_num_heads", "scale", "is_causal"] {
        let read =
            Attributes::read(RoutedAttention::OPERATOR, |def| attribute(def.name, &[]).filter(|_| def.name != missing));
        match read {
            Err(Error::Attribute { operator: "RoutedAttention", attribute, .. }) => assert_eq!(attribute, missing),
            other => panic!("{other:?}"),
        }
    }
    let error = attributes(&[("scale", Value::Int(1))]).unwrap_err();
    assert_eq!(error.to_string(), "RoutedAttention: attribute scale: expected Float, found Int(1)");
}

#[test]
fn attributes_out_of_range_are_refused() {
    let cases = [
        ("num_heads", Value::Int(0)),
        ("num_heads", Value::Int(-4)),
        ("num_heads", Value::Int(i64::MAX)),
        ("kv_num_heads", Value::Int(0)),
        ("kv_num_heads", Value::Int(3)),
        ("kv_num_heads", Value::Int(8)),
        ("scale", Value::Float(f32::NAN)),
        ("scale", Value::Float(f32::INFINITY)),
        ("is_causal", Value::Int(2)),
    ];
    for (name, value) in cases {
        match attributes(&[(name, value.clone())]) {
            Err(Error::Attribute { attribute, .. }) => assert_eq!(attribute, name, "{value:?}"),
            other => panic!("{name} = {value:?}: {other:?}"),
        }
    }
}

#[test]
fn wrong_number_of_inputs_is_refused() {
    for n in [0, 3] {
        let error = run(&attributes(&[]).unwrap(), &shapes()[..n].to_vec()).unwrap_err();
        let expected = Error::InputCount { operator: "RoutedAttention", expected: "4 to 5".to_owned(), found: n };
        assert_eq!(error, expected);
    }
    let mut six = shapes();
    six.push(("extra", vec![1]));
    assert!(matches!(run(&attributes(&[]).unwrap(), &six), Err(Error::InputCount { found: 6, .. })));
    let error = RoutedAttention::OPERATOR.reference(&attributes(&[]).unwrap(), &[None; 5]);
    assert!(matches!(error, Err(Error::InputCount { found: 0, .. })));
}

#[test]
fn shape_error_names_the_wrong_input() {
    let cases: [(usize, &[usize]); 27] = [
        (0, &[2, 60]),
        (0, &[2, 3, 4, 5]),
        (0, &[2, 3, 21]),
        (0, &[2, 3, 0]),
        (1, &[1, 4, 10]),
        (1, &[2, 4, 11]),
        (1, &[2, 4, 12]),
        (1, &[2, 4, 0]),
        (1, &[8, 10]),
        (1, &[2, 4, 2, 5]),
        (1, &[2, 3, 4, 5]),
        (2, &[1, 4, 12]),
        (2, &[2, 5, 12]),
        (2, &[2, 4, 13]),
        (2, &[2, 4, 0]),
        (2, &[2, 2, 4, 6]),
        (3, &[2, 3, 2]),
        (3, &[2, 4, 4]),
        (3, &[1, 3, 4]),
        (3, &[2, 12]),
        (4, &[5]),
        (4, &[4, 4]),
        (4, &[2, 1, 4]),
        (4, &[3, 1, 1, 1]),
        (4, &[1, 2, 1, 1]),
        (4, &[1, 1, 1, 1, 1]),
        (4, &[0]),
    ];
    for (i, shape) in cases {
        let mut shapes = shapes();
        shapes[i].1 = shape.to_vec();
        match run(&attributes(&[]).unwrap(), &shapes) {
            // A key of another rank may be reported for the value.
            Err(Error::Shape { input, .. }) if i == 1 && shape.len() == 4 => assert!(["key", "value"].contains(&input)),
            Err(Error::Shape { input, .. }) => assert_eq!(input, shapes[i].0, "{shape:?}"),
            other => panic!("{} {shape:?}: {other:?}", shapes[i].0),
        }
    }
}

#[test]
fn sizes_that_overflow_memory_are_refused_before_reading() {
    let huge = [(usize::MAX / 16).next_multiple_of(4), usize::MAX / 4 * 4];
    for width in huge {
        let shapes = [vec![0, 3, width], vec![0, 3, width / 4 * 2], vec![0, 3, width / 4 * 2], vec![0, 3, 4]];
        let inputs: Vec<_> = shapes.iter().map(|shape| Some(Tensor { shape, data: Data::F32(&[]) })).collect();
        let result = RoutedAttention::OPERATOR.reference(&attributes(&[]).unwrap(), &inputs);
        // With batch size 0 any width is accepted, unless its element count overflows.
        assert!(result.as_ref().is_ok_and(Vec::is_empty) || matches!(result, Err(Error::Shape { .. })), "{result:?}");
    }
    let shapes = [vec![1 << 40, 1 << 40, 4], vec![1 << 40, 1, 2], vec![1 << 40, 1, 2], vec![1 << 40, 1 << 40, 4]];
    let inputs: Vec<_> = shapes.iter().map(|shape| Some(Tensor { shape, data: Data::F32(&[]) })).collect();
    let result = RoutedAttention::OPERATOR.reference(&attributes(&[]).unwrap(), &inputs);
    assert!(matches!(result, Err(Error::Shape { .. })), "{result:?}");
}

/// The number of key elements, 2^64, overflows to 0; the output is small.
#[test]
fn oversized_keys_are_refused_when_the_output_is_small() {
    let shapes = [vec![1, 1, 20], vec![1, 1 << 63, 10], vec![1, 1 << 63, 12], vec![1, 1, 4]];
    let numbers = [0.5; 20];
    let data = [&numbers[..], &[], &[], &numbers[..4]];
    let inputs: Vec<_> =
        shapes.iter().zip(data).map(|(shape, data)| Some(Tensor { shape, data: Data::F32(data) })).collect();
    let result = RoutedAttention::OPERATOR.reference(&attributes(&[]).unwrap(), &inputs);
    assert!(matches!(result, Err(Error::Shape { input: "key", .. })), "{result:?}");
}

#[test]
fn mixed_element_types_are_refused() {
    let (wide, narrow) = (vec![0.5f32; 64], vec![f16::ONE; 64]);
    let dims = [vec![1, 2, 4], vec![1, 2, 2], vec![1, 2, 2], vec![1, 2, 4], vec![1]];
    let names = ["query", "key", "value", "head_gates", "attn_bias"];
    for odd in 0..5 {
        let data = |i: usize, n: usize| match i == odd {
            true => Data::F16(&narrow[..n]),
            false => Data::F32(&wide[..n]),
        };
        let pairs = dims.iter().enumerate();
        let inputs: Vec<_> =
            pairs.map(|(i, shape)| Some(Tensor { shape, data: data(i, shape.iter().product()) })).collect();
        match RoutedAttention::OPERATOR.reference(&attributes(&[]).unwrap(), &inputs) {
            // The query defines T, so a wrong type there is reported for the key.
            Err(Error::Type { input, .. }) => assert_eq!(input, if odd == 0 { "key" } else { names[odd] }),
            other => panic!("{}: {other:?}", names[odd]),
        }
    }
}

#[test]
fn buffers_shorter_or_longer_than_their_shape_are_refused() {
    let numbers = vec![0.5f32; 64];
    let dims = [vec![1, 2, 4], vec![1, 2, 2], vec![1, 2, 2], vec![1, 2, 4], vec![2, 1]];
    let names = ["query", "key", "value", "head_gates", "attn_bias"];
    for odd in 0..5 {
        for change in [-1isize, 1] {
            let len = |i: usize, n: usize| if i == odd { n.wrapping_add_signed(change) } else { n };
            let tensor = |(i, shape): (usize, &Vec<usize>)| len(i, shape.iter().product());
            let lens: Vec<usize> = dims.iter().enumerate().map(tensor).collect();
            let inputs: Vec<_> = dims
                .iter()
                .zip(&lens)
                .map(|(shape, &len)| Some(Tensor { shape, data: Data::F32(&numbers[..len]) }))
                .collect();
            match RoutedAttention::OPERATOR.reference(&attributes(&[]).unwrap(), &inputs) {
                Err(Error::Length { tensor, .. }) => assert_eq!(tensor, names[odd]),
                other => panic!("{} {change}: {other:?}", names[odd]),
            }
        }
    }
}

#[test]
fn error_messages_name_expected_and_found() {
    let mut wrong = shapes();
    wrong[2].1 = vec![2, 5, 12];
    let error = run(&attributes(&[]).unwrap(), &wrong).unwrap_err();
    let text = error.to_string();
    for part in ["RoutedAttention", "value", "kv_len = 4", "(2, 5, 12)"] {
        assert!(text.contains(part), "{text}");
    }
    let error = Error::Type { operator: "X", input: "y", expected: DType::F32, found: DType::BF16 };
    assert_eq!(error.to_string(), "X: input y: expected element type float32, found bfloat16");
}

/// A row of which all keys are masked is 0; one of which no score is a number is none either.
#[test]
fn masked_rows_are_zero_and_rows_without_numbers_are_not() {
    let attributes = attributes(&[]).unwrap();
    let run = |query: f32, bias: f32| {
        let mut data: Vec<Vec<f32>> = shapes().iter().map(|(_, shape)| vec![0.5; shape.iter().product()]).collect();
        data[0][..20].fill(query);
        data[4].fill(bias);
        let shapes = shapes();
        let inputs = shapes.iter().zip(&data).map(|((_, shape), data)| Some(Tensor { shape, data: Data::F32(data) }));
        RoutedAttention::OPERATOR.reference(&attributes, &inputs.collect::<Vec<_>>()).unwrap()
    };
    let is = |rows: &[f64], value: f64| rows.iter().all(|x| x.total_cmp(&value).is_eq());
    let masked = run(0.5, f32::NEG_INFINITY);
    assert!(is(&masked, 0.0), "{masked:?}");
    let spoilt = run(f32::NAN, 0.0);
    assert!(spoilt[..24].iter().all(|x| x.is_nan()) && is(&spoilt[24..], 0.25), "{spoilt:?}");
}
