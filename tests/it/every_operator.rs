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

/// An example's inputs: name, shape and elements.
fn inputs(call: &Call) -> Vec<(&'static str, &[usize], Data<'_>)> {
    let given = call.inputs.iter().map(|(shape, buffer)| (&shape[..], buffer.data()));
    let names = call.operator().inputs.iter().map(|operand| operand.name);
    names.zip(given).map(|(name, (shape, data))| (name, shape, data)).collect()
}

/// The type of a model's input.
pub(crate) fn element_type(dtype: DType) -> ElementType {
    match dtype {
        DType::F32 => ElementType::F32,
        DType::U8 => ElementType::U8,
        DType::I64 => ElementType::I64,
        DType::F16 | DType::BF16 => panic!("no model has inputs of {dtype}"),
    }
}

/// A model's input.
pub(crate) fn tensor(shape: &[usize], data: Data<'_>) -> Tensor {
    let shape = shape.to_vec();
    let tensor = match data {
        Data::F32(x) => Tensor::new(shape, x.to_vec()),
        Data::U8(x) => Tensor::new(shape, x.to_vec()),
        Data::I64(x) => Tensor::new(shape, x.to_vec()),
        Data::F16(_) | Data::BF16(_) => panic!("no model has inputs of {}", data.dtype()),
    };
    tensor.unwrap()
}

/// A model of one node.
fn graph(call: &Call) -> Graph {
    let value = |name: &str, dims: &[usize], dtype: DType| {
        let dims = dims.iter().map(|&size| Dim::Fixed(size)).collect();
        Value { name: name.to_owned(), ty: element_type(dtype), dims }
    };
    let (operator, inputs) = (call.operator(), inputs(call));
    let shapes: Vec<Option<&[usize]>> = inputs.iter().map(|(_, shape, _)| Some(*shape)).collect();
    Graph {
        name: "example".to_owned(),
        opset: 21,
        ir_version: 10,
        inputs: inputs.iter().map(|(name, shape, data)| value(name, shape, data.dtype())).collect(),
        outputs: vec![value("found", &operator.output_shape(&call.attributes, &shapes).unwrap(), DType::F32)],
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
    let given = inputs(call).into_iter().map(|(name, shape, data)| (name.to_owned(), tensor(shape, data).into()));
    let found = floats(&model.run(given)?[0].to_tensor()?);
    if options.profile.is_none() {
        return Ok((found, None));
    }
    let events = std::fs::read_to_string(model.end_profiling()?).unwrap();
    let events: serde_json::Value = serde_json::from_str(&events).unwrap();
    Ok((found, Some(events.as_array().unwrap().iter().any(|event| event["args"]["op_name"] == call.operator().name))))
}

/// What candle computes; `None` for an operator that families do not use.
fn in_candle(call: &Call) -> Option<Vec<f32>> {
    let tensor = |(_, shape, data): (&str, &[usize], Data<'_>)| match data {
        Data::F32(x) => candle_core::Tensor::from_slice(x, shape, &Device::Cpu),
        Data::U8(x) => candle_core::Tensor::from_slice(x, shape, &Device::Cpu),
        Data::I64(x) => candle_core::Tensor::from_slice(x, shape, &Device::Cpu),
        other => panic!("no model has inputs of {}", other.dtype()),
    };
    if !moh_models::operators::NAMES.contains(&call.operator().name) {
        return None;
    }
    let tensors: Vec<_> = inputs(call).into_iter().map(|input| tensor(input).unwrap()).collect();
    let computed = moh_models::operators::compute(&call.attributes, &tensors.iter().map(Some).collect::<Vec<_>>());
    let computed = computed.unwrap_or_else(|error| panic!("candle, {:?}: {error}", call.attributes));
    Some(computed.output.flatten_all().unwrap().to_vec1().unwrap())
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
        let allowed = tolerance::call_output(&call.attributes, DType::F32, largest);
        if let Some(found) = in_candle(&call) {
            table.add("candle", name, error(&format!("candle, {:?}", call.attributes), &found, &expected), allowed);
        }
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
                let ours = style == AttentionStyle::Routed
                    && !moh_cpu::is_left_to_body(
                        call.operator(),
                        moh_cpu::Precision::Highest,
                        cfg!(target_os = "linux"),
                    );
                assert_eq!(ran, options.profile.map(|_| ours), "{what}: our kernel ran");
                table.add(way, &format!("{name} {style:?}"), error(&what, &found, &expected), allowed);
            }
        }
    }
    table.finish();
}
