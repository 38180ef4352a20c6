//! Dense layers in the place of RoutedProjection and RoutedCombine, where these would only leave out what nothing reads: attention does
//! not read the queries of heads that are off, and its output is 0 there. Attention skips those heads as before.
//!
//! For GPUs, whose libraries multiply whole matrices better than our kernels gather rows. Unlike RoutedCombine's, the blocks of heads that
//! are off meet their weights: 0 times an infinite or NaN weight is NaN.

use super::Pass;
use crate::error::Error;
use crate::graph::{Graph, Initializer, Node, Source, Value};
use moh_operators::{
    DOMAIN, Definition, RoutedAggregatedAttention, RoutedAttention, RoutedCachedAttention, RoutedCombine,
    RoutedProjection, operator,
};
use std::collections::{BTreeMap, BTreeSet};

/// How projections into heads and out of them are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum HeadStyle {
    /// As ai.moh.RoutedProjection and ai.moh.RoutedCombine, which skip heads that are off: faster on CPUs.
    #[default]
    Routed,
    /// As dense layers beside attention: faster on GPUs. Experts stay routed.
    Dense,
}

/// The pass.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct HeadLayers {
    /// How projections into heads and out of them are written [default: routed, or as --for says].
    #[arg(id = "head-layers", long = "head-layers", value_enum, value_name = "STYLE")]
    pub style: Option<HeadStyle>,
}

impl Pass for HeadLayers {
    fn run(&self, graph: &mut Graph) -> Result<(), Error> {
        if self.style == Some(HeadStyle::Dense) {
            write_dense(graph);
        }
        Ok(())
    }
}

fn write_dense(graph: &mut Graph) {
    let found = replaceable(graph);
    let mut names: BTreeSet<String> = graph.nodes.iter().map(|node| node.name.clone()).collect();
    let mut weights = BTreeSet::new();
    for (i, node) in std::mem::take(&mut graph.nodes).into_iter().enumerate() {
        if found.contains(&i) {
            weights.insert(node.inputs[1].clone());
            write(graph, &mut names, node);
        } else {
            graph.nodes.push(node);
        }
    }
    let read: BTreeSet<&String> = graph.nodes.iter().flat_map(|node| &node.inputs).collect();
    graph.initializers.retain(|init| !weights.contains(&init.name) || read.contains(&init.name));
}

/// Which nodes dense layers can replace.
fn replaceable(graph: &Graph) -> BTreeSet<usize> {
    let mut readers: BTreeMap<&String, Vec<&Node>> = BTreeMap::new();
    let mut makers: BTreeMap<&String, &Node> = BTreeMap::new();
    for node in &graph.nodes {
        node.inputs.iter().for_each(|name| readers.entry(name).or_default().push(node));
        makers.extend(node.outputs.iter().map(|name| (name, node)));
    }
    let skips = |attention: &Node, layer: &Node| is_attention(attention) && gates(attention) == gates(layer);
    let is_replaceable = |node: &&Node| match node.op_type {
        RoutedProjection::NAME => {
            let output = &node.outputs[0];
            // As queries only: zeros among keys and values count.
            let as_queries = |reader: &&Node| reader.inputs.iter().rposition(|name| name == output) == Some(0);
            let readers = readers.get(output).map_or(&[][..], Vec::as_slice);
            let is_shown = graph.outputs.iter().any(|shown| shown.name == *output);
            !is_shown && readers.iter().all(|reader| as_queries(reader) && skips(reader, node))
        }
        RoutedCombine::NAME => makers.get(&node.inputs[0]).is_some_and(|maker| skips(maker, node)),
        _ => false,
    };
    let is_routed = |node: &&Node| node.domain == DOMAIN && has_one_matrix(graph, node);
    let found = graph.nodes.iter().enumerate().filter(|(_, node)| is_routed(node) && is_replaceable(node));
    found.map(|(i, _)| i).collect()
}

/// Whether it is attention that skips heads: its first input are the queries.
fn is_attention(node: &Node) -> bool {
    let names = [RoutedAttention::NAME, RoutedCachedAttention::NAME, RoutedAggregatedAttention::NAME];
    node.domain == DOMAIN && names.contains(&node.op_type)
}

fn gates(node: &Node) -> Option<&String> {
    let operator = operator(node.op_type)?;
    node.inputs.get(operator.inputs.iter().position(|operand| operand.name == "head_gates")?)
}

/// Whether the weight is one matrix of the checkpoint, (out, in), and not one for each head.
fn has_one_matrix(graph: &Graph, node: &Node) -> bool {
    let weight = graph.initializers.iter().find(|init| Some(&init.name) == node.inputs.get(1));
    weight.is_some_and(|init| matches!(init.source, Source::Weight { transposed: false, .. }) && init.dims.len() == 2)
}

/// Writes the dense layer, whose output keeps its name. `names` are those of all nodes.
fn write(graph: &mut Graph, names: &mut BTreeSet<String>, node: Node) {
    let module = node.name.rsplit_once('/').map_or("", |(module, _)| module);
    let [x, weight, _gates, bias @ ..] = &node.inputs[..] else { return graph.nodes.push(node) };
    let Some(weight) = transposed(graph, weight) else { return graph.nodes.push(node) };
    let mut standard = |op_type: &'static str, inputs: Vec<String>, output: Option<String>| {
        let mut name = format!("{module}/{op_type}");
        while !names.insert(name.clone()) {
            name += "_1";
        }
        let outputs = vec![output.unwrap_or_else(|| name.clone())];
        Node { op_type, domain: "", name, inputs, outputs, attributes: vec![] }
    };
    let output = node.outputs[0].clone();
    let Some(bias) = bias.first() else {
        graph.nodes.push(standard("MatMul", vec![x.clone(), weight], Some(output)));
        return;
    };
    let product = standard("MatMul", vec![x.clone(), weight], None);
    let value = product.outputs[0].clone();
    if let Some(like) = graph.value(&output) {
        graph.values.insert(value.clone(), Value { name: value.clone(), ..like });
    }
    let sum = standard("Add", vec![value, bias.clone()], Some(output));
    graph.nodes.extend([product, sum]);
}

/// The name of the same matrix as (in, out).
fn transposed(graph: &mut Graph, name: &str) -> Option<String> {
    let stored = graph.initializers.iter().find(|init| init.name == name)?;
    let Source::Weight { weight, .. } = &stored.source else { return None };
    let (weight, ty) = (weight.clone(), stored.ty);
    let dims: Vec<usize> = stored.dims.iter().rev().copied().collect();
    let is_same = |init: &Initializer| {
        let is_transposed =
            matches!(&init.source, Source::Weight { weight: w, transposed: true } if w.name() == weight.name());
        is_transposed && init.ty == ty && init.dims == dims
    };
    let mut name = format!("{name}.T");
    while let Some(taken) = graph.initializers.iter().find(|init| init.name == name) {
        if is_same(taken) {
            return Some(name);
        }
        name += "_1";
    }
    let source = Source::Weight { weight, transposed: true };
    graph.initializers.push(Initializer { name: name.clone(), ty, dims, source });
    Some(name)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::graph::{Attribute, Dim, ElementType};
    use moh_models::Weight;

    const DENSE: HeadLayers = HeadLayers { style: Some(HeadStyle::Dense) };

    fn routed(op_type: &'static str, inputs: &[&str]) -> Node {
        Node {
            op_type,
            domain: DOMAIN,
            name: format!("layer.{op_type}/{op_type}"),
            inputs: inputs.iter().map(|&name| name.to_owned()).collect(),
            outputs: vec![op_type.to_owned()],
            attributes: vec![("num_heads", Attribute::Int(2))],
        }
    }

    /// A projection of x, attention to it with the gates of that name, and a combination. The weights have that shape.
    fn graph(gates: &str, shape: &[usize]) -> Graph {
        let value = |name: &str| Value {
            name: name.to_owned(),
            ty: ElementType::F16,
            dims: vec![Dim::Named("batch".to_owned()), Dim::Fixed(5), Dim::Fixed(4)],
        };
        let initializer = |name: &str, shape: &[usize]| Initializer {
            name: name.to_owned(),
            ty: ElementType::F16,
            dims: shape.to_vec(),
            source: Source::Weight {
                weight: Weight::from_f32(name, shape.to_vec(), vec![0.5; shape.iter().product()]),
                transposed: false,
            },
        };
        let nodes = vec![
            // Keys come from the same module.
            Node {
                op_type: "MatMul",
                domain: "",
                name: "layer.RoutedProjection/MatMul".to_owned(),
                ..routed("key", &["x", "k"])
            },
            routed(RoutedProjection::NAME, &["x", "query", "gates", "bias"]),
            routed(RoutedAttention::NAME, &[RoutedProjection::NAME, "key", "value", gates]),
            routed(RoutedCombine::NAME, &[RoutedAttention::NAME, "output", "gates"]),
        ];
        Graph {
            name: "heads".to_owned(),
            opset: 21,
            ir_version: 10,
            inputs: ["x", "key", "value", "gates", "others"].map(value).to_vec(),
            outputs: vec![value(RoutedCombine::NAME)],
            initializers: vec![initializer("query", shape), initializer("output", shape), initializer("bias", &[4])],
            values: nodes.iter().map(|node| (node.outputs[0].clone(), value(&node.outputs[0]))).collect(),
            nodes,
            functions: vec![],
            metadata: BTreeMap::new(),
        }
    }

    fn types(graph: &Graph) -> Vec<&str> {
        graph.nodes.iter().map(|node| node.op_type).collect()
    }

    #[test]
    fn projections_beside_attention_become_products() {
        let mut graph = graph("gates", &[6, 4]);
        DENSE.run(&mut graph).unwrap();
        assert_eq!(types(&graph), ["MatMul", "MatMul", "Add", "RoutedAttention", "MatMul"]);
        let inputs: Vec<&[String]> = graph.nodes.iter().map(|node| &node.inputs[..]).collect();
        assert_eq!(inputs[1], ["x", "query.T"]);
        assert_eq!(inputs[2], ["layer.RoutedProjection/MatMul_1", "bias"]);
        assert_eq!(inputs[3][0], graph.nodes[2].outputs[0]);
        assert_eq!(inputs[4], ["RoutedAttention", "output.T"]);
        assert_eq!(graph.nodes[4].outputs, ["RoutedCombine"], "the output keeps its name");
        assert!(graph.nodes.iter().flat_map(|node| &node.outputs).all(|name| graph.values.contains_key(name)));
        let names: Vec<&str> = graph.initializers.iter().map(|init| &init.name[..]).collect();
        assert_eq!(names, ["bias", "query.T", "output.T"]);
        let matrix = &graph.initializers[1];
        assert!(matches!(matrix.source, Source::Weight { transposed: true, .. }) && matrix.dims == [4, 6]);
        let before = graph.nodes.clone();
        DENSE.run(&mut graph).unwrap();
        assert_eq!(graph.nodes, before);
    }

    /// The same matrix in another type, and the same one.
    #[test]
    fn matrices_that_are_there() {
        for (ty, name) in [(ElementType::F32, "query.T_1"), (ElementType::F16, "query.T")] {
            let mut graph = graph("gates", &[6, 4]);
            let weight = Weight::from_f32("query", vec![6, 4], vec![0.5; 24]);
            let source = Source::Weight { weight, transposed: true };
            graph.initializers.push(Initializer { name: "query.T".to_owned(), ty, dims: vec![4, 6], source });
            graph.nodes[0].inputs[1] = "query.T".to_owned();
            DENSE.run(&mut graph).unwrap();
            assert_eq!(graph.nodes[1].inputs[1], name);
            let found = graph.initializers.iter().find(|init| init.name == name).unwrap();
            assert_eq!(found.ty, ElementType::F16);
        }
    }

    #[test]
    fn what_others_read_stays_routed() {
        let unchanged = |mut graph: Graph, expected: &[&str], why: &str| {
            DENSE.run(&mut graph).unwrap();
            assert_eq!(types(&graph), expected, "{why}");
        };
        let routed = ["MatMul", "RoutedProjection", "RoutedAttention", "RoutedCombine"];
        unchanged(graph("others", &[6, 4]), &routed, "other gates");
        unchanged(graph("gates", &[2, 4, 3]), &routed, "a matrix for each head");
        let mut as_keys = graph("gates", &[6, 4]);
        as_keys.nodes[2].inputs[1] = RoutedProjection::NAME.to_owned();
        unchanged(as_keys, &["MatMul", "RoutedProjection", "RoutedAttention", "MatMul"], "zeros among the keys");
        let mut shown = graph("gates", &[6, 4]);
        shown.outputs.push(shown.values[RoutedProjection::NAME].clone());
        unchanged(shown, &["MatMul", "RoutedProjection", "RoutedAttention", "MatMul"], "an output");
        let mut unknown = graph("gates", &[6, 4]);
        unknown.nodes[3].inputs[0] = "x".to_owned();
        unchanged(
            unknown,
            &["MatMul", "MatMul", "Add", "RoutedAttention", "RoutedCombine"],
            "blocks of heads that are off",
        );
        let mut plain = graph("gates", &[6, 4]);
        HeadLayers::default().run(&mut plain).unwrap();
        assert_eq!(types(&plain), routed);
    }
}
