//! Nodes that read quantised weights, in the place of those that read the checkpoint's.

use super::embedding;
use super::rewriter::{Rewriter, Tensors};
use crate::graph::{Attribute, Dim, Graph, Node, Source};
use crate::quantize::{Activations, Form, Matrix, Order, Quantize};
use moh_operators::{DOMAIN, Definition, LinearNBits, RoutedCombine, RoutedMlp, RoutedProjection};
use std::collections::BTreeMap;

/// The domain of onnxruntime's own operators.
pub(crate) const MICROSOFT: &str = "com.microsoft";

/// Replaces every node that uses one of the matrices.
pub(super) fn rewrite(graph: &mut Graph, options: &Quantize, matrices: &BTreeMap<String, Matrix>) {
    let sources = graph.initializers.iter().filter_map(|init| match &init.source {
        Source::Weight { weight, .. } => Some((init.name.clone(), matrices.get(weight.name())?.clone())),
        _ => None,
    });
    let sources = sources.collect();
    let nodes = std::mem::take(&mut graph.nodes);
    let mut rewriter = Rewriter::new(graph, options, sources);
    for node in nodes {
        rewriter.node(node);
    }
    let sources = rewriter.sources;
    graph.initializers.retain(|init| !sources.contains_key(&init.name));
}

impl Rewriter<'_> {
    fn node(&mut self, mut node: Node) {
        let Some((input, matrix)) =
            node.inputs.iter().enumerate().find_map(|(i, name)| Some((i, self.sources.get(name)?.clone())))
        else {
            self.graph.nodes.push(node);
            return;
        };
        match (node.domain, node.op_type, self.options.form) {
            ("", "Gather", _) => embedding::write(self, &node, &matrix),
            ("", _, Form::Qdq) => {
                let weight = self.dequantized(&node, &matrix);
                node.inputs[input] = weight;
                self.graph.nodes.push(node);
            }
            ("", _, Form::Nbits) => self.matmul_nbits(node, &matrix),
            ("", _, Form::Moh) => self.linear_nbits(node, &matrix),
            _ => self.routed(node),
        }
    }

    /// A node that makes the matrix (in, out) in floating point, for `reader` alone: onnxruntime fuses the two.
    fn dequantized(&mut self, reader: &Node, matrix: &Matrix) -> String {
        let Tensors { data, scales, zero_points } = self.tensors(matrix, Order::Columns);
        let name = format!("{}/DequantizeLinear", reader.name.strip_suffix("/MatMul").unwrap_or(&reader.name));
        let attributes = vec![("axis", Attribute::Int(0)), ("block_size", Attribute::Int(matrix.block() as i64))];
        let inputs = [data, scales].into_iter().chain(zero_points).collect();
        let dims = vec![Dim::Fixed(matrix.columns()), Dim::Fixed(matrix.rows())];
        self.push("DequantizeLinear", name, inputs, attributes, matrix.scale_type(), dims)
    }

    fn matmul_nbits(&mut self, node: Node, matrix: &Matrix) {
        let Tensors { data, scales, zero_points } = self.tensors(matrix, Order::Rows);
        let x = node.inputs.into_iter().take(1);
        let mut attributes =
            vec![("K", Attribute::Int(matrix.columns() as i64)), ("N", Attribute::Int(matrix.rows() as i64))];
        attributes.extend(self.format(matrix));
        self.graph.nodes.push(Node {
            op_type: "MatMulNBits",
            domain: MICROSOFT,
            inputs: x.chain([data, scales]).chain(zero_points).collect(),
            attributes,
            ..node
        });
    }

    fn linear_nbits(&mut self, node: Node, matrix: &Matrix) {
        let Tensors { data, scales, zero_points } = self.tensors(matrix, Order::Rows);
        let mut inputs: Vec<String> = node.inputs.into_iter().take(1).chain([data, scales]).collect();
        // Optional inputs are told apart by their places.
        if let Some(zero_points) = zero_points {
            inputs.push(self.zeros(matrix, None));
            inputs.extend(self.neutral(matrix));
            inputs.push(zero_points);
        }
        self.graph.nodes.push(Node {
            op_type: LinearNBits::NAME,
            domain: DOMAIN,
            inputs,
            attributes: self.format(matrix).into(),
            ..node
        });
    }

    /// How a matrix is quantised, as attributes.
    fn format(&self, matrix: &Matrix) -> [(&'static str, Attribute); 3] {
        let accuracy_level = match self.options.activations {
            Activations::Float => 0,
            Activations::Int8 => 4,
        };
        [
            ("bits", Attribute::Int(self.options.bits.count() as i64)),
            ("block_size", Attribute::Int(matrix.block() as i64)),
            ("accuracy_level", Attribute::Int(accuracy_level)),
        ]
    }

    /// An operator of `ai.moh` as its form with quantised weights: scales follow the weights, zero points come last.
    fn routed(&mut self, node: Node) {
        let op_type = match node.op_type {
            RoutedProjection::NAME => "RoutedProjectionNBits",
            RoutedCombine::NAME => "RoutedCombineNBits",
            RoutedMlp::NAME => "RoutedMLPNBits",
            other => other,
        };
        let of_experts = |matrix: &Matrix| (node.op_type == RoutedMlp::NAME).then(|| matrix.matrices());
        let (mut inputs, mut zero_points, mut matrices) = (Vec::new(), Vec::new(), Vec::new());
        for name in &node.inputs {
            match self.sources.get(name).cloned() {
                None => inputs.push(name.clone()),
                Some(matrix) => {
                    let tensors = self.tensors_of(&matrix, Order::Rows, of_experts(&matrix));
                    inputs.extend([tensors.data, tensors.scales]);
                    zero_points.extend(tensors.zero_points);
                    matrices.push(matrix);
                }
            }
        }
        // Optional inputs are told apart by their places: biases stand before zero points.
        if !zero_points.is_empty() && node.inputs.len() == 2 + matrices.len() {
            for matrix in &matrices {
                let zeros = self.zeros(matrix, of_experts(matrix));
                inputs.push(zeros);
            }
        }
        if let (false, RoutedCombine::NAME, [matrix]) = (zero_points.is_empty(), node.op_type, &matrices[..]) {
            let neutral = self.neutral(matrix);
            inputs.extend(neutral);
        }
        inputs.extend(zero_points);
        let attributes = node.attributes.iter().filter(|(name, _)| *name != "weight_layout").cloned();
        // Matrices of one node have blocks of one size.
        let format = matrices.first().map(|matrix| self.format(matrix));
        let attributes = attributes.chain(format.into_iter().flatten()).collect();
        self.graph.nodes.push(Node { op_type, inputs, attributes, ..node });
    }

    /// A gate and a residual that change nothing.
    fn neutral(&mut self, matrix: &Matrix) -> [String; 2] {
        let ty = matrix.scale_type();
        [1, 0].map(|number| self.graph.constant(ty, vec![1], number))
    }

    /// A bias of zeros for a matrix.
    fn zeros(&mut self, matrix: &Matrix, experts: Option<usize>) -> String {
        let dims = match experts {
            Some(experts) => vec![experts, matrix.rows() / experts],
            None => vec![matrix.rows()],
        };
        self.graph.constant(matrix.scale_type(), dims, 0)
    }
}
