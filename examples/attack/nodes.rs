//! One node of any operator, from a valid call that is spoilt in some places: what a model's author can get wrong, or want to.

use super::choices::Choices;
use super::onnx::{self, BFLOAT16, FLOAT, FLOAT16, INT8, INT32, INT64, UINT4, UINT8};
use moh_export::proto::{AttributeProto, GraphProto};
use moh_operators::{AttributeKind, DOMAIN, DType, OPERATORS, Value};
use moh_runtime::{Element, ElementType, Tensor, TensorData};

/// Bytes of constants, and numbers of inputs, of a node.
const MOST: usize = 1 << 16;

/// An input of a node.
#[derive(Debug, Clone)]
pub struct Operand {
    pub name: String,
    pub ty: i32,
    pub dims: Vec<i64>,
    /// In the file, and not given to a run.
    pub constant: bool,
}

/// A model's bytes, and what its inputs are given.
pub type Written = (Vec<u8>, Vec<(String, Tensor)>);

/// A node before it is written.
#[derive(Debug)]
pub struct Call {
    pub op_type: &'static str,
    pub domain: &'static str,
    pub attributes: Vec<AttributeProto>,
    pub operands: Vec<Operand>,
    pub output: i32,
}

fn number(ty: DType) -> i32 {
    match ty {
        DType::F32 => FLOAT,
        DType::F16 => FLOAT16,
        DType::BF16 => BFLOAT16,
        DType::U8 => UINT8,
        DType::I64 => INT64,
    }
}

/// A call of one of our operators.
///
/// # Panics
/// For an operator whose examples are malformed.
#[allow(clippy::unwrap_used)]
pub fn ours(choices: &mut Choices<'_>) -> Call {
    let operator = OPERATORS[usize::from(choices.byte()) % OPERATORS.len()];
    let examples = operator.examples().unwrap();
    let example = &examples[usize::from(choices.byte()) % examples.len()];
    let t = choices.of(&DType::ALL);
    let attributes = example.attributes.iter().map(|(def, value)| onnx::attribute(def.name, value.clone())).collect();
    let operand = |(operand, shape): (&moh_operators::Operand, &Vec<usize>)| Operand {
        name: operand.name.to_owned(),
        ty: number(operand.ty.dtype(t)),
        dims: shape.iter().map(|&d| d as i64).collect(),
        constant: false,
    };
    let operands = operator.inputs.iter().zip(&example.shapes).map(operand).collect();
    let output = number(operator.output_dtype(t));
    Call { op_type: operator.name, domain: DOMAIN, attributes, operands, output }
}

/// A call of an operator of others that reads a matrix in blocks of 4 or 8 bits.
pub fn blocks(choices: &mut Choices<'_>) -> Call {
    let operand =
        |name: &str, ty, dims: &[i64], constant| Operand { name: name.to_owned(), ty, dims: dims.to_vec(), constant };
    let ints = |list: &[(&str, i64)]| list.iter().map(|&(name, i)| onnx::attribute(name, Value::Int(i))).collect();
    let bits = choices.of(&[4, 8]);
    let per_byte = 8 / bits;
    match choices.byte() % 3 {
        0 => Call {
            op_type: "MatMulNBits",
            domain: "com.microsoft",
            attributes: ints(&[("K", 64), ("N", 6), ("bits", bits), ("block_size", 32)]),
            operands: vec![
                operand("A", FLOAT, &[2, 64], false),
                operand("B", UINT8, &[6, 2, 32 / per_byte], true),
                operand("scales", FLOAT, &[6, 2], true),
                operand("zero_points", UINT8, &[6, 2 / per_byte], true),
            ],
            output: FLOAT,
        },
        1 => Call {
            op_type: "GatherBlockQuantized",
            domain: "com.microsoft",
            attributes: ints(&[("gather_axis", 0), ("quantize_axis", 1), ("block_size", 32), ("bits", bits)]),
            operands: vec![
                operand("data", UINT8, &[6, 64 / per_byte], true),
                operand("indices", INT64, &[3], false),
                operand("scales", FLOAT, &[6, 2], true),
                operand("zero_points", UINT8, &[6, 2 / per_byte], true),
            ],
            output: FLOAT,
        },
        _ => Call {
            op_type: "DequantizeLinear",
            domain: "",
            attributes: ints(&[("axis", 0), ("block_size", 32)]),
            operands: vec![
                operand("x", if bits == 4 { UINT4 } else { UINT8 }, &[64, 6], true),
                operand("x_scale", FLOAT, &[2, 6], true),
                operand("x_zero_point", if bits == 4 { UINT4 } else { UINT8 }, &[2, 6], true),
            ],
            output: FLOAT,
        },
    }
}

/// Spoils a call in some places.
pub fn spoil(call: &mut Call, choices: &mut Choices<'_>) {
    for operand in &mut call.operands {
        operand.constant ^= choices.one_in(4);
    }
    for _ in 0..choices.byte() % 4 {
        let which = usize::from(choices.byte());
        match choices.byte() % 10 {
            0 if !call.attributes.is_empty() => {
                let index = which % call.attributes.len();
                call.attributes.remove(index);
            }
            1 | 2 if !call.attributes.is_empty() => {
                let index = which % call.attributes.len();
                let attribute = &mut call.attributes[index];
                let name = attribute.name.clone().unwrap_or_default();
                *attribute = onnx::attribute(&name, value(choices));
            }
            3 => call.attributes.push(onnx::attribute("unknown", value(choices))),
            4 if !call.operands.is_empty() => {
                let index = which % call.operands.len();
                match choices.byte() % 3 {
                    0 => call.operands.truncate(index),
                    1 => call.operands[index].name.clear(),
                    _ => {
                        let other = call.operands[index].clone();
                        call.operands.push(other);
                    }
                }
            }
            5 if !call.operands.is_empty() => {
                let index = which % call.operands.len();
                call.operands[index].ty = choices.of(&[FLOAT, FLOAT16, BFLOAT16, UINT8, INT8, INT32, INT64, UINT4]);
            }
            6.. if !call.operands.is_empty() => {
                let index = which % call.operands.len();
                let dims = &mut call.operands[index].dims;
                let axis = usize::from(choices.byte()) % (dims.len() + 1);
                match (choices.byte() % 4, axis < dims.len()) {
                    (0, true) => drop(dims.remove(axis)),
                    (1, _) => dims.insert(axis, choices.integer()),
                    (_, true) => dims[axis] = choices.integer(),
                    (_, false) => {}
                }
            }
            _ => {}
        }
    }
}

fn value(choices: &mut Choices<'_>) -> Value {
    match choices.of(&[AttributeKind::Int, AttributeKind::Int, AttributeKind::Float, AttributeKind::Ints]) {
        AttributeKind::Int => Value::Int(choices.integer()),
        AttributeKind::Float => Value::Float(choices.float()),
        AttributeKind::Ints => Value::Ints((0..choices.byte() % 8).map(|_| choices.integer()).collect()),
    }
}

fn bits(ty: i32) -> usize {
    match ty {
        UINT4 => 4,
        UINT8 | INT8 => 8,
        FLOAT16 | BFLOAT16 => 16,
        FLOAT | INT32 => 32,
        _ => 64,
    }
}

fn count(dims: &[i64]) -> Option<usize> {
    dims.iter().try_fold(1usize, |n, &d| n.checked_mul(usize::try_from(d).ok()?)).filter(|&n| n <= MOST)
}

impl Call {
    /// The model's bytes, and what its inputs are given; `None` where that is more than a run should take.
    pub fn model(&self, choices: &mut Choices<'_>) -> Option<Written> {
        let mut graph = GraphProto { name: Some("graph".to_owned()), ..GraphProto::default() };
        let mut given = Vec::new();
        for operand in self.operands.iter().filter(|operand| !operand.name.is_empty()) {
            let Operand { name, ty, dims, constant } = operand;
            if *constant {
                // What a lying file holds is short: as many bytes as the dimensions say, or fewer.
                let bytes = count(dims).map_or(16, |n| (n * bits(*ty)).div_ceil(8));
                let bytes = bytes.saturating_sub(if choices.one_in(16) { usize::from(choices.byte()) } else { 0 });
                let bytes = (0..bytes).map(|_| choices.byte()).collect();
                graph.initializer.push(onnx::constant(name, *ty, dims, bytes));
                continue;
            }
            // Sizes that only a run knows differ from those declared.
            let symbolic = choices.one_in(4);
            let shown: Vec<i64> = if symbolic { vec![-1; dims.len()] } else { dims.clone() };
            graph.input.push(onnx::declared(name, *ty, &shown));
            let count = count(dims)?;
            let shape: Vec<usize> = dims.iter().map(|&d| d as usize).collect();
            let data = match *ty {
                FLOAT => f32::wrap((0..count).map(|_| choices.float()).collect()),
                INT64 => i64::wrap((0..count).map(|_| choices.integer()).collect()),
                UINT8 => u8::wrap((0..count).map(|_| choices.byte()).collect()),
                FLOAT16 => TensorData::zeros(ElementType::F16, count),
                _ => TensorData::zeros(ElementType::F32, count),
            };
            given.push((name.clone(), Tensor::from_data(shape, data).ok()?));
        }
        let inputs = self.operands.iter().map(|operand| operand.name.clone()).collect();
        graph.node.push(onnx::node(self.op_type, self.domain, inputs, self.attributes.clone()));
        graph.output.push(onnx::of_any_shape("y", self.output));
        Some((onnx::model(graph), given))
    }
}
