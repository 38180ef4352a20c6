//! A graph while its nodes are replaced: the tensors and values that new nodes want.

use crate::graph::{Attribute, Dim, ElementType, Graph, Initializer, Node, Source, Value};
use crate::quantize::{Matrix, Order, Piece, Quantize};
use std::collections::BTreeMap;

/// A graph whose nodes are replaced.
pub(super) struct Rewriter<'a> {
    pub(super) graph: &'a mut Graph,
    pub(super) options: &'a Quantize,
    /// The matrices that initializers are.
    pub(super) sources: BTreeMap<String, Matrix>,
    made: BTreeMap<(String, Order), Tensors>,
}

/// Initializers of a quantised matrix.
#[derive(Debug, Clone)]
pub(super) struct Tensors {
    pub(super) data: String,
    pub(super) scales: String,
    pub(super) zero_points: Option<String>,
}

impl<'a> Rewriter<'a> {
    pub(super) fn new(graph: &'a mut Graph, options: &'a Quantize, sources: BTreeMap<String, Matrix>) -> Rewriter<'a> {
        Rewriter { graph, options, sources, made: BTreeMap::new() }
    }

    /// The initializers of a matrix in that order.
    pub(super) fn tensors(&mut self, matrix: &Matrix, order: Order) -> Tensors {
        self.tensors_of(matrix, order, None)
    }

    /// The same, of several experts as (experts, out, ..).
    pub(super) fn tensors_of(&mut self, matrix: &Matrix, order: Order, experts: Option<usize>) -> Tensors {
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
