//! Dense layers, with what is done with their outputs, as `ai.moh.Linear` and `ai.moh.LinearActivation`, whose bodies are a product and the
//! operations after it: libmoh_ops computes them itself on processors where it is faster than onnxruntime, and leaves them to the body
//! elsewhere. Wherever `ai.moh.LinearNBits` and `ai.moh.RoutedCombineNBits` are written, they take with them what is done with their outputs, and
//! `ai.moh.LinearNBits` becomes `ai.moh.LinearActivationNBits`.

#[cfg(test)]
mod tests;

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
    /// How dense layers in floating point are written: moh is faster in onnxruntime with libmoh_ops on GPUs and on processors with AVX2, AVX-512 or AMX
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
