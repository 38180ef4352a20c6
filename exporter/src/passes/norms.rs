//! Layer normalisation, with the modulation of its result, as `ai.moh.LayerNorm`, whose body is onnxruntime's normalisation and the operations
//! after it: libmoh_ops reads and writes rows once, where each of these would.

use super::Pass;
use super::dense::{DenseStyle, Readers, readers, shares_rows};
use crate::error::Error;
use crate::graph::{Attribute, Dim, ElementType, Graph, Node, Source, Value};
use moh_operators::{DOMAIN, Definition, LayerNorm};
use std::collections::BTreeMap;

/// Numbers of inputs of both operators.
const WEIGHT: usize = 1;
const BIAS: usize = 2;
/// ONNX's default.
const EPSILON: f32 = 1e-5;

/// The pass.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct Norms {
    /// How layer normalisation is written: moh is faster in onnxruntime with libmoh_ops [default: onnx, or as --for says].
    #[arg(id = "norms", long = "norms", value_enum, value_name = "STYLE")]
    pub style: Option<DenseStyle>,
}

impl Pass for Norms {
    fn run(&self, graph: &mut Graph) -> Result<(), Error> {
        if self.style == Some(DenseStyle::Moh) {
            fuse(graph);
        }
        Ok(())
    }
}

fn fuse(graph: &mut Graph) {
    let readers = readers(graph);
    let mut fused: BTreeMap<usize, Option<Node>> = BTreeMap::new();
    for i in 0..graph.nodes.len() {
        let Some(norm) = Norm::of(graph, &readers, i) else { continue };
        let node = norm.node(graph);
        for &part in &norm.parts {
            let inner = graph.nodes[part].outputs.iter().filter(|name| !node.outputs.contains(name));
            inner.for_each(|name| drop(graph.values.remove(name)));
            fused.insert(part, None);
        }
        // The last of its parts, where all inputs are there. Its other values are gone, so no other norm takes the same sum for its own.
        fused.insert(norm.output, Some(node));
    }
    let nodes = std::mem::take(&mut graph.nodes).into_iter().enumerate();
    graph.nodes = nodes.filter_map(|(i, node)| fused.remove(&i).unwrap_or(Some(node))).collect();
}

/// A normalisation with what is done with its output.
struct Norm {
    /// Numbers of the nodes that it replaces.
    parts: Vec<usize>,
    /// The last of them that makes its output.
    output: usize,
    scale: Option<String>,
    shift: Option<String>,
    ty: ElementType,
}

impl Norm {
    /// The normalisation that node `i` is.
    fn of(graph: &Graph, readers: &Readers, i: usize) -> Option<Norm> {
        let node = &graph.nodes[i];
        let over_last = node.attributes.contains(&("axis", Attribute::Int(-1)));
        if node.op_type != "LayerNormalization" || !node.domain.is_empty() || !over_last || node.outputs.len() != 1 {
            return None;
        }
        let Value { ty, dims, .. } = graph.value(&node.outputs[0])?;
        let mut norm = Norm { parts: vec![i], output: i, scale: None, shift: None, ty };
        let shares = |name: &str| graph.value(name).is_some_and(|value| shares_rows(&value.dims, &dims));
        let Some((mul, factor)) = norm.next(graph, readers, "Mul") else { return Some(norm) };
        let Some((add, scale)) = one_more(graph, factor).filter(|(_, scale)| shares(scale)) else { return Some(norm) };
        norm.scale = Some(scale.to_owned());
        norm.output = mul;
        norm.parts.push(mul);
        if readers.get(factor).is_some_and(|readers| readers[..] == [Some(mul)]) {
            norm.parts.push(add);
        }
        if let Some((add, shift)) = norm.next(graph, readers, "Add").filter(|(_, shift)| shares(shift)) {
            norm.shift = Some(shift.to_owned());
            norm.output = add;
            norm.parts.push(add);
        }
        Some(norm)
    }

    /// The only node that reads the output, if it is one of that type with two inputs, and its other input.
    fn next<'g>(&self, graph: &'g Graph, readers: &Readers, op_type: &str) -> Option<(usize, &'g str)> {
        let output = &graph.nodes[self.output].outputs[0];
        let [Some(reader)] = readers.get(output)?[..] else { return None };
        let node = graph.nodes.get(reader).filter(|node| node.op_type == op_type && node.domain.is_empty())?;
        let [a, b] = &node.inputs[..] else { return None };
        Some((reader, if a == output { b } else { a }))
    }

    /// The node that replaces its parts.
    fn node(&self, graph: &mut Graph) -> Node {
        let Node { name, mut inputs, attributes, .. } = graph.nodes[self.parts[0]].clone();
        if self.scale.is_some() && inputs.len() == BIAS {
            let weight = graph.value(&inputs[WEIGHT]).map_or(Vec::new(), |weight| weight.dims);
            let width = weight.iter().map(|dim| if let Dim::Fixed(n) = dim { *n } else { 0 }).collect();
            inputs.push(graph.constant(self.ty, width, 0));
        }
        inputs.extend(self.scale.iter().chain(&self.shift).cloned());
        let given = attributes.into_iter().find(|(name, _)| *name == "epsilon");
        Node {
            op_type: LayerNorm::OPERATOR.name,
            domain: DOMAIN,
            name,
            inputs,
            outputs: graph.nodes[self.output].outputs.clone(),
            attributes: vec![given.unwrap_or(("epsilon", Attribute::Float(EPSILON)))],
        }
    }
}

/// Of a sum of a value and the number 1: the node, and the value.
fn one_more<'g>(graph: &'g Graph, sum: &str) -> Option<(usize, &'g str)> {
    let add = graph.nodes.iter().position(|node| node.outputs.iter().any(|output| output == sum))?;
    let node = graph.nodes.get(add).filter(|node| node.op_type == "Add" && node.domain.is_empty())?;
    let [a, b] = &node.inputs[..] else { return None };
    let is_one = |name: &str| {
        let found = graph.initializers.iter().find(|init| init.name == name);
        found.is_some_and(|init| {
            init.dims.is_empty() && matches!(&init.source, Source::Bytes(bytes) if *bytes == init.ty.bytes_of(1.0))
        })
    };
    match [is_one(a), is_one(b)] {
        [false, true] => Some((add, a)),
        [true, false] => Some((add, b)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::graph::Initializer;
    use crate::passes::Options;

    const MOH: Norms = Norms { style: Some(DenseStyle::Moh) };
    const WIDTH: usize = 6;

    fn node(op_type: &'static str, inputs: &[&str], output: &str) -> Node {
        Node {
            op_type,
            domain: "",
            name: output.to_owned(),
            inputs: strings(inputs),
            outputs: vec![output.to_owned()],
            attributes: vec![],
        }
    }

    fn norm(inputs: &[&str]) -> Node {
        let attributes = vec![("axis", Attribute::Int(-1)), ("epsilon", Attribute::Float(1e-6))];
        Node { attributes, ..node("LayerNormalization", inputs, "normed") }
    }

    fn strings(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    /// These nodes, the last of which makes the output. Inputs `x` and `other` (batch, 5, width), `scale` and `shift` (batch, 1, width),
    /// `rows` (1, 5, width).
    fn graph(ty: ElementType, nodes: Vec<Node>) -> Graph {
        let batch = || Dim::Named("batch".to_owned());
        let value = |name: &str, rows: [Dim; 2]| Value {
            name: name.to_owned(),
            ty,
            dims: [&rows[..], &[Dim::Fixed(WIDTH)]].concat(),
        };
        let inputs = [
            ("x", [batch(), Dim::Fixed(5)]),
            ("other", [batch(), Dim::Fixed(5)]),
            ("scale", [batch(), Dim::Fixed(1)]),
            ("shift", [batch(), Dim::Fixed(1)]),
            ("rows", [Dim::Fixed(1), Dim::Fixed(5)]),
        ];
        let values = nodes.iter().map(|node| {
            let rows = if node.outputs[0] == "factor" { 1 } else { 5 };
            (node.outputs[0].clone(), value(&node.outputs[0], [batch(), Dim::Fixed(rows)]))
        });
        let constant = |name: &str, dims: Vec<usize>, number| Initializer {
            name: name.to_owned(),
            ty,
            source: Source::Bytes(ty.bytes_of(number).repeat(dims.iter().product())),
            dims,
        };
        Graph {
            name: "norms".to_owned(),
            opset: 21,
            ir_version: 10,
            inputs: inputs.map(|(name, rows)| value(name, rows)).into(),
            outputs: nodes.last().map(|node| value(&node.outputs[0], [batch(), Dim::Fixed(5)])).into_iter().collect(),
            initializers: vec![
                constant("weight", vec![WIDTH], 1.0),
                constant("bias", vec![WIDTH], 0.5),
                constant("one", vec![], 1.0),
                constant("two", vec![], 2.0),
            ],
            values: values.collect(),
            nodes,
            functions: vec![],
            metadata: BTreeMap::new(),
        }
    }

    fn written(mut graph: Graph, pass: Norms) -> Vec<(&'static str, Vec<String>, Vec<String>)> {
        pass.run(&mut graph).unwrap();
        graph.nodes.into_iter().map(|node| (node.op_type, node.inputs, node.outputs)).collect()
    }

    fn modulated(scale: [&str; 2], mul: [&str; 2], add: [&str; 2]) -> Vec<Node> {
        vec![norm(&["x", "weight"]), node("Add", &scale, "factor"), node("Mul", &mul, "scaled"), node("Add", &add, "y")]
    }

    #[test]
    fn a_norm_and_its_modulation_are_one_node() {
        let zeros = "ai.moh/zeros[6].f32";
        let wanted = [("LayerNorm", strings(&["x", "weight", zeros, "scale", "shift"]), strings(&["y"]))];
        for nodes in [
            modulated(["scale", "one"], ["normed", "factor"], ["scaled", "shift"]),
            modulated(["one", "scale"], ["factor", "normed"], ["shift", "scaled"]),
        ] {
            let mut graph = graph(ElementType::F32, nodes.clone());
            assert_eq!(written(graph.clone(), MOH), wanted);
            MOH.run(&mut graph).unwrap();
            assert_eq!(graph.nodes[0].attributes, [("epsilon", Attribute::Float(1e-6))]);
            assert_eq!(graph.nodes[0].domain, DOMAIN);
            assert_eq!(graph.values.keys().collect::<Vec<_>>(), ["y"]);
        }
        let f16 = graph(ElementType::F16, modulated(["scale", "one"], ["normed", "factor"], ["scaled", "shift"]));
        assert_eq!(written(f16, MOH)[0].1[2], "ai.moh/zeros[6].f16");
        // With a bias, and without a shift.
        let mut nodes = modulated(["scale", "one"], ["normed", "factor"], ["scaled", "shift"]);
        nodes[0] = norm(&["x", "weight", "bias"]);
        nodes.truncate(3);
        let wanted = [("LayerNorm", strings(&["x", "weight", "bias", "scale"]), strings(&["scaled"]))];
        assert_eq!(written(graph(ElementType::F32, nodes), MOH), wanted);
    }

    #[test]
    fn a_norm_alone_is_one_too() {
        let alone = |inputs: &[&str]| graph(ElementType::F32, vec![norm(inputs)]);
        for inputs in [&["x", "weight", "bias"][..], &["x", "weight"]] {
            assert_eq!(written(alone(inputs), MOH), [("LayerNorm", strings(inputs), strings(&["normed"]))]);
        }
        // ONNX's default.
        let mut graph = alone(&["x", "weight"]);
        graph.nodes[0].attributes.truncate(1);
        MOH.run(&mut graph).unwrap();
        assert_eq!(graph.nodes[0].attributes, [("epsilon", Attribute::Float(1e-5))]);
    }

    /// Each of two norms could take the sum of both for its own.
    #[test]
    fn the_sum_of_two_modulated_norms_is_of_one() {
        let mut nodes = modulated(["scale", "one"], ["normed", "factor"], ["scaled", "shift"]);
        nodes.truncate(3);
        let other =
            Node { name: "b".to_owned(), inputs: strings(&["other", "weight"]), outputs: strings(&["b"]), ..norm(&[]) };
        nodes.extend([other, node("Mul", &["b", "factor"], "scaled_b"), node("Add", &["scaled", "scaled_b"], "y")]);
        let found = written(graph(ElementType::F32, nodes), MOH);
        let types: Vec<&str> = found.iter().map(|(op_type, ..)| *op_type).collect();
        assert_eq!(types.iter().filter(|op_type| **op_type == "LayerNorm").count(), 2);
        let made: Vec<&String> = found.iter().flat_map(|(.., outputs)| outputs).collect();
        for (_, inputs, _) in &found {
            for input in inputs
                .iter()
                .filter(|name| ["scaled", "scaled_b", "normed", "b", "factor", "y"].contains(&name.as_str()))
            {
                assert!(made.contains(&input), "nothing makes {input}");
            }
        }
        assert!(made.iter().any(|name| *name == "y"));
    }

    /// What is no modulation by 1 + scale for each sequence, or what others read as well, stays.
    #[test]
    fn other_operations_stay() {
        let types = |nodes: Vec<Node>| -> Vec<&str> {
            written(graph(ElementType::F32, nodes), MOH).into_iter().map(|(op_type, ..)| op_type).collect()
        };
        let factor = ["normed", "factor"];
        for scale in [["scale", "two"], ["scale", "shift"], ["rows", "one"]] {
            assert_eq!(types(modulated(scale, factor, ["scaled", "shift"])), ["LayerNorm", "Add", "Mul", "Add"]);
        }
        assert_eq!(types(modulated(["scale", "one"], factor, ["scaled", "rows"])), ["LayerNorm", "Add"]);
        // A factor that another node multiplies by, too.
        let mut nodes = modulated(["scale", "one"], factor, ["scaled", "shift"]);
        nodes.push(node("Mul", &["y", "factor"], "again"));
        assert_eq!(types(nodes), ["Add", "LayerNorm", "Mul"]);
        // A result of the norm that another node reads.
        let mut nodes = modulated(["scale", "one"], factor, ["scaled", "shift"]);
        nodes.push(node("Add", &["y", "normed"], "again"));
        assert_eq!(types(nodes), ["LayerNorm", "Add", "Mul", "Add", "Add"]);
        // Over other dimensions.
        let mut nodes = vec![norm(&["x", "weight"])];
        nodes[0].attributes[0] = ("axis", Attribute::Int(1));
        assert_eq!(types(nodes), ["LayerNormalization"]);
    }

    #[test]
    fn other_styles_keep_onnx_norms() {
        let nodes = || graph(ElementType::F32, vec![norm(&["x", "weight"])]);
        for style in [None, Some(DenseStyle::Onnx)] {
            assert_eq!(written(nodes(), Norms { style })[0].0, "LayerNormalization");
        }
        // Linked weights do not matter.
        let mut options = Options { norms: MOH, ..Options::default() };
        options.settle(None, true);
        assert_eq!(written(nodes(), options.norms)[0].0, "LayerNorm");
    }
}
