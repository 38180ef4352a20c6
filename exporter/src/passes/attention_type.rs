//! Routed attention in a narrower type than the model's.

use super::{AttentionStyle, Options, Pass};
use crate::call::Call;
use crate::error::Error;
use crate::graph::{Attribute, ElementType, Graph, Node, Value};
use moh_operators::{
    Definition, ElementType as OperandType, RoutedAggregatedAttention, RoutedAttention, RoutedCachedAttention,
};
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

/// The operators of attention that stay in the model's type.
const OTHERS: [&str; 2] = [RoutedCachedAttention::NAME, RoutedAggregatedAttention::NAME];

/// The pass.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct NarrowAttention {
    /// What routed attention is computed in: bf16 is faster on CPUs that multiply it, and needs onnxruntime with libmoh_ops. Attention to a
    /// cache in place stays in the model's type, and so does a ViT's attention to aggregated tokens.
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

    /// Puts casts around the nodes; the gates stay float32. A model in bfloat16 has what was asked for.
    fn run(&self, graph: &mut Graph) -> Result<(), Error> {
        if self.attention_type == AttentionType::Model {
            return Ok(());
        }
        let (mut known, mut other) = (BTreeSet::new(), None);
        for mut node in std::mem::take(&mut graph.nodes) {
            let operator = Call::of(graph, &node)?.map(|call| call.operator().name);
            let attention = operator.filter(|name| *name == RoutedAttention::NAME || OTHERS.contains(name));
            let wide = graph.value(&node.outputs[0]).filter(|wide| wide.ty != ElementType::BF16);
            let (Some(RoutedAttention::NAME), Some(wide)) = (attention, &wide) else {
                other = other.or(attention.filter(|_| wide.is_some()));
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
            graph.nodes.push(cast(&inner.name, wide));
            graph.values.insert(inner.name.clone(), inner);
        }
        match other {
            Some(found) if known.is_empty() => Err(Error::AttentionKind { found }),
            _ => Ok(()),
        }
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::{Cache, record};
    use moh_models::{Checkpoint, Model};
    use std::path::Path;

    /// What the pass makes of a golden model.
    fn narrowed(golden: &str, cache: Option<Cache>, dtype: ElementType) -> Result<Graph, Error> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(golden);
        let mut checkpoint = Checkpoint::open(&folder, None).unwrap();
        if let Some(cache) = cache {
            cache.put(&mut checkpoint);
        }
        let model = Model::load(&checkpoint, None).unwrap();
        let mut graph = record::record(&model, record::Options { dtype, opset: 21, ir_version: 10 })?;
        NarrowAttention { attention_type: AttentionType::Bf16 }.run(&mut graph).map(|()| graph)
    }

    /// Nodes of that operator, and those of them that compute in bfloat16.
    fn count(graph: &Graph, operator: &str) -> [usize; 2] {
        let is_narrow = |node: &&Node| graph.value(&node.outputs[0]).unwrap().ty == ElementType::BF16;
        let nodes = || graph.nodes.iter().filter(|node| node.op_type == operator);
        [nodes().count(), nodes().filter(is_narrow).count()]
    }

    #[test]
    fn other_attention_stays() {
        // Both kinds of attention, of its stages.
        let graph = narrowed("vit-tiny-b", None, ElementType::F32).unwrap();
        let [all, narrow] = count(&graph, RoutedAttention::NAME);
        assert!(all > 0 && narrow == all);
        let [all, narrow] = count(&graph, RoutedAggregatedAttention::NAME);
        assert!(all > 0 && narrow == 0);
    }

    #[test]
    fn a_model_with_other_attention_alone_is_refused() {
        let in_place = |dtype| narrowed("llama-moh-tiny", Some(Cache::InPlace), dtype);
        for dtype in [ElementType::F32, ElementType::F16] {
            let refused = in_place(dtype).err();
            assert!(
                matches!(refused, Some(Error::AttentionKind { found: RoutedCachedAttention::NAME })),
                "{refused:?}"
            );
        }
        assert!(in_place(ElementType::BF16).is_ok(), "it computes in bfloat16 anyhow");
        assert!(narrowed("llama-moh-tiny", None, ElementType::F16).is_ok());
    }
}
