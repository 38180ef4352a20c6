//! Linear layers as Gemm, over tokens of all rows of the batch, with the weight as the checkpoint stores it.
//!
//! Wide layers with a bias always: onnxruntime adds the bias while it writes the product, in place of reading and writing it once
//! more. Only where the number of tokens is known: the product's shape is then a constant. What fits into a core's cache is left
//! alone, because flattening a value that others read as well copies it.
//!
//! All layers where weights are to be used as they are stored: a transposed matrix would be a copy.

use super::Pass;
use crate::error::Error;
use crate::graph::{Attribute, Dim, ElementType, Graph, Initializer, Node, Source, Value};
use std::collections::BTreeMap;

/// Elements of a row of the batch from which a product counts as wide: 2 MB of float32.
const WIDE: usize = 1 << 19;

/// The pass.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct FlattenProducts {
    /// Whether all weights are to be used as the checkpoint stores them.
    #[arg(skip)]
    pub as_stored: bool,
}

impl Pass for FlattenProducts {
    fn run(&self, graph: &mut Graph) -> Result<(), Error> {
        run(graph, self.as_stored);
        Ok(())
    }
}

fn run(graph: &mut Graph, as_stored: bool) {
    let mut readers: BTreeMap<String, usize> = BTreeMap::new();
    for name in graph.nodes.iter().flat_map(|node| &node.inputs).chain(graph.outputs.iter().map(|output| &output.name))
    {
        *readers.entry(name.clone()).or_default() += 1;
    }
    let mut nodes = std::mem::take(&mut graph.nodes).into_iter().peekable();
    while let Some(product) = nodes.next() {
        let biased = nodes.peek().filter(|add| readers.get(&product.outputs[0]) == Some(&1) && adds(add, &product));
        let layer = biased.and_then(|add| Layer::of(graph, &product, Some(add)));
        let (layer, is_biased) = match layer.filter(|layer| as_stored || layer.is_wide()) {
            Some(layer) => (Some(layer), true),
            None => (Layer::of(graph, &product, None).filter(|_| as_stored), false),
        };
        match layer {
            Some(layer) => {
                layer.write(graph, &product.name);
                if is_biased {
                    nodes.next();
                }
            }
            None => graph.nodes.push(product),
        }
    }
}

/// Whether `add` is the addition of something to the result of `product`.
fn adds(add: &Node, product: &Node) -> bool {
    product.op_type == "MatMul" && add.op_type == "Add" && add.inputs[0] == product.outputs[0]
}

/// A linear layer.
struct Layer {
    x: Value,
    /// The name of its matrix (in, out) among the initializers.
    weight: String,
    bias: Option<String>,
    y: Value,
}

impl Layer {
    /// The layer that `product` computes, with its bias if `add` adds one.
    fn of(graph: &Graph, product: &Node, add: Option<&Node>) -> Option<Layer> {
        if product.op_type != "MatMul" {
            return None;
        }
        let weight = &product.inputs[1];
        let initializer = |name: &String| graph.initializers.iter().find(|init| init.name == *name);
        let is_matrix = matches!(initializer(weight)?.source, Source::Weight { transposed: true, .. });
        let bias = add.map(|add| add.inputs[1].clone());
        let is_vector = |name: &String| initializer(name).is_some_and(|init| init.dims.len() == 1);
        let (x, y) = (graph.value(&product.inputs[0])?, graph.value(&add.unwrap_or(product).outputs[0])?);
        let fits = is_matrix && bias.iter().all(is_vector) && y.dims.len() >= 2;
        fits.then(|| Layer { x, weight: weight.clone(), bias, y })
    }

    /// Whether it has a bias, and a row of the batch is known to be large.
    fn is_wide(&self) -> bool {
        let row: Option<Vec<usize>> = self.y.dims[1..].iter().map(size).collect();
        self.bias.is_some() && self.y.dims.len() > 2 && row.is_some_and(|row| row.iter().product::<usize>() >= WIDE)
    }

    fn write(&self, graph: &mut Graph, name: &str) {
        let (columns, matrix) = as_stored(graph, &self.weight);
        let (module, ty) = (name.strip_suffix("/MatMul").unwrap_or(name), self.x.ty);
        let transposed = vec![("transB", Attribute::Int(1))];
        let product = |x: String, y: &str| {
            node("Gemm", y, [x, matrix].into_iter().chain(self.bias.clone()).collect(), transposed)
        };
        if self.x.dims.len() == 2 {
            graph.nodes.push(product(self.x.name.clone(), &self.y.name));
            return;
        }
        let rows = rows(&self.x.dims);
        let value = |graph: &mut Graph, name: String, last: usize| {
            let dims = vec![rows.clone(), Dim::Fixed(last)];
            graph.values.insert(name.clone(), Value { name: name.clone(), ty, dims });
            name
        };
        let width = self.x.dims.last().and_then(size).unwrap_or(0);
        let x = value(graph, format!("{name}/rows"), width);
        let shape = ints(graph, &[-1, width as i64]);
        graph.nodes.push(node("Reshape", &x, vec![self.x.name.clone(), shape], vec![]));
        let y = value(graph, format!("{module}/Gemm"), columns);
        graph.nodes.push(product(x, &y));
        let (shape, attributes) = self.shape(graph);
        graph.nodes.push(node("Reshape", &self.y.name, vec![y, shape], attributes));
    }

    /// The result's dimensions as a value, and what Reshape has to know of it.
    fn shape(&self, graph: &mut Graph) -> (String, Vec<(&'static str, Attribute)>) {
        let (dims, last) = (&self.y.dims, self.y.dims.len() - 1);
        if dims.iter().filter(|dim| size(dim).is_none()).count() < 2 {
            let dims: Vec<i64> = dims.iter().map(|dim| size(dim).map_or(-1, |n| n as i64)).collect();
            return (ints(graph, &dims), vec![]);
        }
        // An input of the model with the same dimensions is there for all layers, x for a few.
        let known = dims[..last].iter().all(|dim| *dim != Dim::Unknown);
        let like = graph.inputs.iter().find(|input| known && input.dims.starts_with(&dims[..last]));
        let like = like.map_or(&self.x.name, |input| &input.name).clone();
        let leading = format!("{like}/Shape[:{last}]");
        let range = vec![("start", Attribute::Int(0)), ("end", Attribute::Int(last as i64))];
        shared(graph, last, node("Shape", &leading, vec![like], range));
        let width = ints(graph, &[size(&dims[last]).map_or(-1, |n| n as i64)]);
        let all = format!("{leading}/{width}");
        shared(graph, last + 1, node("Concat", &all, vec![leading, width], vec![("axis", Attribute::Int(0))]));
        // A dimension may be 0, which means another one unless that is said.
        (all, vec![("allowzero", Attribute::Int(1))])
    }
}

/// Adds a node that computes so many int64 numbers, unless it is there.
fn shared(graph: &mut Graph, count: usize, node: Node) {
    if !graph.values.contains_key(&node.name) {
        let value = Value { name: node.name.clone(), ty: ElementType::I64, dims: vec![Dim::Fixed(count)] };
        graph.values.insert(node.name.clone(), value);
        graph.nodes.push(node);
    }
}

/// The product of all dimensions but the last.
fn rows(dims: &[Dim]) -> Dim {
    let rows = &dims[..dims.len().saturating_sub(1)];
    let fixed: usize = rows.iter().filter_map(size).product();
    let mut others = rows.iter().filter(|dim| size(dim).is_none());
    match (others.next(), others.next()) {
        (None, _) => Dim::Fixed(fixed),
        (Some(Dim::Named(name)), None) if !name.contains('+') => Dim::Named(format!("{name}*{fixed}")),
        _ => Dim::Unknown,
    }
}

fn size(dim: &Dim) -> Option<usize> {
    if let Dim::Fixed(n) = dim { Some(*n) } else { None }
}

/// A node named as its only output.
fn node(op_type: &'static str, output: &str, inputs: Vec<String>, attributes: Vec<(&'static str, Attribute)>) -> Node {
    let outputs = vec![output.to_owned()];
    Node { op_type, domain: "", name: output.to_owned(), inputs, outputs, attributes }
}

/// The matrix of initializer `name` without its transposition, as an initializer, and its rows.
fn as_stored(graph: &mut Graph, name: &str) -> (usize, String) {
    let found = graph.initializers.iter().find(|init| init.name == name);
    let Some((Source::Weight { weight, .. }, ty)) = found.map(|init| (&init.source, init.ty)) else {
        return (0, name.to_owned());
    };
    let (weight, stored) = (weight.clone(), weight.name().to_owned());
    let rows = weight.shape()[0];
    // Another type of the same tensor keeps the name apart.
    let taken = graph.initializers.iter().find(|init| init.name == stored).map(|init| init.ty);
    let stored = if taken.is_some_and(|taken| taken != ty) { format!("{stored}.{ty}") } else { stored };
    if !graph.initializers.iter().any(|init| init.name == stored) {
        let dims = weight.shape().to_vec();
        let source = Source::Weight { weight, transposed: false };
        graph.initializers.push(Initializer { name: stored.clone(), ty, dims, source });
    }
    (rows, stored)
}

/// A 1-D int64 constant.
fn ints(graph: &mut Graph, values: &[i64]) -> String {
    let text: Vec<String> = values.iter().map(i64::to_string).collect();
    let name = format!("ints[{}]", text.join(","));
    if !graph.initializers.iter().any(|init| init.name == name) {
        let source = Source::Bytes(values.iter().flat_map(|v| v.to_le_bytes()).collect());
        graph.initializers.push(Initializer {
            name: name.clone(),
            ty: ElementType::I64,
            dims: vec![values.len()],
            source,
        });
    }
    name
}

#[cfg(test)]
mod tests;
