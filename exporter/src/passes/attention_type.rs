//! Routed attention in a narrower type than the model's.

use crate::graph::{Attribute, ElementType, Graph, Node, Value};
use moh_kernels::schema::{DOMAIN, ROUTED_ATTENTION};
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

/// Puts casts around the RoutedAttention nodes of a recorded graph; the gates stay float32.
pub fn set_attention_type(graph: &mut Graph, ty: AttentionType) {
    if ty == AttentionType::Model {
        return;
    }
    let mut known = BTreeSet::new();
    for mut node in std::mem::take(&mut graph.nodes) {
        let wide = graph.value(&node.outputs[0]);
        match wide.filter(|wide| is_attention(&node) && wide.ty != ElementType::BF16) {
            Some(wide) => {
                for (operand, name) in ROUTED_ATTENTION.inputs.iter().zip(&mut node.inputs) {
                    if operand.ty == moh_kernels::schema::ElementType::T {
                        *name = narrow(graph, &mut known, name);
                    }
                }
                let inner = Value { name: format!("{}/bf16", wide.name), ty: ElementType::BF16, ..wide.clone() };
                node.outputs = vec![inner.name.clone()];
                graph.nodes.push(node);
                graph.nodes.push(cast(&inner.name, &wide));
                graph.values.insert(inner.name.clone(), inner);
            }
            None => graph.nodes.push(node),
        }
    }
}

fn is_attention(node: &Node) -> bool {
    node.domain == DOMAIN && node.op_type == ROUTED_ATTENTION.name
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
