//! The ONNX graph between recording and encoding: nodes, named weights that are still in their files, inputs and outputs.

use crate::quantize::{Matrix, Order, Piece};
use moh_models::Weight;
use moh_operators::{Body, DOMAIN};
use std::collections::BTreeMap;

/// Element type of a tensor in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum ElementType {
    F32,
    F16,
    BF16,
    I64,
    U8,
    I8,
    U4,
    I4,
    Bool,
}

impl ElementType {
    /// ONNX's `TensorProto.DataType`.
    pub fn onnx(self) -> i32 {
        match self {
            ElementType::F32 => 1,
            ElementType::U8 => 2,
            ElementType::I8 => 3,
            ElementType::I64 => 7,
            ElementType::Bool => 9,
            ElementType::F16 => 10,
            ElementType::BF16 => 16,
            ElementType::U4 => 21,
            ElementType::I4 => 22,
        }
    }

    /// Bytes of an element.
    pub fn size(self) -> usize {
        self.bits().div_ceil(8)
    }

    /// Bits of an element; those of 4 bits share bytes.
    pub fn bits(self) -> usize {
        match self {
            ElementType::I64 => 64,
            ElementType::F32 => 32,
            ElementType::F16 | ElementType::BF16 => 16,
            ElementType::U8 | ElementType::I8 | ElementType::Bool => 8,
            ElementType::U4 | ElementType::I4 => 4,
        }
    }

    /// A number as an element of this type, little-endian.
    pub fn bytes_of(self, v: f32) -> Vec<u8> {
        match self {
            ElementType::F32 => v.to_le_bytes().to_vec(),
            ElementType::F16 => half::f16::from_f32(v).to_le_bytes().to_vec(),
            ElementType::BF16 => half::bf16::from_f32(v).to_le_bytes().to_vec(),
            ElementType::I64 => (v as i64).to_le_bytes().to_vec(),
            ElementType::U8 | ElementType::U4 => vec![v as u8],
            ElementType::I8 | ElementType::I4 => (v as i8).to_le_bytes().to_vec(),
            ElementType::Bool => vec![u8::from(v != 0.0)],
        }
    }
}

impl std::fmt::Display for ElementType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            ElementType::F32 => "f32",
            ElementType::F16 => "f16",
            ElementType::BF16 => "bf16",
            ElementType::I64 => "i64",
            ElementType::U8 => "u8",
            ElementType::I8 => "i8",
            ElementType::U4 => "u4",
            ElementType::I4 => "i4",
            ElementType::Bool => "bool",
        })
    }
}

/// A dimension of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Dim {
    /// A number.
    Fixed(usize),
    /// A symbol, or a sum of symbols.
    Named(String),
    /// Known at run time only.
    Unknown,
}

impl std::fmt::Display for Dim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Dim::Fixed(n) => write!(f, "{n}"),
            Dim::Named(name) => f.write_str(name),
            Dim::Unknown => f.write_str("?"),
        }
    }
}

/// A typed value: a graph input or output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value {
    /// Its name.
    pub name: String,
    /// Element type.
    pub ty: ElementType,
    /// Dimensions.
    pub dims: Vec<Dim>,
}

/// A node's attribute.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum Attribute {
    Int(i64),
    Float(f32),
    Ints(Vec<i64>),
    String(&'static str),
    /// A tensor of one dimension and one element.
    Scalar(ElementType, f32),
    /// A float32 tensor without dimensions.
    Constant(f32),
}

/// A node.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// Operator name.
    pub op_type: &'static str,
    /// Operator domain; empty for ONNX's own.
    pub domain: &'static str,
    /// `<module path>/<operator>`, unique.
    pub name: String,
    /// Names of values.
    pub inputs: Vec<String>,
    /// Names of values.
    pub outputs: Vec<String>,
    /// Attributes in writing order.
    pub attributes: Vec<(&'static str, Attribute)>,
}

/// Where an initializer's bytes come from.
#[derive(Debug, Clone)]
pub enum Source {
    /// Little-endian elements.
    Bytes(Vec<u8>),
    /// A tensor of the checkpoint, converted to the initializer's type while it is written.
    Weight {
        /// The tensor.
        weight: Weight,
        /// Whether it is a matrix (out, in) to be written as (in, out).
        transposed: bool,
    },
    /// A part of what a matrix of the checkpoint is quantised to, while it is written.
    Quantized {
        /// The matrix.
        matrix: Matrix,
        /// The order in which it is written.
        order: Order,
        /// The part. Scales and zero points follow the integers of the same matrix.
        piece: Piece,
    },
}

/// A constant tensor.
#[derive(Debug, Clone)]
pub struct Initializer {
    /// Its name.
    pub name: String,
    /// Element type in the file.
    pub ty: ElementType,
    /// Dimensions.
    pub dims: Vec<usize>,
    /// Its elements.
    pub source: Source,
}

impl Initializer {
    /// Its size in the file.
    pub fn bytes(&self) -> usize {
        (self.dims.iter().product::<usize>() * self.ty.bits()).div_ceil(8)
    }
}

/// A model.
#[derive(Debug, Clone)]
pub struct Graph {
    /// The graph's name.
    pub name: String,
    /// ONNX operator-set version.
    pub opset: i64,
    /// ONNX IR version.
    pub ir_version: i64,
    /// Inputs.
    pub inputs: Vec<Value>,
    /// Outputs.
    pub outputs: Vec<Value>,
    /// Constants.
    pub initializers: Vec<Initializer>,
    /// Nodes in topological order.
    pub nodes: Vec<Node>,
    /// Type and dimensions of every value that a node makes, by name.
    pub values: BTreeMap<String, Value>,
    /// Bodies of the `ai.moh` operators that the nodes use.
    pub functions: Vec<Body>,
    /// Metadata properties.
    pub metadata: BTreeMap<String, String>,
}

impl Graph {
    /// Type and dimensions of a value: an input, an initializer, or what a node makes.
    pub fn value(&self, name: &str) -> Option<Value> {
        let initializer = |init: &Initializer| Value {
            name: init.name.clone(),
            ty: init.ty,
            dims: init.dims.iter().map(|&d| Dim::Fixed(d)).collect(),
        };
        self.values
            .get(name)
            .or_else(|| self.inputs.iter().find(|input| input.name == name))
            .cloned()
            .or_else(|| self.initializers.iter().find(|init| init.name == name).map(initializer))
    }

    /// The name of the constant of that type and shape, all elements of which are `number`; it is made where it is not there.
    pub(crate) fn constant(&mut self, ty: ElementType, dims: Vec<usize>, number: u8) -> String {
        let shape: Vec<String> = dims.iter().map(usize::to_string).collect();
        let name = match (&dims[..], number) {
            ([1, 1, 1, 1], 0) => format!("{DOMAIN}/zero.{ty}"),
            (_, 0) => format!("{DOMAIN}/zeros[{}].{ty}", shape.join(",")),
            _ => format!("{DOMAIN}/all{number}[{}].{ty}", shape.join(",")),
        };
        if !self.initializers.iter().any(|init| init.name == name) {
            let source = Source::Bytes(ty.bytes_of(number.into()).repeat(dims.iter().product()));
            self.initializers.push(Initializer { name: name.clone(), ty, dims, source });
        }
        name
    }

    /// The graph as text that a person can review: one line a value, weights by shape only.
    pub fn to_text(&self) -> String {
        let typed = |ty: ElementType, dims: &[Dim]| {
            let dims: Vec<String> = dims.iter().map(Dim::to_string).collect();
            format!("{ty}({})", dims.join(", "))
        };
        let attribute = |(name, value): &(&'static str, Attribute)| match value {
            Attribute::Int(v) => format!("{name}={v}"),
            Attribute::Float(v) => format!("{name}={v}"),
            Attribute::Ints(v) => format!("{name}={v:?}"),
            Attribute::String(v) => format!("{name}={v}"),
            Attribute::Scalar(ty, v) => format!("{name}={ty} {v}"),
            Attribute::Constant(v) => format!("{name}={} {v}", ElementType::F32),
        };
        let mut text = format!("graph {} (opset {}, ir {})\n", self.name, self.opset, self.ir_version);
        for (key, value) in &self.metadata {
            text += &format!("metadata {key} = {value}\n");
        }
        for input in &self.inputs {
            text += &format!("input {}: {}\n", input.name, typed(input.ty, &input.dims));
        }
        for init in &self.initializers {
            let dims: Vec<Dim> = init.dims.iter().map(|&d| Dim::Fixed(d)).collect();
            text += &format!("constant {}: {}\n", init.name, typed(init.ty, &dims));
        }
        for node in &self.nodes {
            let domain = if node.domain.is_empty() { String::new() } else { format!("{}.", node.domain) };
            let attributes: Vec<String> = node.attributes.iter().map(attribute).collect();
            let attributes =
                if attributes.is_empty() { String::new() } else { format!(" [{}]", attributes.join(", ")) };
            let shapes: Vec<String> =
                node.outputs.iter().filter_map(|o| self.value(o)).map(|v| typed(v.ty, &v.dims)).collect();
            let (outputs, inputs) = (node.outputs.join(", "), node.inputs.join(", "));
            text += &format!("{outputs}: {} = {domain}{}({inputs}){attributes}\n", shapes.join(", "), node.op_type);
        }
        for output in &self.outputs {
            text += &format!("output {}: {}\n", output.name, typed(output.ty, &output.dims));
        }
        for body in &self.functions {
            text +=
                &format!("function {}({}), {} nodes\n", body.operator.name, body.inputs.join(", "), body.nodes.len());
        }
        text
    }
}
