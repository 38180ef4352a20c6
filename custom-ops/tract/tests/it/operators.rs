//! Parsing, type inference and execution of the operators in tract, against the f64 reference.

use crate::support::{Attention, numbers, onnx, tensor};
use half::f16;
use moh_operators::{Attributes, Data, Definition, RoutedAttention, Tensor as Borrowed, tolerance};
use tract_onnx::pb::attribute_proto::AttributeType;
use tract_onnx::prelude::*;

/// Batch size 2, 5 queries, 7 keys, 4 query heads, 2 KV heads, query width 3, value width 5.
struct Case {
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    gates: Vec<f32>,
    bias: Vec<f32>,
}

const SHAPES: [&[usize]; 5] = [&[2, 5, 12], &[2, 2, 7, 3], &[2, 2, 7, 5], &[2, 5, 4], &[2, 1, 1, 7]];

fn case() -> Case {
    let mut gates = numbers(40, 4);
    for (i, gate) in gates.iter_mut().enumerate() {
        if i % 3 == 0 {
            *gate = 0.0;
        }
    }
    let mut bias = vec![0.0; 14];
    bias[7..9].fill(f32::NEG_INFINITY);
    Case { query: numbers(120, 1), key: numbers(84, 2), value: numbers(140, 3), gates, bias }
}

fn attributes(attention: &Attention) -> Attributes {
    Attributes::read(RoutedAttention::OPERATOR, |def| attention.value(def.name)).unwrap()
}

fn reference(attention: &Attention, case: &Case) -> Vec<f64> {
    let data = [&case.query, &case.key, &case.value, &case.gates, &case.bias];
    let inputs: Vec<Option<Borrowed<'_>>> =
        SHAPES.iter().zip(data).map(|(shape, data)| Some(Borrowed { shape, data: Data::F32(data) })).collect();
    RoutedAttention::OPERATOR.reference(&attributes(attention), &inputs).unwrap()
}

fn assert_close(found: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        assert!((f64::from(found) - expected).abs() <= tolerance, "element {i}: expected {expected}, found {found}");
    }
    assert!(expected.iter().any(|x| x.abs() > 0.1), "the reference is not all zeros");
}

#[test]
fn output_equals_the_reference_in_f32() {
    let attention = Attention::default();
    let model = onnx().parse(&attention.model(), None).unwrap().model.into_optimized().unwrap();
    let plan = model.into_runnable().unwrap();
    let case = case();
    let data = [&case.query, &case.key, &case.value, &case.gates, &case.bias];
    let inputs = SHAPES.iter().zip(data).map(|(shape, data)| tensor(shape, data).into_tvalue()).collect();
    let output = plan.run(inputs).unwrap().remove(0);
    assert_eq!(output.shape(), [2, 5, 20]);
    let found = output.try_as_plain_ram().unwrap().as_slice::<f32>().unwrap().to_vec();
    assert_close(&found, &reference(&attention, &case), tolerance::TRACT_OPERATOR_F32);
}

#[test]
fn output_equals_the_reference_in_f16_with_several_threads() {
    let attention = Attention { f16: true, causal: true, ..Attention::default() };
    let model = onnx().parse(&attention.model(), None).unwrap().model.into_optimized().unwrap();
    let options = RunOptions { executor: Some(moh_tract::executor(3).unwrap()), ..RunOptions::default() };
    let plan = model.into_runnable_with_options(&options).unwrap();
    let rounded = |x: Vec<f32>| x.into_iter().map(|x| f16::from_f32(x).to_f32()).collect::<Vec<f32>>();
    let Case { query, key, value, gates, bias } = case();
    let case = Case { query: rounded(query), key: rounded(key), value: rounded(value), gates, bias };
    let half = |x: &[f32]| x.iter().map(|&x| f16::from_f32(x)).collect::<Vec<f16>>();
    let inputs = tvec![
        tensor(SHAPES[0], &half(&case.query)).into_tvalue(),
        tensor(SHAPES[1], &half(&case.key)).into_tvalue(),
        tensor(SHAPES[2], &half(&case.value)).into_tvalue(),
        tensor(SHAPES[3], &case.gates).into_tvalue(),
        tensor(SHAPES[4], &half(&case.bias)).into_tvalue(),
    ];
    let output = plan.run(inputs).unwrap().remove(0);
    assert_eq!(output.datum_type(), DatumType::F16);
    let output = output.cast_to::<f32>().unwrap().into_owned();
    let found = output.try_as_plain_ram().unwrap().as_slice::<f32>().unwrap().to_vec();
    assert_close(&found, &reference(&attention, &case), tolerance::TRACT_OPERATOR_F16);
}

#[test]
fn symbolic_dimensions_survive_optimisation() {
    let model = onnx().parse(&Attention::default().model(), None).unwrap().model.into_optimized().unwrap();
    let fact = model.output_fact(0).unwrap();
    let dims: Vec<String> = fact.shape.dims().iter().map(ToString::to_string).collect();
    assert_eq!(dims, ["batch", "sequence", "20"]);
    assert_eq!(fact.datum_type, DatumType::F32);
}

#[test]
fn one_plan_runs_different_lengths() {
    let attention = Attention { bias: false, ..Attention::default() };
    let plan = onnx().parse(&attention.model(), None).unwrap().model.into_optimized().unwrap().into_runnable().unwrap();
    for (batch, q_len, kv_len) in [(1, 1, 1), (3, 2, 9), (1, 4, 4)] {
        let inputs = tvec![
            tensor(&[batch, q_len, 12], &numbers(batch * q_len * 12, 1)).into_tvalue(),
            tensor(&[batch, 2, kv_len, 3], &numbers(batch * kv_len * 6, 2)).into_tvalue(),
            tensor(&[batch, 2, kv_len, 5], &numbers(batch * kv_len * 10, 3)).into_tvalue(),
            tensor(&[batch, q_len, 4], &vec![1f32; batch * q_len * 4]).into_tvalue(),
        ];
        assert_eq!(plan.run(inputs).unwrap()[0].shape(), [batch, q_len, 20]);
    }
}

#[test]
fn model_with_local_functions_loads() {
    let mut model = Attention::default().model();
    model.functions.push(crate::support::function());
    assert!(onnx().parse(&model, None).unwrap().model.into_optimized().is_ok());
}

/// The full error message of parsing and optimising.
fn refusal(model: &tract_onnx::pb::ModelProto) -> String {
    let typed = onnx().parse(model, None).and_then(|parsed| parsed.model.into_optimized());
    format!("{:#}", typed.expect_err("the model must be refused"))
}

#[test]
fn operator_of_another_domain_is_refused() {
    let mut model = Attention::default().model();
    model.graph.as_mut().unwrap().node[0].domain = "com.example".to_owned();
    let message = refusal(&model);
    assert!(
        message.contains("expected an operator of domain ai.moh, found one of domain \"com.example\""),
        "{message}"
    );
    assert!(message.contains("attention_0"), "the node is named: {message}");
}

#[test]
fn missing_attribute_is_refused() {
    for name in ["num_heads", "kv_num_heads", "scale", "is_causal"] {
        let mut model = Attention::default().model();
        model.graph.as_mut().unwrap().node[0].attribute.retain(|attribute| attribute.name != name);
        let message = refusal(&model);
        assert!(message.contains(&format!("attribute {name}: expected")), "{message}");
        assert!(message.contains("attention_0"), "the node is named: {message}");
    }
}

#[test]
fn attribute_of_another_type_is_refused() {
    for (r#type, found) in [(AttributeType::Ints, "Ints([])"), (AttributeType::String, "nothing, or another type")] {
        let mut model = Attention::default().model();
        for attribute in &mut model.graph.as_mut().unwrap().node[0].attribute {
            if attribute.name == "scale" {
                attribute.r#type = r#type as i32;
            }
        }
        let message = refusal(&model);
        assert!(message.contains(&format!("attribute scale: expected Float, found {found}")), "{message}");
    }
}

#[test]
fn error_for_invalid_inputs_names_the_node() {
    let cases: [(Attention, &str); 4] = [
        (Attention { heads: 5, ..Attention::default() }, "kv_num_heads: expected a divisor of num_heads = 5"),
        (Attention { gate_heads: 3, ..Attention::default() }, "input head_gates: expected shape"),
        (Attention { gates_f16: true, ..Attention::default() }, "input head_gates: expected element type float32"),
        (Attention { inputs: 3, ..Attention::default() }, "input head_gates is missing"),
    ];
    for (attention, expected) in cases {
        let message = refusal(&attention.model());
        assert!(message.contains(expected), "expected {expected:?} in: {message}");
        assert!(message.contains("attention_0"), "the node is named: {message}");
    }
}

#[test]
fn wrong_shapes_at_run_time_are_refused() {
    let attention = Attention { bias: false, value_total: "value_total", ..Attention::default() };
    let plan = onnx().parse(&attention.model(), None).unwrap().model.into_optimized().unwrap().into_runnable().unwrap();
    let inputs = tvec![
        tensor(&[1, 2, 12], &numbers(24, 1)).into_tvalue(),
        tensor(&[1, 2, 3, 3], &numbers(18, 2)).into_tvalue(),
        tensor(&[1, 2, 4, 5], &numbers(40, 3)).into_tvalue(),
        tensor(&[1, 2, 4], &[1f32; 8]).into_tvalue(),
    ];
    let message = format!("{:#}", plan.run(inputs).expect_err("key and value have different lengths"));
    assert!(message.contains("input value: expected shape (batch = 1, kv_len = 3"), "{message}");
    assert!(message.contains("attention_0"), "the node is named: {message}");
}

#[test]
fn set_threads_changes_the_default_executor() {
    moh_tract::set_threads(2).unwrap();
    let executor = tract_onnx::tract_core::internal::multithread::current_tract_executor();
    assert!(format!("{executor:?}").contains("MultiThread"));
    moh_tract::set_threads(1).unwrap();
    let executor = tract_onnx::tract_core::internal::multithread::current_tract_executor();
    assert!(format!("{executor:?}").contains("SingleThread"));
}
