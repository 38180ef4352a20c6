//! Nodes that read quantised weights, in the place of those that read the checkpoint's.

use super::embedding;
use crate::graph::{Attribute, Dim, ElementType, Graph, Initializer, Node, Source, Value};
use crate::quantize::{Activations, Form, Matrix, Order, Piece, Quantize};
use moh_operators::{DOMAIN, Definition, LinearNBits, RoutedCombine, RoutedMlp, RoutedProjection};
use std::collections::BTreeMap;

/// The domain of onnxruntime's own operators.
pub(crate) const MICROSOFT: &str = "com.microsoft";

/// A graph whose nodes are replaced.
pub(super) struct Rewriter<'a> {
    pub(super) graph: &'a mut Graph,
    pub(super) options: &'a Quantize,
    /// The matrices that initializers are.
    sources: BTreeMap<String, Matrix>,
    made: BTreeMap<(String, Order), Tensors>,
}

/// Initializers of a quantised matrix.
#[derive(Debug, Clone)]
pub(super) struct Tensors {
    pub(super) data: String,
    pub(super) scales: String,
    pub(super) zero_points: Option<String>,
}

/// Replaces every node that uses one of the matrices.
pub(super) fn rewrite(graph: &mut Graph, options: &Quantize, matrices: &BTreeMap<String, Matrix>) {
    let sources = graph.initializers.iter().filter_map(|init| match &init.source {
        Source::Weight { weight, .. } => Some((init.name.clone(), matrices.get(weight.name())?.clone())),
        _ => None,
    });
    let sources = sources.collect();
    let nodes = std::mem::take(&mut graph.nodes);
    let mut rewriter = Rewriter { graph, options, sources, made: BTreeMap::new() };
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

    /// The initializers of a matrix in that order.
    pub(super) fn tensors(&mut self, matrix: &Matrix, order: Order) -> Tensors {
        self.tensors_of(matrix, order, None)
    }

    /// The same, of several experts as (experts, out, ..).
    fn tensors_of(&mut self, matrix: &Matrix, order: Order, experts: Option<usize>) -> Tensors {
        let tensor = matrix.weight().name().to_owned();
        let key = (tensor.clone(), order);
        if let Some(made) = self.made.get(&key) {
            return made.clone();
        }
        let base = if order == Order::Columns { format!("{tensor}.T") } else { tensor };
        let pieces = [(Piece::Data, "quantized"), (Piece::Scales, "scales"), (Piece::ZeroPoints, "zero_points")];
        let names = pieces.map(|(piece, suffix)| {
            let name = format!("{base}.{suffix}");
            if piece != Piece::ZeroPoints || self.options.zero_points {
                let (ty, mut dims) = order.tensor(matrix, piece);
                if let Some(experts) = experts {
                    dims.splice(0..1, [experts, dims[0] / experts]);
                }
                let source = Source::Quantized { matrix: matrix.clone(), order, piece };
                self.graph.initializers.push(Initializer { name: name.clone(), ty, dims, source });
            }
            name
        });
        let [data, scales, zero_points] = names;
        let zero_points = self.options.zero_points.then_some(zero_points);
        let made = Tensors { data, scales, zero_points };
        self.made.insert(key, made.clone());
        made
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
        attributes.extend(self.format());
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
        // Optional inputs are told apart by their places.
        let optional = zero_points.map(|zero_points| [self.zeros(matrix, None), zero_points]);
        let x = node.inputs.into_iter().take(1);
        self.graph.nodes.push(Node {
            op_type: LinearNBits::NAME,
            domain: DOMAIN,
            inputs: x.chain([data, scales]).chain(optional.into_iter().flatten()).collect(),
            attributes: self.format().into(),
            ..node
        });
    }

    /// How matrices are quantised, as attributes.
    fn format(&self) -> [(&'static str, Attribute); 3] {
        let accuracy_level = match self.options.activations {
            Activations::Float => 0,
            Activations::Int8 => 4,
        };
        [
            ("bits", Attribute::Int(self.options.bits.count() as i64)),
            ("block_size", Attribute::Int(self.options.block as i64)),
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
        inputs.extend(zero_points);
        let attributes = node.attributes.iter().filter(|(name, _)| *name != "weight_layout").cloned();
        let attributes = attributes.chain(self.format()).collect();
        self.graph.nodes.push(Node { op_type, inputs, attributes, ..node });
    }

    /// A bias of zeros for a matrix.
    fn zeros(&mut self, matrix: &Matrix, experts: Option<usize>) -> String {
        let dims = match experts {
            Some(experts) => vec![experts, matrix.rows() / experts],
            None => vec![matrix.rows()],
        };
        let ty = matrix.scale_type();
        let shape: Vec<String> = dims.iter().map(usize::to_string).collect();
        let bytes = vec![0; matrix.rows() * ty.size()];
        self.constant(format!("{DOMAIN}/zeros[{}].{ty}", shape.join(",")), ty, dims, bytes)
    }

    /// The initializer of that name, which is made where it is not there.
    pub(super) fn constant(&mut self, name: String, ty: ElementType, dims: Vec<usize>, bytes: Vec<u8>) -> String {
        if !self.graph.initializers.iter().any(|init| init.name == name) {
            let source = Source::Bytes(bytes);
            self.graph.initializers.push(Initializer { name: name.clone(), ty, dims, source });
        }
        name
    }

    /// Adds a standard operator with one output, which is named as the node.
    pub(super) fn push(
        &mut self,
        op_type: &'static str,
        name: String,
        inputs: Vec<String>,
        attributes: Vec<(&'static str, Attribute)>,
        ty: ElementType,
        dims: Vec<Dim>,
    ) -> String {
        let outputs = vec![name.clone()];
        self.graph.values.insert(name.clone(), Value { name: name.clone(), ty, dims });
        self.graph.nodes.push(Node { op_type, domain: "", name: name.clone(), inputs, outputs, attributes });
        name
    }
}
