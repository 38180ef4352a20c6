//! Routed attention in a narrower type than the model's.

use super::{AttentionStyle, Options, Pass};
use crate::call::Call;
use crate::error::Error;
use crate::graph::{Attribute, ElementType, Graph, Node, Value};
use moh_operators::{Definition, ElementType as OperandType, RoutedAttention};
use std::collections::BTreeSet;

/// What routed attention is computed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum AttentionType {
    /// The model's type.
    #[default]
    Model,
    /// bfloat16 products, with float32 sums: about half the time where the CPU has such instructions.
    Bf16,
}

/// The pass.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct NarrowAttention {
    /// What routed attention is computed in: bf16 is faster on CPUs that multiply it, and needs onnxruntime with libmoh_ops.
    #[arg(long, value_enum, default_value_t)]
    pub attention_type: AttentionType,
}

impl Pass for NarrowAttention {
    fn check(&self, all: &Options) -> Result<(), Error> {
        match (self.attention_type, all.bodies.attention) {
            (AttentionType::Bf16, AttentionStyle::Portable) => Err(Error::AttentionType),
            _ => Ok(()),
        }
    }

    /// Puts casts around the nodes; the gates stay float32.
    fn run(&self, graph: &mut Graph) -> Result<(), Error> {
        if self.attention_type == AttentionType::Model {
            return Ok(());
        }
        let mut known = BTreeSet::new();
        for mut node in std::mem::take(&mut graph.nodes) {
            let attention = Call::of(graph, &node)?.is_some_and(|call| call.operator() == RoutedAttention::OPERATOR);
            let wide = graph.value(&node.outputs[0]).filter(|wide| attention && wide.ty != ElementType::BF16);
            let Some(wide) = wide else {
                graph.nodes.push(node);
                continue;
            };
            for (operand, name) in RoutedAttention::INPUTS.iter().zip(&mut node.inputs) {
                if operand.ty == OperandType::T {
                    *name = narrow(graph, &mut known, name);
                }
            }
            let inner = Value { name: format!("{}/bf16", wide.name), ty: ElementType::BF16, ..wide.clone() };
            node.outputs = vec![inner.name.clone()];
            graph.nodes.push(node);
            graph.nodes.push(cast(&inner.name, &wide));
            graph.values.insert(inner.name.clone(), inner);
        }
        Ok(())
    }
}

/// The name of `name` in bf16, which is cast once.
fn narrow(graph: &mut Graph, known: &mut BTreeSet<String>, name: &str) -> String {
    let Some(value) = graph.value(name) else { return name.to_owned() };
    let narrow = Value { name: format!("{name}/bf16"), ty: ElementType::BF16, ..value };
    if known.insert(narrow.name.clone()) {
        graph.nodes.push(cast(name, &narrow));
        graph.values.insert(narrow.name.clone(), narrow.clone());
    }
    narrow.name
}

fn cast(from: &str, to: &Value) -> Node {
    Node {
        op_type: "Cast",
        domain: "",
        name: format!("{}/Cast", to.name),
        inputs: vec![from.to_owned()],
        outputs: vec![to.name.clone()],
        attributes: vec![("to", Attribute::Int(i64::from(to.ty.onnx())))],
    }
}
