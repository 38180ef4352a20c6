//! Depthwise convolutions of images whose channels come last, with the activation function after them, as `ai.moh.DepthwiseConv`, whose body
//! is what it replaces: ONNX's convolution wants channels first, so runtimes put all numbers in another order before it and after it.

use super::Pass;
use super::dense::{DenseStyle, Readers, activation, readers};
use crate::error::Error;
use crate::graph::{Attribute, Dim, Graph, Node};
use moh_operators::depthwise_conv::Then;
use moh_operators::routed_mlp::Activation;
use moh_operators::{DOMAIN, Definition, DepthwiseConv};

/// The pass.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct Convolutions {
    /// How depthwise convolutions are written: moh is faster on CPUs with libmoh_ops [default: onnx, or as --for says].
    #[arg(id = "convolutions", long = "convolutions", value_enum, value_name = "STYLE")]
    pub style: Option<DenseStyle>,
}

impl Pass for Convolutions {
    fn run(&self, graph: &mut Graph) -> Result<(), Error> {
        if self.style == Some(DenseStyle::Moh) {
            let readers = readers(graph);
            let found: Vec<Convolution> =
                (0..graph.nodes.len()).filter_map(|i| Convolution::of(graph, &readers, i)).collect();
            let gone: Vec<usize> = found.iter().flat_map(|found| found.replace(graph)).collect();
            let nodes = std::mem::take(&mut graph.nodes).into_iter().enumerate();
            graph.nodes = nodes.filter(|(i, _)| !gone.contains(i)).map(|(_, node)| node).collect();
        }
        Ok(())
    }
}

/// A convolution between two transpositions, and what follows.
struct Convolution {
    /// Numbers of the nodes: from channels last to first, the convolution, and back.
    nodes: [usize; 3],
    /// A node after them that only gives the output another shape.
    reshape: Option<usize>,
    /// The function after that, and its nodes.
    activation: Option<(Activation, Vec<usize>)>,
    channels: usize,
}

impl Convolution {
    /// The one that node `i` is, if it is one that the operator computes.
    fn of(graph: &Graph, readers: &Readers, i: usize) -> Option<Convolution> {
        let node = &graph.nodes[i];
        let weight = graph.value(node.inputs.get(1)?)?;
        let [Dim::Fixed(channels), Dim::Fixed(1), Dim::Fixed(rows), Dim::Fixed(columns)] = weight.dims[..] else {
            return None;
        };
        let attribute = |name: &str| node.attributes.iter().find(|(found, _)| *found == name).map(|(_, value)| value);
        let are = |name: &str, expected: &[usize]| {
            let expected = Attribute::Ints(expected.iter().map(|&n| n as i64).collect());
            attribute(name) == Some(&expected)
        };
        let [above, left] = [rows / 2, columns / 2];
        let same_size = rows % 2 == 1 && columns % 2 == 1 && are("pads", &[above, left, above, left]);
        let each_pixel = are("strides", &[1, 1]) && attribute("dilations").is_none() && attribute("auto_pad").is_none();
        let depthwise = attribute("group") == Some(&Attribute::Int(channels as i64));
        if node.op_type != "Conv" || !node.domain.is_empty() || !same_size || !each_pixel || !depthwise {
            return None;
        }
        let is_transposition = |i: usize, perm: [i64; 4]| {
            let node = graph.nodes.get(i).filter(|node| node.op_type == "Transpose" && node.domain.is_empty());
            node.is_some_and(|node| node.attributes.contains(&("perm", Attribute::Ints(perm.to_vec()))))
        };
        let only = |output: &String| match readers.get(output)?[..] {
            [Some(reader)] => Some(reader),
            _ => None,
        };
        let before = graph.nodes.iter().position(|before| before.outputs.contains(&node.inputs[0]))?;
        let after = only(&node.outputs[0])?;
        let is_between = is_transposition(before, [0, 3, 1, 2]) && is_transposition(after, [0, 2, 3, 1]);
        if !is_between || only(&node.inputs[0]) != Some(i) {
            return None;
        }
        let is_reshape = |&i: &usize| graph.nodes[i].op_type == "Reshape" && graph.nodes[i].domain.is_empty();
        let mut found = Convolution { nodes: [before, i, after], reshape: None, activation: None, channels };
        let output = &graph.nodes[after].outputs[0];
        if let Some(reshape) = only(output).filter(is_reshape)
            && graph.nodes[reshape].inputs[0] == *output
        {
            found.activation = activation(graph, readers, &graph.nodes[reshape].outputs[0]);
            found.reshape = found.activation.is_some().then_some(reshape);
        } else {
            found.activation = activation(graph, readers, output);
        }
        Some(found)
    }

    /// Writes the operator in the place of the last transposition. Returns the numbers of the nodes that are no longer needed.
    fn replace(&self, graph: &mut Graph) -> Vec<usize> {
        let [before, conv, after] = self.nodes;
        let Node { name, mut inputs, .. } = graph.nodes[conv].clone();
        inputs[0].clone_from(&graph.nodes[before].inputs[0]);
        let then = match &self.activation {
            Some((activation, _)) => Then::ALL.iter().find(|then| then.activation() == Some(*activation)),
            None => Some(&Then::Nothing),
        };
        let mut gone = vec![before, conv];
        // The last node of the function makes its output; now it is the one before.
        if let Some((_, parts)) = &self.activation
            && let Some(last) = parts.last()
        {
            let output = graph.nodes[*last].outputs.clone();
            let maker = &mut graph.nodes[self.reshape.unwrap_or(after)];
            let inner = std::mem::replace(&mut maker.outputs, output);
            inner.iter().for_each(|name| drop(graph.values.remove(name)));
            gone.extend(parts);
        }
        for &i in &gone {
            let made: Vec<String> = graph.nodes[i].outputs.clone();
            let is_made_again = |name: &String| graph.nodes[self.reshape.unwrap_or(after)].outputs.contains(name);
            made.iter().filter(|name| !is_made_again(name)).for_each(|name| drop(graph.values.remove(name)));
        }
        graph.nodes[after] = Node {
            op_type: DepthwiseConv::OPERATOR.name,
            domain: DOMAIN,
            name,
            inputs,
            outputs: graph.nodes[after].outputs.clone(),
            attributes: vec![
                ("channels", Attribute::Int(self.channels as i64)),
                ("activation", Attribute::Int(then.map_or(Then::Nothing, |&then| then) as i64)),
            ],
        };
        gone
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::graph::{ElementType, Initializer, Source, Value};
    use crate::passes::Options;
    use std::collections::BTreeMap;

    const MOH: Convolutions = Convolutions { style: Some(DenseStyle::Moh) };
    const CHANNELS: usize = 6;

    fn node(op_type: &'static str, inputs: &[&str], output: &str) -> Node {
        Node {
            op_type,
            domain: "",
            name: format!("a/{output}"),
            inputs: strings(inputs),
            outputs: strings(&[output]),
            attributes: vec![],
        }
    }

    fn strings(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    fn transposition(input: &str, output: &str, perm: [i64; 4]) -> Node {
        Node { attributes: vec![("perm", Attribute::Ints(perm.to_vec()))], ..node("Transpose", &[input], output) }
    }

    fn conv(group: usize, pads: [i64; 4], stride: i64) -> Node {
        let attributes = vec![
            ("group", Attribute::Int(group as i64)),
            ("pads", Attribute::Ints(pads.to_vec())),
            ("strides", Attribute::Ints(vec![stride; 2])),
        ];
        Node { attributes, ..node("Conv", &["planes", "weight", "bias"], "sums") }
    }

    /// From pixels to pixels.
    fn layer(conv: Node) -> Vec<Node> {
        vec![
            transposition("x", "planes", [0, 3, 1, 2]),
            conv,
            transposition("sums", "pixels", [0, 2, 3, 1]),
            node("Reshape", &["pixels", "shape"], "tokens"),
        ]
    }

    fn depthwise() -> Vec<Node> {
        layer(conv(CHANNELS, [1, 2, 1, 2], 1))
    }

    /// The last node makes the output.
    fn graph(nodes: Vec<Node>) -> Graph {
        let value = |name: &str| Value {
            name: name.to_owned(),
            ty: ElementType::F32,
            dims: [Dim::Named("batch".to_owned()), Dim::Fixed(4), Dim::Fixed(5), Dim::Fixed(CHANNELS)].to_vec(),
        };
        let constant = |name: &str, dims: &[usize]| Initializer {
            name: name.to_owned(),
            ty: ElementType::F32,
            source: Source::Bytes(ElementType::F32.bytes_of(0.5).repeat(dims.iter().product())),
            dims: dims.to_vec(),
        };
        Graph {
            name: "convolutions".to_owned(),
            opset: 21,
            ir_version: 10,
            inputs: vec![value("x")],
            outputs: nodes.last().map(|node| value(&node.outputs[0])).into_iter().collect(),
            initializers: vec![constant("weight", &[CHANNELS, 1, 3, 5]), constant("bias", &[CHANNELS])],
            values: nodes.iter().map(|node| (node.outputs[0].clone(), value(&node.outputs[0]))).collect(),
            nodes,
            functions: vec![],
            metadata: BTreeMap::new(),
        }
    }

    /// Type, inputs and outputs of a node.
    type Written = (&'static str, Vec<String>, Vec<String>);

    /// The nodes, and the names of the values.
    fn written(nodes: Vec<Node>) -> (Vec<Written>, Vec<String>) {
        let mut graph = graph(nodes);
        MOH.run(&mut graph).unwrap();
        let nodes = graph.nodes.into_iter().map(|node| (node.op_type, node.inputs, node.outputs));
        (nodes.collect(), graph.values.into_keys().collect())
    }

    fn types(nodes: Vec<Node>) -> Vec<&'static str> {
        written(nodes).0.into_iter().map(|(op_type, ..)| op_type).collect()
    }

    #[test]
    fn a_convolution_and_its_function_are_one_node() {
        let inputs = strings(&["x", "weight", "bias"]);
        for (function, number) in [("Gelu", 1), ("Relu", 0)] {
            let nodes = [depthwise(), vec![node(function, &["tokens"], "y")]].concat();
            let wanted = vec![
                ("DepthwiseConv", inputs.clone(), strings(&["pixels"])),
                ("Reshape", strings(&["pixels", "shape"]), strings(&["y"])),
            ];
            assert_eq!(written(nodes.clone()), (wanted, strings(&["pixels", "y"])));
            let mut graph = graph(nodes);
            MOH.run(&mut graph).unwrap();
            let Node { domain, name, attributes, .. } = &graph.nodes[0];
            assert_eq!((*domain, &name[..]), (DOMAIN, "a/sums"));
            let wanted = [("channels", Attribute::Int(CHANNELS as i64)), ("activation", Attribute::Int(number))];
            assert_eq!(attributes[..], wanted);
        }
        // Without another shape between them.
        let mut nodes = depthwise();
        nodes[3] = node("Gelu", &["pixels"], "y");
        let wanted = vec![("DepthwiseConv", inputs, strings(&["y"]))];
        assert_eq!(written(nodes), (wanted, strings(&["y"])));
    }

    #[test]
    fn silu_is_a_function_too() {
        let silu = [node("Sigmoid", &["tokens"], "gate"), node("Mul", &["tokens", "gate"], "y")];
        let found = written([depthwise(), silu.to_vec()].concat());
        assert_eq!(found.0.iter().map(|(op_type, ..)| *op_type).collect::<Vec<_>>(), ["DepthwiseConv", "Reshape"]);
        assert_eq!(found.1, ["pixels", "y"]);
    }

    #[test]
    fn a_function_that_does_not_follow_all_of_it_stays() {
        assert_eq!(written(depthwise()).0[1].2, ["tokens"]);
        let two = [node("Gelu", &["tokens"], "y"), node("Add", &["y", "tokens"], "z")];
        assert_eq!(types([depthwise(), two.to_vec()].concat()), ["DepthwiseConv", "Reshape", "Gelu", "Add"]);
    }

    #[test]
    fn other_convolutions_stay() {
        let onnx = ["Transpose", "Conv", "Transpose", "Reshape"];
        for conv in [conv(1, [1, 2, 1, 2], 1), conv(CHANNELS, [1, 1, 1, 1], 1), conv(CHANNELS, [1, 2, 1, 2], 2)] {
            assert_eq!(types(layer(conv)), onnx);
        }
        let mut dilated = conv(CHANNELS, [1, 2, 1, 2], 1);
        dilated.attributes.push(("dilations", Attribute::Ints(vec![2, 2])));
        assert_eq!(types(layer(dilated)), onnx);
        // Another order of dimensions, or a value that others read as well.
        let mut nodes = depthwise();
        nodes[2] = transposition("sums", "pixels", [0, 3, 2, 1]);
        assert_eq!(types(nodes), onnx);
        for name in ["planes", "sums"] {
            let nodes = [depthwise(), vec![node("Neg", &[name], "y")]].concat();
            assert_eq!(types(nodes), [&onnx[..], &["Neg"]].concat());
        }
    }

    #[test]
    fn other_styles_keep_onnx_convolutions() {
        for style in [None, Some(DenseStyle::Onnx)] {
            let mut graph = graph(depthwise());
            Convolutions { style }.run(&mut graph).unwrap();
            assert_eq!(graph.nodes[1].op_type, "Conv");
        }
        // Linked weights do not matter.
        let mut options = Options { convolutions: MOH, ..Options::default() };
        options.settle(None, true);
        assert_eq!(options.convolutions.style, MOH.style);
    }
}
