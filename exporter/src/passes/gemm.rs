//! Wide linear layers with a bias as Gemm, over tokens of all rows of the batch: onnxruntime adds the bias while it writes the
//! product, in place of reading and writing it once more. The weight stays as the checkpoint stores it.
//!
//! Only where the number of tokens is known: the product's shape is then a constant. What fits into a core's cache is left
//! alone, because flattening a value that others read as well copies it.

use crate::graph::{Attribute, Dim, ElementType, Graph, Initializer, Node, Source, Value};
use std::collections::BTreeMap;

/// Elements of a row of the batch from which a product counts as wide: 2 MB of float32.
const WIDE: usize = 1 << 19;

pub(super) fn run(graph: &mut Graph) {
    let mut readers: BTreeMap<String, usize> = BTreeMap::new();
    for name in graph.nodes.iter().flat_map(|node| &node.inputs).chain(graph.outputs.iter().map(|output| &output.name))
    {
        *readers.entry(name.clone()).or_default() += 1;
    }
    let mut nodes = std::mem::take(&mut graph.nodes).into_iter().peekable();
    while let Some(product) = nodes.next() {
        let biased = nodes.peek().filter(|add| readers.get(&product.outputs[0]) == Some(&1) && adds(add, &product));
        match biased.and_then(|add| Layer::of(graph, &product, add)) {
            Some(layer) => {
                layer.write(graph, &product.name);
                nodes.next();
            }
            None => graph.nodes.push(product),
        }
    }
}

/// Whether `add` is the addition of something to the result of `product`.
fn adds(add: &Node, product: &Node) -> bool {
    product.op_type == "MatMul" && add.op_type == "Add" && add.inputs[0] == product.outputs[0]
}

/// A linear layer with a bias.
struct Layer {
    x: Value,
    /// The name of its matrix (in, out) among the initializers.
    weight: String,
    bias: String,
    y: Value,
}

impl Layer {
    fn of(graph: &Graph, product: &Node, add: &Node) -> Option<Layer> {
        let (weight, bias) = (&product.inputs[1], &add.inputs[1]);
        let initializer = |name: &String| graph.initializers.iter().find(|init| init.name == *name);
        let is_matrix = matches!(initializer(weight)?.source, Source::Weight { transposed: true, .. });
        let is_vector = initializer(bias)?.dims.len() == 1;
        let (x, y) = (graph.value(&product.inputs[0])?, graph.value(&add.outputs[0])?);
        let row: Option<Vec<usize>> = y.dims.get(1..)?.iter().map(size).collect();
        let fits = is_matrix && is_vector && y.dims.len() > 2 && row?.iter().product::<usize>() >= WIDE;
        fits.then(|| Layer { x, weight: weight.clone(), bias: bias.clone(), y })
    }

    fn write(&self, graph: &mut Graph, name: &str) {
        let (columns, matrix) = as_stored(graph, &self.weight);
        let (module, ty) = (name.strip_suffix("/MatMul").unwrap_or(name), self.x.ty);
        let value = |graph: &mut Graph, name: String, last: usize| {
            let dims = vec![Dim::Unknown, Dim::Fixed(last)];
            graph.values.insert(name.clone(), Value { name: name.clone(), ty, dims });
            name
        };
        let width = self.x.dims.last().and_then(size).unwrap_or(0);
        let x = value(graph, format!("{name}/rows"), width);
        let shape = ints(graph, &[-1, width as i64]);
        graph.nodes.push(node("Reshape", &x, vec![self.x.name.clone(), shape], vec![]));
        let y = value(graph, format!("{module}/Gemm"), columns);
        let transposed = vec![("transB", Attribute::Int(1))];
        graph.nodes.push(node("Gemm", &y, vec![x, matrix, self.bias.clone()], transposed));
        let dims: Vec<i64> = self.y.dims.iter().map(|dim| size(dim).map_or(-1, |n| n as i64)).collect();
        let shape = ints(graph, &dims);
        graph.nodes.push(node("Reshape", &self.y.name, vec![y, shape], vec![]));
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
mod tests {
    use super::*;
    use moh_models::Weight;

    fn graph(tokens: Dim) -> Graph {
        let batch = || Dim::Named("batch".to_owned());
        let value = |name: &str, dims: Vec<Dim>| Value { name: name.to_owned(), ty: ElementType::F32, dims };
        let weight = Weight::from_f32("fc.weight", [5, 3], vec![0.0; 15]);
        let bias = Weight::from_f32("fc.bias", [5], vec![0.0; 5]);
        let initializer = |name: &str, dims: Vec<usize>, weight: Weight, transposed| Initializer {
            name: name.to_owned(),
            ty: ElementType::F32,
            dims,
            source: Source::Weight { weight, transposed },
        };
        let strings = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let y = |name: &str| value(name, vec![batch(), tokens.clone(), Dim::Fixed(5)]);
        Graph {
            name: String::new(),
            opset: 21,
            ir_version: 10,
            inputs: vec![value("x", vec![batch(), tokens.clone(), Dim::Fixed(3)])],
            outputs: vec![y("fc/Add")],
            initializers: vec![
                initializer("fc.weight.T", vec![3, 5], weight, true),
                initializer("fc.bias", vec![5], bias, false),
            ],
            nodes: vec![
                node("MatMul", "fc/MatMul", strings(&["x", "fc.weight.T"]), vec![]),
                node("Add", "fc/Add", strings(&["fc/MatMul", "fc.bias"]), vec![]),
            ],
            values: ["fc/MatMul", "fc/Add"].map(|name| (name.to_owned(), y(name))).into(),
            functions: vec![],
            metadata: BTreeMap::new(),
        }
    }

    #[test]
    fn wide_products_are_flattened() {
        let mut graph = graph(Dim::Fixed(1 << 17));
        run(&mut graph);
        let found: Vec<(&str, Vec<&str>)> =
            graph.nodes.iter().map(|n| (n.op_type, n.inputs.iter().map(String::as_str).collect())).collect();
        let expected = [
            ("Reshape", vec!["x", "ints[-1,3]"]),
            ("Gemm", vec!["fc/MatMul/rows", "fc.weight", "fc.bias"]),
            ("Reshape", vec!["fc/Gemm", "ints[-1,131072,5]"]),
        ];
        assert_eq!(found, expected);
        assert_eq!(graph.nodes[2].outputs, ["fc/Add"]);
    }

    #[test]
    fn narrow_and_symbolic_products_stay() {
        for tokens in [Dim::Fixed(7), Dim::Named("sequence".to_owned())] {
            let mut graph = graph(tokens);
            run(&mut graph);
            assert_eq!(graph.nodes.len(), 2);
        }
    }
}
