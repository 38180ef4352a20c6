//! The operators' bodies in standard ONNX operators: what a runtime without our library runs.

use super::{Definition, Operator};
use crate::routed_mlp::Activation;

/// What a body must be written for, because it can ask for it neither in its inputs nor in its attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Variant {
    /// The operator's inputs are in their layout of higher rank: keys as in a KV cache, weights per head.
    pub per_head: bool,
    /// How many of the optional last inputs are present.
    pub optional_inputs: usize,
    /// Some node is causal. A body without it leaves the mask out.
    pub causal: bool,
    /// The value of the attribute that chooses between bodies, where the operator has one.
    pub kind: i64,
    /// The body must not rest on how a runtime reduces infinities: somewhat slower, the same everywhere.
    pub portable: bool,
}

impl Variant {
    /// Of a node that has these optional inputs, where no more than their number matters.
    pub(crate) fn taking<V>(optional: &[Option<V>]) -> Variant {
        let optional_inputs = optional.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
        Variant { optional_inputs, ..Variant::default() }
    }

    /// The variant whose body serves nodes of both, if there is one: such a body takes the optional inputs of either, and constants
    /// stand in for them where a node has none.
    pub fn common(self, other: Variant) -> Option<Variant> {
        let alike = (self.per_head, self.kind, self.portable) == (other.per_head, other.kind, other.portable);
        alike.then_some(Variant {
            optional_inputs: self.optional_inputs.max(other.optional_inputs),
            causal: self.causal || other.causal,
            ..self
        })
    }
}

/// The value of a body node's attribute.
#[derive(Debug, Clone, PartialEq)]
pub enum BodyValue {
    /// An integer.
    Int(i64),
    /// A float32 tensor without dimensions. (Some tools read a Constant's `value_float` as float64.)
    Scalar(f32),
    /// A list of integers.
    Ints(Vec<i64>),
    /// A string.
    Text(&'static str),
    /// The operator's own attribute of that name.
    Attribute(&'static str),
}

/// A node of a body.
#[derive(Debug, Clone, PartialEq)]
pub struct BodyNode {
    /// Standard ONNX operator.
    pub op_type: &'static str,
    /// Names of its inputs: the operator's inputs, or earlier outputs.
    pub inputs: Vec<String>,
    /// Name of its output; the first of TopK's, whose indices are `{output}_indices`.
    pub output: String,
    /// Its attributes.
    pub attributes: Vec<(&'static str, BodyValue)>,
}

impl BodyNode {
    /// Names of all its outputs.
    pub fn outputs(&self) -> Vec<String> {
        let indices = (self.op_type == "TopK").then(|| indices(&self.output));
        [Some(self.output.clone()), indices].into_iter().flatten().collect()
    }
}

fn indices(top_k: &str) -> String {
    format!("{top_k}_indices")
}

/// A body: nodes in order; the last one makes the operator's output. Valid at opsets 18 to 24; with ONNX's Gelu from 20 on.
#[derive(Debug, Clone)]
pub struct Body {
    /// The operator that it defines.
    pub operator: &'static Operator,
    /// Names of the inputs that it takes: the operator's, without the optional ones where the variant has none.
    pub inputs: Vec<&'static str>,
    /// Nodes in topological order.
    pub nodes: Vec<BodyNode>,
}

/// Writes a body node by node.
pub(crate) struct Builder {
    body: Body,
}

impl Builder {
    pub(crate) fn new<D: Definition>(variant: Variant) -> Builder {
        let taken = D::OPERATOR.required_inputs() + variant.optional_inputs;
        let inputs = D::INPUTS.iter().take(taken).map(|input| input.name).collect();
        Builder { body: Body { operator: D::OPERATOR, inputs, nodes: Vec::new() } }
    }

    /// Whether the body takes the input.
    pub(crate) fn takes(&self, input: &str) -> bool {
        self.body.inputs.contains(&input)
    }

    /// A node with attributes; returns its output's name.
    pub(crate) fn with(
        &mut self,
        op_type: &'static str,
        inputs: &[&str],
        output: &str,
        attributes: &[(&'static str, BodyValue)],
    ) -> String {
        self.body.nodes.push(BodyNode {
            op_type,
            inputs: inputs.iter().map(|&s| s.to_owned()).collect(),
            output: output.to_owned(),
            attributes: attributes.to_vec(),
        });
        output.to_owned()
    }

    /// A node without attributes.
    pub(crate) fn node(&mut self, op_type: &'static str, inputs: &[&str], output: &str) -> String {
        self.with(op_type, inputs, output, &[])
    }

    /// A 1-D int64 constant.
    pub(crate) fn ints(&mut self, values: &[i64], output: &str) -> String {
        self.with("Constant", &[], output, &[("value_ints", BodyValue::Ints(values.to_vec()))])
    }

    /// A float constant.
    pub(crate) fn float(&mut self, value: f32, output: &str) -> String {
        self.with("Constant", &[], output, &[("value", BodyValue::Scalar(value))])
    }

    /// The operator's integer attribute as a scalar.
    pub(crate) fn int_attribute(&mut self, name: &'static str, output: &str) -> String {
        self.with("Constant", &[], output, &[("value_int", BodyValue::Attribute(name))])
    }

    /// A scalar int64 constant.
    pub(crate) fn int(&mut self, value: i64, output: &str) -> String {
        self.with("Constant", &[], output, &[("value_int", BodyValue::Int(value))])
    }

    /// The `k` largest of the last axis, a 1-D value: their values and indices.
    pub(crate) fn top_k(&mut self, x: &str, k: &str, output: &str) -> (String, String) {
        (self.with("TopK", &[x, k], output, &[("axis", BodyValue::Int(-1))]), indices(output))
    }

    /// The operator's float attribute as a scalar.
    pub(crate) fn float_attribute(&mut self, name: &'static str, output: &str) -> String {
        self.with("Constant", &[], output, &[("value_float", BodyValue::Attribute(name))])
    }

    pub(crate) fn transpose(&mut self, x: &str, perm: [i64; 4], output: &str) -> String {
        self.with("Transpose", &[x], output, &[("perm", BodyValue::Ints(perm.to_vec()))])
    }

    pub(crate) fn concat(&mut self, parts: &[&str], output: &str) -> String {
        self.with("Concat", parts, output, &[("axis", BodyValue::Int(0))])
    }

    /// The function of `x`; for SwiGLU that of the gate.
    pub(crate) fn activation(&mut self, activation: Activation, x: &str, output: &str) -> String {
        match activation {
            Activation::Relu => self.node("Relu", &[x], output),
            Activation::Gelu => self.node("Gelu", &[x], output),
            Activation::GeluTanh => self.with("Gelu", &[x], output, &[("approximate", BodyValue::Text("tanh"))]),
            Activation::Silu | Activation::SwiGlu => {
                let gate = self.node("Sigmoid", &[x], "sigmoid");
                self.node("Mul", &[x, &gate], output)
            }
        }
    }

    pub(crate) fn cast_f32(&mut self, x: &str, output: &str) -> String {
        self.with("Cast", &[x], output, &[("to", BodyValue::Int(ONNX_FLOAT))])
    }

    pub(crate) fn finish(self) -> Body {
        self.body
    }
}

/// `TensorProto.DataType.FLOAT`.
const ONNX_FLOAT: i64 = 1;
