//! Whether our kernels work on this machine: every ai.moh operator, on its own examples, in a runtime, against its f64 reference.

use crate::error::{Error, Result};
use crate::measure::trace;
use crate::random::Random;
use moh_operators::{Attributes, DOMAIN, DType, Data, ElementType, OPERATORS, Operator, Value, tolerance};
use moh_runtime::{Model, Options, RuntimeChoice, Tensor};
use prost::Message;
use std::path::Path;
use tract_onnx::pb::attribute_proto::AttributeType;
use tract_onnx::pb::tensor_proto::DataType;
use tract_onnx::pb::tensor_shape_proto::{Dimension, dimension};
use tract_onnx::pb::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorShapeProto, TypeProto, ValueInfoProto,
    type_proto,
};

/// What came of the examples of one operator.
#[derive(Debug, Clone, PartialEq)]
pub struct Checked {
    /// The operator's name.
    pub operator: &'static str,
    /// Calls that were made.
    pub calls: usize,
    /// Whether our kernel ran in all of them: the runtime's profile, or its list of nodes, names the operator.
    pub ran: bool,
    /// Whether the library has no kernel for this processor, because the runtime is as fast without one.
    pub left: bool,
    /// The largest error of an element, as a share of what is allowed: above 1 is wrong.
    pub error: f64,
}

impl Checked {
    /// Whether all is as it should be.
    pub fn is_right(&self) -> bool {
        (self.ran || self.left) && self.error <= 1.0
    }
}

/// Runs every operator in float32 on the CPU, in the runtime that `options` choose; models and profiles go to `folder`.
///
/// # Errors
/// [`Error::Runtime`] where the runtime cannot be loaded, or cannot load or run a model of the operator; [`Error::Write`].
pub fn check(options: &Options, folder: &Path) -> Result<Vec<Checked>> {
    OPERATORS.iter().map(|operator| check_operator(operator, options, folder)).collect()
}

fn check_operator(operator: &'static Operator, options: &Options, folder: &Path) -> Result<Checked> {
    let mut checked = Checked { operator: operator.name, calls: 0, ran: true, left: false, error: 0.0 };
    let refused = |e: moh_operators::Error| Error::Setting(e.to_string());
    for (stream, example) in (0..).zip(operator.examples().map_err(refused)?) {
        let inputs = inputs(operator, &example.shapes, stream);
        let tensors: Vec<_> = inputs.iter().map(|input| Some(input.tensor())).collect();
        let expected = operator.reference(&example.attributes, &tensors).map_err(refused)?;
        let (found, ran) = match run(&example.attributes, &inputs, options, folder) {
            Err(Error::Runtime(moh_runtime::Error::Load { reason, .. }))
                if operator.may_be_left && reason.contains(&format!("{DOMAIN}:{}(", operator.name)) =>
            {
                return Ok(Checked { ran: false, left: true, ..checked });
            }
            result => result?,
        };
        checked.calls += 1;
        checked.ran &= ran;
        let largest = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        let allowed = tolerance::call_output(&example.attributes, DType::F32, largest);
        checked.error = checked.error.max(error(&found, &expected, allowed));
    }
    Ok(checked)
}

/// The largest error, as a share of what is allowed.
fn error(found: &[f32], expected: &[f64], allowed: f64) -> f64 {
    if found.len() != expected.len() {
        return f64::INFINITY;
    }
    let distance = |(&found, &expected): (&f32, &f64)| (f64::from(found) - expected).abs() / allowed;
    // A NaN is an infinite error.
    found.iter().zip(expected).map(distance).fold(0.0, |most, x| if x.is_nan() { f64::INFINITY } else { most.max(x) })
}

struct Input {
    name: &'static str,
    shape: Vec<usize>,
    numbers: Numbers,
}

enum Numbers {
    F32(Vec<f32>),
    U8(Vec<u8>),
    I64(Vec<i64>),
}

impl Input {
    fn tensor(&self) -> moh_operators::Tensor<'_> {
        let data = match &self.numbers {
            Numbers::F32(x) => Data::F32(x),
            Numbers::U8(x) => Data::U8(x),
            Numbers::I64(x) => Data::I64(x),
        };
        moh_operators::Tensor { shape: &self.shape, data }
    }

    fn value(&self) -> Result<moh_runtime::Value> {
        let shape = self.shape.clone();
        Ok(match &self.numbers {
            Numbers::F32(x) => Tensor::new(shape, x.clone())?.into(),
            Numbers::U8(x) => Tensor::new(shape, x.clone())?.into(),
            Numbers::I64(x) => Tensor::new(shape, x.clone())?.into(),
        })
    }

    fn data_type(&self) -> DataType {
        match self.numbers {
            Numbers::F32(_) => DataType::Float,
            Numbers::U8(_) => DataType::Uint8,
            Numbers::I64(_) => DataType::Int64,
        }
    }
}

/// Random numbers from -1 to 1, bytes, and positions from 0 to 5; a third of the gates is 0.
fn inputs(operator: &'static Operator, shapes: &[Vec<usize>], stream: u64) -> Vec<Input> {
    let mut random = Random::new(0, stream);
    let mut input = |(operand, shape): (&moh_operators::Operand, &Vec<usize>)| {
        let is_gate = operand.ty == ElementType::Float32;
        let mut number = |_| match is_gate && random.uniform() < 1.0 / 3.0 {
            true => 0.0,
            false => (2.0 * random.uniform() - 1.0) as f32,
        };
        let count = 0..shape.iter().product::<usize>();
        let numbers = match operand.ty {
            ElementType::T | ElementType::Float32 => Numbers::F32(count.map(&mut number).collect()),
            ElementType::Uint8 => Numbers::U8(count.map(|_| (256.0 * random.uniform()) as u8).collect()),
            ElementType::Int64 => Numbers::I64(count.map(|_| (6.0 * random.uniform()) as i64).collect()),
        };
        Input { name: operand.name, shape: shape.clone(), numbers }
    };
    operator.inputs.iter().zip(shapes).map(&mut input).collect()
}

/// The output of a model of one node, and whether that node ran as such.
fn run(attributes: &Attributes, inputs: &[Input], options: &Options, folder: &Path) -> Result<(Vec<f32>, bool)> {
    let path = folder.join("model.onnx");
    std::fs::write(&path, model(attributes, inputs)).map_err(|source| Error::Write { path: path.clone(), source })?;
    let traced = options.runtime == RuntimeChoice::Ort;
    if traced && attributes.operator().may_be_left {
        // onnxruntime complains on the terminal where it refuses a model that it was to profile.
        Model::load(&path, options)?;
    }
    let profile = traced.then(|| folder.join("profile"));
    let mut model = Model::load(&path, &Options { profile, ..options.clone() })?;
    let mut values = Vec::with_capacity(inputs.len());
    for input in inputs {
        values.push((input.name.to_owned(), input.value()?));
    }
    let name = attributes.operator().name;
    let mut ran = false;
    let outputs = model.run_timed(values, &[], &mut |_, op_type, _| ran |= op_type == name)?;
    if traced {
        let runs = trace::read(&model.end_profiling()?)?;
        ran = runs.iter().flatten().any(|node| node.op_type == name);
    }
    let found = outputs.first().map(|output| output.as_slice::<f32>().map(<[f32]>::to_vec)).transpose()?;
    Ok((found.unwrap_or_default(), ran))
}

/// The bytes of a model of one node: `found` = the operator of these inputs.
fn model(attributes: &Attributes, inputs: &[Input]) -> Vec<u8> {
    const OUTPUT: &str = "found";
    let operator = attributes.operator();
    let node = NodeProto {
        name: "node".to_owned(),
        op_type: operator.name.to_owned(),
        domain: DOMAIN.to_owned(),
        input: inputs.iter().map(|input| input.name.to_owned()).collect(),
        output: vec![OUTPUT.to_owned()],
        attribute: attributes.iter().map(|(definition, value)| attribute(definition.name, value)).collect(),
        ..NodeProto::default()
    };
    let shapes: Vec<Option<&[usize]>> = inputs.iter().map(|input| Some(&input.shape[..])).collect();
    // The operator's own examples have a shape.
    let shape = operator.output_shape(attributes, &shapes).map(|shape| shape.to_vec()).unwrap_or_default();
    let graph = GraphProto {
        name: "doctor".to_owned(),
        node: vec![node],
        input: inputs.iter().map(|input| value_info(input.name, input.data_type(), &input.shape)).collect(),
        output: vec![value_info(OUTPUT, DataType::Float, &shape)],
        ..GraphProto::default()
    };
    let opset = |domain: &str, version| OperatorSetIdProto { domain: domain.to_owned(), version };
    let proto = ModelProto {
        ir_version: 8,
        opset_import: vec![opset("", 17), opset(DOMAIN, operator.since)],
        graph: Some(graph),
        ..ModelProto::default()
    };
    proto.encode_to_vec()
}

fn attribute(name: &str, value: &Value) -> AttributeProto {
    let proto = AttributeProto { name: name.to_owned(), ..AttributeProto::default() };
    let with = |ty: AttributeType, proto| AttributeProto { r#type: ty as i32, ..proto };
    match value {
        Value::Int(number) => with(AttributeType::Int, AttributeProto { i: *number, ..proto }),
        Value::Float(number) => with(AttributeType::Float, AttributeProto { f: *number, ..proto }),
        Value::Ints(numbers) => with(AttributeType::Ints, AttributeProto { ints: numbers.clone(), ..proto }),
    }
}

fn value_info(name: &str, data_type: DataType, shape: &[usize]) -> ValueInfoProto {
    let dim =
        |&size: &usize| Dimension { value: Some(dimension::Value::DimValue(size as i64)), ..Dimension::default() };
    let shape = TensorShapeProto { dim: shape.iter().map(dim).collect() };
    let tensor = type_proto::Tensor { elem_type: data_type as i32, shape: Some(shape) };
    let ty = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..TypeProto::default() };
    ValueInfoProto { name: name.to_owned(), r#type: Some(ty), ..ValueInfoProto::default() }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_operator_is_right_in_tract() {
        let folder = tempfile::tempdir().unwrap();
        let options = Options { runtime: RuntimeChoice::Tract, threads: Some(1), ..Options::default() };
        let checked = check(&options, folder.path()).unwrap();
        assert_eq!(checked.len(), OPERATORS.len());
        assert!(checked.iter().all(|checked| checked.calls > 0 && checked.is_right()), "{checked:?}");
    }

    #[test]
    fn wrong_numbers_are_seen() {
        let error = |found: &[f32]| error(found, &[1.0, 2.0], 1e-5);
        assert_eq!(error(&[1.0, 2.0]), 0.0);
        assert!(error(&[1.0, 2.1]) > 1.0);
        assert!(error(&[f32::NAN, 2.0]).is_infinite() && error(&[1.0]).is_infinite());
    }
}
