//! Every registered operator, on its own examples: candle, and every runtime with our kernel, with the body that files carry and with
//! the body inlined, against the f64 reference.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use crate::mixed_bodies::attribute;
use candle_core::Device;
use moh::{Table, floats, passes, runtimes};
use moh_conformance::{Call, examples};
use moh_export::encode::encode;
use moh_export::graph::{Dim, Graph, Node, Value};
use moh_export::passes::Gates;
use moh_export::weights::Plan;
use moh_export::{AttentionStyle, ElementType};
use moh_operators::{DOMAIN, DType, Data, OPERATORS, tolerance};
use moh_runtime::{Model, Options, Tensor};
use std::collections::BTreeMap;
use std::path::Path;

/// An example's inputs: name, shape and numbers.
fn inputs(call: &Call) -> Vec<(&'static str, &[usize], &[f32])> {
    let input = |(operand, (shape, buffer))| match buffer {
        Data::F32(numbers) => (operand, shape, numbers),
        other => panic!("expected float32, found {other:?}"),
    };
    let given = call.inputs.iter().map(|(shape, buffer)| (&shape[..], buffer.data()));
    call.operator().inputs.iter().map(|operand| operand.name).zip(given).map(input).collect()
}

/// A model of one node.
fn graph(call: &Call) -> Graph {
    let value = |name: &str, dims: &[usize]| {
        let dims = dims.iter().map(|&size| Dim::Fixed(size)).collect();
        Value { name: name.to_owned(), ty: ElementType::F32, dims }
    };
    let (operator, inputs) = (call.operator(), inputs(call));
    let shapes: Vec<Option<&[usize]>> = inputs.iter().map(|(_, shape, _)| Some(*shape)).collect();
    Graph {
        name: "example".to_owned(),
        opset: 21,
        ir_version: 10,
        inputs: inputs.iter().map(|(name, shape, _)| value(name, shape)).collect(),
        outputs: vec![value("found", &operator.output_shape(&call.attributes, &shapes).unwrap())],
        initializers: vec![],
        nodes: vec![Node {
            op_type: operator.name,
            domain: DOMAIN,
            name: "node".to_owned(),
            inputs: inputs.iter().map(|&(name, ..)| name.to_owned()).collect(),
            outputs: vec!["found".to_owned()],
            attributes: call.attributes.iter().map(|(def, value)| (def.name, attribute(value))).collect(),
        }],
        values: BTreeMap::new(),
        functions: vec![],
        metadata: BTreeMap::new(),
    }
}

/// The output, and whether a node of that operator ran: known where there is a profile.
fn run(path: &Path, options: &Options, call: &Call) -> Result<(Vec<f32>, Option<bool>), moh_runtime::Error> {
    let mut model = Model::load(path, options)?;
    let given = inputs(call)
        .into_iter()
        .map(|(name, shape, numbers)| (name.to_owned(), Tensor::new(shape.to_vec(), numbers.to_vec()).unwrap().into()));
    let found = floats(&model.run(given)?[0].to_tensor()?);
    if options.profile.is_none() {
        return Ok((found, None));
    }
    let events = std::fs::read_to_string(model.end_profiling()?).unwrap();
    let events: serde_json::Value = serde_json::from_str(&events).unwrap();
    Ok((found, Some(events.as_array().unwrap().iter().any(|event| event["args"]["op_name"] == call.operator().name))))
}

fn in_candle(call: &Call) -> Vec<f32> {
    let tensor = |(_, shape, numbers): (&str, &[usize], &[f32])| {
        candle_core::Tensor::from_slice(numbers, shape, &Device::Cpu).unwrap()
    };
    let tensors: Vec<_> = inputs(call).into_iter().map(tensor).collect();
    let computed = moh_models::operators::compute(&call.attributes, &tensors.iter().map(Some).collect::<Vec<_>>());
    let computed = computed.unwrap_or_else(|error| panic!("candle, {:?}: {error}", call.attributes));
    computed.output.flatten_all().unwrap().to_vec1().unwrap()
}

/// The largest error. Panics where an element that the reference has as 0 is not exactly that.
fn error(what: &str, found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len(), "{what}");
    let pairs = || found.iter().map(|&x| f64::from(x)).zip(expected.iter().copied());
    assert!(pairs().all(|(found, expected)| expected != 0.0 || found == 0.0), "{what}: not exactly 0");
    pairs().fold(0.0, |max, (a, b)| if (a - b).is_nan() { f64::INFINITY } else { f64::max(max, (a - b).abs()) })
}

#[test]
fn every_runtime_follows_the_reference() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    let mut table = Table::new("Every operator against the f64 reference");
    for call in OPERATORS.iter().flat_map(|operator| examples(operator, DType::F32)) {
        let (name, expected) = (call.operator().name, call.expected());
        let largest = expected.iter().fold(0.0f64, |max, x| max.max(x.abs()));
        let allowed = tolerance::operator_output(DType::F32) * (largest / 4.0).max(1.0);
        table.add(
            "candle",
            name,
            error(&format!("candle, {:?}", call.attributes), &in_candle(&call), &expected),
            allowed,
        );
        for style in [AttentionStyle::Routed, AttentionStyle::Portable] {
            let mut graph = graph(&call);
            moh_export::passes::run(&mut graph, &passes(style, Gates::Hidden)).unwrap();
            std::fs::write(&path, encode(&graph, &Plan::new(&graph), "none").unwrap()).unwrap();
            for (way, mut options) in runtimes() {
                let what = format!("{way}, {style:?}, {:?}", call.attributes);
                if way == "onnxruntime + library" {
                    options.profile = Some(folder.path().join("profile"));
                }
                let (found, ran) = run(&path, &options, &call).unwrap_or_else(|error| panic!("{what}: {error}"));
                assert_eq!(ran, options.profile.map(|_| style == AttentionStyle::Routed), "{what}: our kernel ran");
                table.add(way, &format!("{name} {style:?}"), error(&what, &found, &expected), allowed);
            }
        }
    }
    table.finish();
}
