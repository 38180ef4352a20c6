//! Dense layers, with what is done with their outputs, as `ai.moh.Linear` and `ai.moh.LinearActivation`, whose bodies are a product and the
//! operations after it: libmoh_ops computes them itself on processors where it is faster than onnxruntime, and leaves them to the body
//! elsewhere. Wherever `ai.moh.LinearNBits` and `ai.moh.RoutedCombineNBits` are written, they take with them what is done with their outputs, and
//! `ai.moh.LinearNBits` becomes `ai.moh.LinearActivationNBits`.

use super::Pass;
use crate::error::Error;
use crate::graph::{Attribute, Dim, ElementType, Graph, Node, Source};
use moh_operators::routed_mlp::Activation;
use moh_operators::{
    DOMAIN, Definition, Linear, LinearActivation, LinearActivationNBits, LinearNBits, Operator, RoutedCombineNBits,
    linear,
};
use std::collections::BTreeMap;

/// How dense layers, norms or convolutions are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum DenseStyle {
    /// As ONNX's own operators.
    #[default]
    Onnx,
    /// As operators of ai.moh.
    Moh,
}

/// Columns from which a matrix is worth it: a router's has fewer.
const NARROW: usize = 32;

/// The pass.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct DenseLayers {
    /// How dense layers in floating point are written: moh is faster in onnxruntime with libmoh_ops on GPUs and on processors with AVX-512 or AMX
    /// [default: onnx, or as --for says].
    #[arg(id = "dense-layers", long = "dense-layers", value_enum, value_name = "STYLE")]
    pub style: Option<DenseStyle>,
    /// Whether dense layers are ONNX's in any style: where weights are to be used as the checkpoint stores them, and where nothing but
    /// standard operators is to be written, among which numbers in the place of gates would stay.
    #[arg(skip)]
    pub standard: bool,
}

impl Pass for DenseLayers {
    fn run(&self, graph: &mut Graph) -> Result<(), Error> {
        self.fuse(graph);
        Ok(())
    }
}

impl DenseLayers {
    /// Writes layers with quantised weights, and where that is the style those in floating point.
    fn fuse(&self, graph: &mut Graph) {
        let all = self.style == Some(DenseStyle::Moh) && !self.standard;
        let (readers, taken) = (readers(graph), vec![false; graph.nodes.len()]);
        let mut search = Search { readers, taken, standard: self.standard };
        let mut fused: BTreeMap<usize, Node> = BTreeMap::new();
        for i in 0..graph.nodes.len() {
            let node = &graph.nodes[i];
            if !(quantised(node).is_some() || all && is_dense(graph, node)) {
                continue;
            }
            let layer = search.layer(graph, i);
            let [inner @ .., last] = &layer.parts[..] else { continue };
            let Some(node) = layer.node(graph) else { continue };
            for &part in inner {
                graph.nodes[part].outputs.iter().for_each(|name| drop(graph.values.remove(name)));
            }
            layer.parts.iter().for_each(|&part| search.taken[part] = true);
            // Where the last of its inputs is there.
            fused.insert(*last, node);
        }
        let nodes = std::mem::take(&mut graph.nodes).into_iter().enumerate();
        graph.nodes = nodes.filter_map(|(i, node)| fused.remove(&i).or((!search.taken[i]).then_some(node))).collect();
    }
}

/// Whether it multiplies rows with a matrix of the checkpoint, in a type that libmoh_ops computes in.
fn is_dense(graph: &Graph, node: &Node) -> bool {
    let matrix = |name: &String| graph.initializers.iter().find(|init| init.name == *name);
    node.op_type == "MatMul"
        && node.domain.is_empty()
        && graph.value(&node.inputs[0]).is_some_and(|x| x.dims.len() >= 2)
        && matrix(&node.inputs[1]).is_some_and(|init| {
            let is_weight = matches!(init.source, Source::Weight { transposed: true, .. });
            let is_float = matches!(init.ty, ElementType::F32 | ElementType::F16 | ElementType::BF16);
            is_weight && is_float && init.dims[1] >= NARROW
        })
}

/// The operator, if it is one with a quantised weight that has a gate and a residual.
fn quantised(node: &Node) -> Option<&'static Operator> {
    let found = [LinearNBits::OPERATOR, RoutedCombineNBits::OPERATOR].into_iter();
    found.filter(|_| node.domain == DOMAIN).find(|operator| operator.name == node.op_type)
}

/// The number that changes nothing in the place of a layer's bias, gate or residual.
fn neutral(optional: usize) -> u8 {
    Linear::filler(&linear::Attributes {}, Linear::OPERATOR.required_inputs() + optional)
}

/// Numbers of the nodes that read a value; `None` for an output of the model.
pub(super) type Readers = BTreeMap<String, Vec<Option<usize>>>;

/// Who reads which value.
pub(super) fn readers(graph: &Graph) -> Readers {
    let mut readers = Readers::new();
    for (i, node) in graph.nodes.iter().enumerate() {
        node.inputs.iter().for_each(|name| readers.entry(name.clone()).or_default().push(Some(i)));
    }
    graph.outputs.iter().for_each(|output| readers.entry(output.name.clone()).or_default().push(None));
    readers
}

/// A dense layer with what is done with its output.
struct Layer {
    /// Numbers of the nodes that it replaces, in order.
    parts: Vec<usize>,
    /// Of the product.
    inputs: Vec<String>,
    bias: Option<String>,
    gate: Option<String>,
    residual: Option<String>,
    activation: Option<Activation>,
}

/// What is known while layers are searched.
struct Search {
    readers: Readers,
    /// Nodes that are parts of layers.
    taken: Vec<bool>,
    /// See [`DenseLayers::standard`].
    standard: bool,
}

impl Search {
    /// The layer that begins with the product `i`.
    fn layer(&self, graph: &Graph, i: usize) -> Layer {
        let inputs = graph.nodes[i].inputs.clone();
        let mut layer = Layer { parts: vec![i], inputs, bias: None, gate: None, residual: None, activation: None };
        let quantised = quantised(&graph.nodes[i]);
        let is_combination = quantised.is_some_and(|operator| operator.name == RoutedCombineNBits::NAME);
        let dims = |name: &str| graph.initializers.iter().find(|init| init.name == name).map(|init| &init.dims[..]);
        // LinearNBits has no bias of one number.
        let rows = dims(&layer.inputs[1]).filter(|_| quantised.is_some()).map(|weight| &weight[..1]);
        let is_bias =
            |name: &str| dims(name).is_some_and(|bias| bias.len() == 1 && rows.is_none_or(|rows| bias == rows));
        if let Some((add, other)) = self.next(graph, &layer, "Add")
            && is_bias(other)
            && !is_combination
        {
            layer.bias = Some(other.to_owned());
            layer.parts.push(add);
        }
        // A body is of one activation function: that of the layers of many rows.
        let has_many_rows = graph.value(&layer.inputs[0]).is_some_and(|x| x.dims.len() >= 3);
        if let Some((activation, parts)) =
            activation(graph, &self.readers, layer.output(graph)).filter(|_| has_many_rows && !is_combination)
        {
            layer.activation = Some(activation);
            layer.parts.extend(parts);
            return layer;
        }
        if quantised.is_some() && self.standard {
            return layer;
        }
        let y = graph.value(layer.output(graph)).map_or(Vec::new(), |y| y.dims);
        let has_shape = |name: &str, fits: &dyn Fn(&[Dim]) -> bool| graph.value(name).is_some_and(|v| fits(&v.dims));
        if let Some((mul, other)) = self.next(graph, &layer, "Mul")
            && has_shape(other, &|dims| shares_rows(dims, &y))
        {
            layer.gate = Some(other.to_owned());
            layer.parts.push(mul);
        }
        if let Some((add, other)) = self.next(graph, &layer, "Add")
            && has_shape(other, &|dims| dims == y && !dims.contains(&Dim::Unknown))
        {
            layer.residual = Some(other.to_owned());
            layer.parts.push(add);
        }
        layer
    }

    /// The only node that reads the layer's output, if it is one of that type with two inputs and no part of another layer; and its
    /// other input.
    fn next<'g>(&self, graph: &'g Graph, layer: &Layer, op_type: &str) -> Option<(usize, &'g str)> {
        let output = layer.output(graph);
        let [Some(reader)] = self.readers.get(output)?[..] else { return None };
        let node = graph.nodes.get(reader).filter(|node| node.op_type == op_type && node.domain.is_empty())?;
        let [a, b] = &node.inputs[..] else { return None };
        (!self.taken[reader]).then_some((reader, if a == output { b } else { a }))
    }
}

/// The activation function that all of a value goes through, and its nodes.
pub(super) fn activation(graph: &Graph, readers: &Readers, output: &str) -> Option<(Activation, Vec<usize>)> {
    let node = |i: usize| graph.nodes.get(i).filter(|node| node.domain.is_empty());
    match readers.get(output)?[..] {
        [Some(i)] => {
            let node = node(i)?;
            let is_tanh = node.attributes.contains(&("approximate", Attribute::String("tanh")));
            let activation = match node.op_type {
                "Gelu" if is_tanh => Activation::GeluTanh,
                "Gelu" => Activation::Gelu,
                "Relu" => Activation::Relu,
                _ => return None,
            };
            Some((activation, vec![i]))
        }
        [Some(sigmoid), Some(mul)] => {
            let gate = &node(sigmoid).filter(|node| node.op_type == "Sigmoid")?.outputs[0];
            let is_only = readers.get(gate)?[..] == [Some(mul)];
            let mul_node = node(mul).filter(|node| node.op_type == "Mul" && is_only)?;
            let is_silu = mul_node.inputs.contains(gate) && mul_node.inputs.iter().any(|name| name == output);
            is_silu.then(|| (Activation::Silu, vec![sigmoid, mul]))
        }
        _ => None,
    }
}

/// Whether a gate of these dimensions has the columns of `y`, and a row for each of `y`'s or for those of its last dimensions.
pub(super) fn shares_rows(gate: &[Dim], y: &[Dim]) -> bool {
    let (Some((columns, rows)), Some((y_columns, y_rows))) = (gate.split_last(), y.split_last()) else { return false };
    let alike = rows.iter().zip(y_rows).take_while(|(gate, y)| gate == y && **gate != Dim::Unknown).count();
    rows.len() == y_rows.len() && columns == y_columns && rows[alike..].iter().all(|dim| *dim == Dim::Fixed(1))
}

impl Layer {
    /// What it makes so far.
    fn output<'g>(&self, graph: &'g Graph) -> &'g str {
        self.parts.last().map_or("", |&last| &graph.nodes[last].outputs[0])
    }

    /// The node that replaces its parts; `None` if it cannot be written.
    fn node(&self, graph: &mut Graph) -> Option<Node> {
        let first = &graph.nodes[self.parts[0]];
        match quantised(first) {
            Some(operator) => self.quantised_node(graph, operator, first.clone()),
            None => Some(self.dense_node(graph, first.name.clone())),
        }
    }

    /// The operator with a quantised weight, and what follows it.
    fn quantised_node(&self, graph: &mut Graph, operator: &Operator, mut node: Node) -> Option<Node> {
        let weight = graph.initializers.iter().find(|init| init.name == self.inputs[1])?;
        let rows = *weight.dims.first()?;
        let ty = graph.value(&self.inputs[0])?.ty;
        node.outputs = vec![self.output(graph).to_owned()];
        // Before zero points, numbers that change nothing were there.
        let own = node.inputs.split_off(operator.required_inputs());
        let own = |input: usize| own.get(input).cloned();
        let (bias, zero_points) = (self.bias.clone().or(own(0)), own(3));
        let optional = match self.activation {
            Some(activation) => {
                node.op_type = LinearActivationNBits::NAME;
                node.attributes.insert(0, ("activation", Attribute::Int(activation as i64)));
                vec![bias, zero_points]
            }
            None => vec![bias, self.gate.clone().or(own(1)), self.residual.clone().or(own(2)), zero_points],
        };
        let present = optional.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
        for (i, input) in optional.into_iter().take(present).enumerate() {
            let dims = if i == 0 { vec![rows] } else { vec![1] };
            node.inputs.push(input.unwrap_or_else(|| graph.constant(ty, dims, neutral(i))));
        }
        Some(node)
    }

    /// Linear, or LinearActivation.
    fn dense_node(&self, graph: &mut Graph, first: String) -> Node {
        let output = self.output(graph).to_owned();
        let operator = if self.activation.is_some() { LinearActivation::OPERATOR } else { Linear::OPERATOR };
        let mut inputs = self.inputs.clone();
        let optional = [&self.bias, &self.gate, &self.residual];
        let ty = graph.value(&inputs[0]).map_or(ElementType::F32, |x| x.ty);
        let present = optional.iter().rposition(|input| input.is_some()).map_or(0, |last| last + 1);
        for input in optional.into_iter().take(present) {
            let input = input.clone().unwrap_or_else(|| {
                // A number that changes nothing. (Of LinearActivation only the bias can be absent, and nothing follows it.)
                graph.constant(ty, vec![1], neutral(inputs.len() - self.inputs.len()))
            });
            inputs.push(input);
        }
        let activation = self.activation.map(|activation| ("activation", Attribute::Int(activation as i64)));
        Node {
            op_type: operator.name,
            domain: DOMAIN,
            name: first,
            inputs,
            outputs: vec![output],
            attributes: activation.into_iter().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::graph::{Initializer, Value};
    use crate::passes::{AttentionStyle, Options, WriteBodies};
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
        let plain = layer("ai.moh:Linear", &["x", "weight"], "plain");
        let sum = layer("ai.moh:Linear", &["x", "weight", "bias"], "sum");
        assert_eq!(written(graph(ElementType::F32, false), MOH), [sum, plain.clone()]);
        // What others read stays.
        let product = layer("ai.moh:Linear", &["x", "weight"], "product");
        let add = layer(":Add", &["product", "bias"], "sum");
        assert_eq!(written(graph(ElementType::F32, true), MOH), [product, add, plain]);
    }

    /// The first product and its bias, and these nodes after it, which make (batch, 5, columns) each, the last one the output. Inputs
    /// `residual` (batch, 5, columns), `gate` (batch, 1, columns) and `other` (1, 5, columns).
    fn followed(nodes: Vec<Node>) -> Graph {
        let mut graph = graph(ElementType::F32, false);
        let value = |name: &str, rows: [Dim; 2]| Value {
            name: name.to_owned(),
            ty: ElementType::F32,
            dims: [&rows[..], &[Dim::Fixed(NARROW)]].concat(),
        };
        let batch = || Dim::Named("batch".to_owned());
        graph.nodes.truncate(2);
        for node in &nodes {
            let name = &node.outputs[0];
            graph.values.insert(name.clone(), value(name, [batch(), Dim::Fixed(5)]));
        }
        let operands = [("residual", [batch(), Dim::Fixed(5)]), ("gate", [batch(), Dim::Fixed(1)])];
        graph.inputs.extend(operands.map(|(name, rows)| value(name, rows)));
        graph.inputs.push(value("other", [Dim::Fixed(1), Dim::Fixed(5)]));
        graph.outputs =
            nodes.last().map(|node| value(&node.outputs[0], [batch(), Dim::Fixed(5)])).into_iter().collect();
        graph.nodes.extend(nodes);
        graph
    }

    const MOH: DenseLayers = DenseLayers { style: Some(DenseStyle::Moh), standard: false };

    fn layer(op: &str, inputs: &[&str], output: &str) -> (String, Vec<String>, Vec<String>) {
        (op.to_owned(), strings(inputs), strings(&[output]))
    }

    #[test]
    fn gates_and_residuals_are_part_of_the_layer() {
        let gated = node("Mul", &["gate", "sum"], "gated");
        let sum = node("Add", &["residual", "gated"], "y");
        let found = written(followed(vec![gated.clone(), sum]), MOH);
        assert_eq!(found, [layer("ai.moh:Linear", &["x", "weight", "bias", "gate", "residual"], "y")]);
        assert_eq!(
            written(followed(vec![gated.clone()]), MOH),
            [layer("ai.moh:Linear", &["x", "weight", "bias", "gate"], "gated")]
        );
        // A number stands in for what is not there.
        let mut graph = followed(vec![node("Add", &["sum", "residual"], "y")]);
        MOH.run(&mut graph).unwrap();
        assert_eq!(graph.nodes[0].inputs, ["x", "weight", "bias", "ai.moh/all1[1].f32", "residual"]);
        let one = graph.initializers.iter().find(|init| init.name == "ai.moh/all1[1].f32").unwrap();
        assert!(matches!(&one.source, Source::Bytes(bytes) if *bytes == 1f32.to_le_bytes()));
        assert!(!graph.values.contains_key("sum") && graph.values.contains_key("y"));
        // No rows of the output: not (batch, 5, columns), nor a row for each of the first dimensions.
        for op in ["Mul", "Add"] {
            let found = written(followed(vec![node(op, &["sum", "other"], "y")]), MOH);
            assert_eq!(found[1], (format!(":{op}"), strings(&["sum", "other"]), strings(&["y"])));
        }
        let found = written(followed(vec![node("Add", &["sum", "gate"], "y")]), MOH);
        assert_eq!(found.len(), 2, "a residual has the output's shape");
        // Its own square.
        assert_eq!(written(followed(vec![node("Mul", &["sum", "sum"], "y")]), MOH).len(), 2);
    }

    #[test]
    fn activations_are_part_of_the_layer() {
        let inputs = ["x", "weight", "bias"];
        for (op, activation) in [("Gelu", Activation::Gelu), ("Relu", Activation::Relu)] {
            let mut graph = followed(vec![node(op, &["sum"], "y")]);
            MOH.run(&mut graph).unwrap();
            assert_eq!(graph.nodes[0].attributes, [("activation", Attribute::Int(activation as i64))]);
            let wanted = layer("ai.moh:LinearActivation", &inputs, "y");
            assert_eq!(written(followed(vec![node(op, &["sum"], "y")]), MOH), [wanted]);
        }
        let tanh = Node { attributes: vec![("approximate", Attribute::String("tanh"))], ..node("Gelu", &["sum"], "y") };
        let mut graph = followed(vec![tanh]);
        MOH.run(&mut graph).unwrap();
        assert_eq!(graph.nodes[0].attributes, [("activation", Attribute::Int(Activation::GeluTanh as i64))]);
        let sigmoid = node("Sigmoid", &["sum"], "sigmoid");
        let silu = vec![sigmoid.clone(), node("Mul", &["sum", "sigmoid"], "y")];
        assert_eq!(written(followed(silu), MOH), [layer("ai.moh:LinearActivation", &inputs, "y")]);
        // Not the sigmoid of the layer's output times something else.
        let other = vec![sigmoid, node("Mul", &["residual", "sigmoid"], "y")];
        assert_eq!(written(followed(other), MOH).len(), 3);
    }

    #[test]
    fn portable_models_and_linked_weights_keep_onnx_layers() {
        for (as_stored, attention) in [(true, AttentionStyle::Routed), (false, AttentionStyle::Portable)] {
            let bodies = WriteBodies { attention };
            let mut options = Options { dense: MOH, bodies, ..Options::default() };
            options.settle(as_stored);
            assert_eq!(written(graph(ElementType::F32, false), options.dense).len(), 3);
        }
        let mut options = Options { dense: MOH, ..Options::default() };
        options.settle(false);
        assert_eq!(written(graph(ElementType::F32, false), options.dense).len(), 2);
    }

    /// The layer of `followed` with a weight of 8 bits, with zero points or without.
    fn quantised(zero_points: bool, nodes: Vec<Node>) -> Graph {
        let mut graph = followed(nodes);
        graph.initializers[0].dims = vec![NARROW, 1, 16];
        let optional = if zero_points { &["zeros", "one", "zero", "zero_points"][..] } else { &[] };
        let inputs = [&["x", "weight", "scales"][..], optional].concat();
        let attributes = vec![("bits", Attribute::Int(8))];
        graph.nodes[0] = Node { domain: DOMAIN, attributes, ..node("LinearNBits", &inputs, "product") };
        graph
    }

    #[test]
    fn quantised_layers_take_what_follows_them() {
        let gelu = || vec![node("Gelu", &["sum"], "y")];
        let styles = [MOH, DenseLayers::default()];
        for zero_points in [false, true] {
            let inputs = |optional: &[&'static str]| {
                let last = &["zero_points"][..usize::from(zero_points)];
                [&["x", "weight", "scales"], optional, last].concat()
            };
            let gated = node("Mul", &["gate", "sum"], "gated");
            let both = || vec![gated.clone(), node("Add", &["residual", "gated"], "y")];
            let [one, zero] = if zero_points { ["one", "zero"] } else { ["ai.moh/all1[1].f32", "never"] };
            // In any style.
            for pass in styles {
                let found = written(quantised(zero_points, gelu()), pass);
                assert_eq!(found, [layer("ai.moh:LinearActivationNBits", &inputs(&["bias"]), "y")]);
                let found = written(quantised(zero_points, both()), pass);
                assert_eq!(found, [layer("ai.moh:LinearNBits", &inputs(&["bias", "gate", "residual"]), "y")]);
                let found = written(quantised(zero_points, vec![gated.clone()]), pass);
                let optional = [&["bias", "gate"][..], &[zero][..usize::from(zero_points)]].concat();
                assert_eq!(found, [layer("ai.moh:LinearNBits", &inputs(&optional), "gated")]);
                let residual = vec![node("Add", &["sum", "residual"], "y")];
                let found = written(quantised(zero_points, residual), pass);
                assert_eq!(found, [layer("ai.moh:LinearNBits", &inputs(&["bias", one, "residual"]), "y")]);
            }
            // Numbers in the place of gates would stay where nodes become standard operators.
            let pass = DenseLayers { standard: true, ..MOH };
            assert_eq!(written(quantised(zero_points, gelu()), pass).len(), 1);
            let optional = if zero_points { &["bias", "one", "zero"][..] } else { &["bias"] };
            let found = written(quantised(zero_points, both()), pass);
            assert_eq!(found[0], layer("ai.moh:LinearNBits", &inputs(optional), "sum"));
            assert_eq!(found.len(), 3);
        }
        let mut graph = quantised(false, gelu());
        MOH.run(&mut graph).unwrap();
        let [activation, bits] = [("activation", Activation::Gelu as i64), ("bits", 8)];
        assert_eq!(graph.nodes[0].attributes, [activation, bits].map(|(name, value)| (name, Attribute::Int(value))));
        assert!(!graph.values.contains_key("product") && !graph.values.contains_key("sum"));
        // One number for all columns.
        let mut graph = quantised(false, gelu());
        graph.initializers[1].dims = vec![1];
        assert_eq!(written(graph, MOH).len(), 3);
        // A single row of each sequence.
        let mut graph = quantised(false, gelu());
        graph.inputs[0].dims.remove(1);
        assert_eq!(written(graph, MOH)[0].0, "ai.moh:LinearNBits");
    }

    /// A layer without a bias whose output is only added to: zeros stand in for its bias, a number for its gate.
    #[test]
    fn quantised_layers_without_a_bias() {
        let mut graph = quantised(false, vec![node("Add", &["product", "residual"], "sum")]);
        graph.nodes.remove(1);
        let optional = ["ai.moh/zeros[32].f32", "ai.moh/all1[1].f32", "residual"];
        let inputs = [&["x", "weight", "scales"][..], &optional].concat();
        assert_eq!(written(graph, MOH)[0], layer("ai.moh:LinearNBits", &inputs, "sum"));
    }

    /// A combination of heads has no activation function, and its bias is its own.
    #[test]
    fn combinations_take_their_gate_and_residual() {
        let combination = |nodes: Vec<Node>| {
            let mut graph = quantised(false, nodes);
            let inputs = ["x", "weight", "scales", "head_gates", "own_bias"];
            graph.nodes[0] = Node { domain: DOMAIN, ..node("RoutedCombineNBits", &inputs, "sum") };
            graph.nodes.remove(1);
            graph
        };
        let both = vec![node("Mul", &["gate", "sum"], "gated"), node("Add", &["residual", "gated"], "y")];
        let inputs = ["x", "weight", "scales", "head_gates", "own_bias", "gate", "residual"];
        for pass in [MOH, DenseLayers::default()] {
            assert_eq!(written(combination(both.clone()), pass), [layer("ai.moh:RoutedCombineNBits", &inputs, "y")]);
        }
        for other in [node("Gelu", &["sum"], "y"), node("Add", &["sum", "bias"], "y")] {
            let found = written(combination(vec![other]), MOH);
            assert_eq!(found[0], layer("ai.moh:RoutedCombineNBits", &inputs[..5], "sum"));
        }
    }

    /// Layers of one row of each sequence, such as a time's, would choose the body of all.
    #[test]
    fn activations_of_single_rows_stay_apart() {
        let mut graph = followed(vec![node("Gelu", &["sum"], "y")]);
        graph.inputs[0].dims.remove(1);
        let found = written(graph, MOH);
        assert_eq!(found[0], layer("ai.moh:Linear", &["x", "weight", "bias"], "sum"));
        assert_eq!(found[1], layer(":Gelu", &["sum"], "y"));
    }

    /// The sum of two layers is one's residual, and stands after the other.
    #[test]
    fn one_of_two_layers_is_the_others_residual() {
        let second = node("MatMul", &["x", "weight"], "second");
        let found = written(followed(vec![second, node("Add", &["sum", "second"], "y")]), MOH);
        let first = layer("ai.moh:Linear", &["x", "weight", "bias", "ai.moh/all1[1].f32", "second"], "y");
        assert_eq!(found, [layer("ai.moh:Linear", &["x", "weight"], "second"), first]);
    }

    #[test]
    fn numbers_are_of_the_layers_type() {
        let mut graph = followed(vec![node("Add", &["sum", "residual"], "y")]);
        let values = graph.values.values_mut().chain(&mut graph.inputs).chain(&mut graph.outputs);
        values.for_each(|value| value.ty = ElementType::F16);
        graph.initializers.iter_mut().for_each(|init| init.ty = ElementType::F16);
        assert_eq!(written(graph, MOH)[0].1[3], "ai.moh/all1[1].f16");
    }

    #[test]
    fn others_stay_as_they_are() {
        let onnx = DenseLayers { style: Some(DenseStyle::Onnx), ..MOH };
        let ways = [onnx, DenseLayers::default(), DenseLayers { standard: true, ..MOH }];
        for pass in ways {
            let types: Vec<String> =
                written(graph(ElementType::F32, false), pass).into_iter().map(|(op, ..)| op).collect();
            assert_eq!(types, [":MatMul", ":Add", ":MatMul"], "{pass:?}");
        }
        // A vector, or few columns.
        let none = |graph: Graph| written(graph, MOH).iter().all(|(op, ..)| op != "ai.moh:Linear");
        let mut vector = graph(ElementType::F32, false);
        vector.inputs[0].dims.drain(..2);
        assert!(none(vector));
        let mut narrow = graph(ElementType::F32, false);
        narrow.initializers[0].dims[1] = NARROW - 1;
        assert!(none(narrow));
    }
}
