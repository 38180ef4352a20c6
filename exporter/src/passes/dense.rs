//! Dense layers as `ai.moh.Linear`, whose body is a product and a sum: libmoh_ops computes them itself on processors where it is faster
//! than onnxruntime, and leaves them to the body elsewhere.

use super::Pass;
use crate::error::Error;
use crate::graph::{ElementType, Graph, Node, Source};
use moh_operators::{DOMAIN, Definition, Linear};
use std::collections::BTreeMap;

/// How dense layers are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum DenseStyle {
    /// As MatMul and Add, or Gemm.
    #[default]
    Onnx,
    /// As ai.moh.Linear.
    Moh,
}

/// Columns from which a matrix is worth it: a router's has fewer.
const NARROW: usize = 32;

/// The pass.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct DenseLayers {
    /// How dense layers in floating point are written: moh is faster in onnxruntime with libmoh_ops on processors with AMX [default:
    /// onnx, or as --for says].
    #[arg(long = "dense-layers", value_enum, value_name = "STYLE")]
    pub style: Option<DenseStyle>,
    /// Whether all weights are to be used as the checkpoint stores them: dense layers are then not written so.
    #[arg(skip)]
    pub as_stored: bool,
}

impl Pass for DenseLayers {
    fn run(&self, graph: &mut Graph) -> Result<(), Error> {
        if self.style == Some(DenseStyle::Moh) && !self.as_stored {
            fuse(graph);
        }
        Ok(())
    }
}

fn fuse(graph: &mut Graph) {
    let mut readers: BTreeMap<String, usize> = BTreeMap::new();
    for name in graph.nodes.iter().flat_map(|node| &node.inputs).chain(graph.outputs.iter().map(|output| &output.name))
    {
        *readers.entry(name.clone()).or_default() += 1;
    }
    let mut nodes = std::mem::take(&mut graph.nodes).into_iter().peekable();
    while let Some(mut node) = nodes.next() {
        if is_dense(graph, &node) {
            let only = readers.get(&node.outputs[0]) == Some(&1);
            let add = nodes.next_if(|add| only && adds_bias(graph, add, &node));
            node.op_type = Linear::NAME;
            node.domain = DOMAIN;
            if let Some(add) = add {
                graph.values.remove(&node.outputs[0]);
                node.inputs.push(add.inputs[1].clone());
                node.outputs = add.outputs;
            }
        }
        graph.nodes.push(node);
    }
}

/// Whether it multiplies many rows with a matrix of the checkpoint, in a type that libmoh_ops computes in.
fn is_dense(graph: &Graph, node: &Node) -> bool {
    let matrix = |name: &String| graph.initializers.iter().find(|init| init.name == *name);
    node.op_type == "MatMul"
        && node.domain.is_empty()
        && graph.value(&node.inputs[0]).is_some_and(|x| x.dims.len() >= 3)
        && matrix(&node.inputs[1]).is_some_and(|init| {
            let is_weight = matches!(init.source, Source::Weight { transposed: true, .. });
            is_weight && init.ty == ElementType::F32 && init.dims[1] >= NARROW
        })
}

/// Whether `add` adds a vector to the result of `product`.
fn adds_bias(graph: &Graph, add: &Node, product: &Node) -> bool {
    let vector = |name: &String| graph.initializers.iter().any(|init| init.name == *name && init.dims.len() == 1);
    add.op_type == "Add" && add.inputs[0] == product.outputs[0] && vector(&add.inputs[1])
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::graph::{Dim, Initializer, Value};
    use moh_models::Weight;

    fn node(op_type: &'static str, inputs: &[&str], output: &str) -> Node {
        let inputs = inputs.iter().map(|&name| name.to_owned()).collect();
        Node {
            op_type,
            domain: "",
            name: output.to_owned(),
            inputs,
            outputs: vec![output.to_owned()],
            attributes: vec![],
        }
    }

    /// Two products with the same matrix, one of which has a bias, and is an output as well where `shown`.
    fn graph(ty: ElementType, shown: bool) -> Graph {
        let value = |name: &str, last| Value {
            name: name.to_owned(),
            ty,
            dims: vec![Dim::Named("batch".to_owned()), Dim::Fixed(5), Dim::Fixed(last)],
        };
        let initializer = |name: &str, dims: &[usize], transposed| {
            let mut stored = dims.to_vec();
            stored.reverse();
            let weight = Weight::from_f32(name, stored, vec![0.5; dims.iter().product()]);
            Initializer {
                name: name.to_owned(),
                ty,
                dims: dims.to_vec(),
                source: Source::Weight { weight, transposed },
            }
        };
        let outputs = ["sum", "plain"].into_iter().chain(shown.then_some("product"));
        Graph {
            name: "dense".to_owned(),
            opset: 21,
            ir_version: 10,
            inputs: vec![value("x", 2)],
            outputs: outputs.map(|name| value(name, NARROW)).collect(),
            initializers: vec![initializer("weight", &[2, NARROW], true), initializer("bias", &[NARROW], false)],
            nodes: vec![
                node("MatMul", &["x", "weight"], "product"),
                node("Add", &["product", "bias"], "sum"),
                node("MatMul", &["x", "weight"], "plain"),
            ],
            values: ["product", "sum", "plain"].map(|name| (name.to_owned(), value(name, NARROW))).into(),
            functions: vec![],
            metadata: BTreeMap::new(),
        }
    }

    fn written(mut graph: Graph, pass: DenseLayers) -> Vec<(String, Vec<String>, Vec<String>)> {
        pass.run(&mut graph).unwrap();
        let text = |node: Node| (format!("{}:{}", node.domain, node.op_type), node.inputs, node.outputs);
        graph.nodes.into_iter().map(text).collect()
    }

    fn strings(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn a_product_and_its_bias_are_one_node() {
        let moh = DenseLayers { style: Some(DenseStyle::Moh), as_stored: false };
        let layer = |inputs: &[&str], output: &str| ("ai.moh:Linear".to_owned(), strings(inputs), strings(&[output]));
        let plain = layer(&["x", "weight"], "plain");
        let sum = layer(&["x", "weight", "bias"], "sum");
        assert_eq!(written(graph(ElementType::F32, false), moh), [sum, plain.clone()]);
        // What others read stays.
        let add = (":Add".to_owned(), strings(&["product", "bias"]), strings(&["sum"]));
        assert_eq!(written(graph(ElementType::F32, true), moh), [layer(&["x", "weight"], "product"), add, plain]);
    }

    #[test]
    fn others_stay_as_they_are() {
        let moh = DenseLayers { style: Some(DenseStyle::Moh), as_stored: false };
        let onnx = DenseLayers { style: Some(DenseStyle::Onnx), ..moh };
        let ways = [
            (ElementType::F32, onnx),
            (ElementType::F32, DenseLayers::default()),
            (ElementType::F32, DenseLayers { as_stored: true, ..moh }),
            (ElementType::F16, moh),
        ];
        for (ty, pass) in ways {
            let types: Vec<String> = written(graph(ty, false), pass).into_iter().map(|(op, ..)| op).collect();
            assert_eq!(types, [":MatMul", ":Add", ":MatMul"], "{ty}, {pass:?}");
        }
        // One row, or few columns.
        let none = |graph: Graph| written(graph, moh).iter().all(|(op, ..)| op != "ai.moh:Linear");
        let mut flat = graph(ElementType::F32, false);
        flat.inputs[0].dims.remove(0);
        assert!(none(flat));
        let mut narrow = graph(ElementType::F32, false);
        narrow.initializers[0].dims[1] = NARROW - 1;
        assert!(none(narrow));
    }
}
