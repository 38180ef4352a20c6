//! Which weights of a graph can be quantised: those of dense layers, of routed operators, and embeddings. Routers decide between
//! close scores, and stay as they are.

use crate::graph::{Attribute, ElementType, Graph, Node, Source};
use crate::quantize::matrix::Matrix;
use crate::quantize::search::Grid;
use moh_models::{Weight, checkpoint::pattern};
use moh_operators::{DOMAIN, Definition, GATES, RoutedCombine, RoutedMlp, RoutedProjection};
use std::collections::{BTreeMap, BTreeSet};

/// Smaller matrices save nothing.
const LEAST_NUMBERS: usize = 8192;

/// Matrices of fewer rows are those of routers, of the biases of positions, and of a few classes.
const LEAST_ROWS: usize = 32;

/// How a node uses a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// (out, in), which MatMul reads transposed.
    Dense,
    /// (rows, width).
    Embedding,
    /// Of a routed layer, (out, in).
    OutIn,
    /// The same, (in, out).
    InOut,
    /// The same, (num_heads, in, out).
    PerHead,
    /// Of a mixture of experts, (num_experts, in, out).
    Experts,
}

/// A weight that can be quantised.
#[derive(Debug)]
pub(super) struct Candidate {
    pub(super) weight: Weight,
    pub(super) kind: Kind,
    /// The type of the model around it.
    pub(super) ty: ElementType,
    /// Weights of the same node, which are quantised only together.
    pub(super) partners: Vec<String>,
}

impl Candidate {
    /// Whether the pattern is that of the tensor or of its layer, by its name in the model or in the file.
    pub(super) fn is_named(&self, name: &str) -> bool {
        let names = [self.weight.name(), self.weight.place(0).tensor];
        let layers = names.map(|name| name.rsplit_once('.').map_or(name, |(layer, _)| layer));
        names.iter().chain(&layers).any(|found| pattern::matches(name, found))
    }

    /// The weight as one that has its matrices in the last two axes.
    fn matrices(&self) -> Weight {
        let shape = self.weight.shape();
        match self.kind {
            Kind::InOut => self.weight.reshaped([shape[0] * shape[1], shape[2]]),
            _ => self.weight.clone(),
        }
    }

    /// Numbers of a row (in).
    pub(super) fn columns(&self) -> usize {
        let (weight, axis) = (self.matrices(), if self.kind.is_out_in() { 1 } else { 2 });
        weight.shape()[weight.shape().len() - axis]
    }

    /// What it is quantised to.
    pub(super) fn matrix(&self, grid: Grid, block: usize) -> Matrix {
        Matrix::new(&self.matrices(), !self.kind.is_out_in(), grid, block)
    }
}

/// The weights of `graph` that can be quantised, in the order of their use.
pub(super) fn candidates(graph: &Graph) -> Vec<Candidate> {
    let routers = routers(graph);
    let weights = graph.initializers.iter().filter_map(|init| match &init.source {
        Source::Weight { weight, transposed } => Some((init.name.as_str(), (weight, *transposed, init.ty))),
        _ => None,
    });
    let weights: BTreeMap<&str, (&Weight, bool, ElementType)> = weights.collect();
    let mut found: Vec<Candidate> = Vec::new();
    let mut others: BTreeSet<&str> = BTreeSet::new();
    for (i, node) in graph.nodes.iter().enumerate() {
        let of_node = |input: &String| weights.get(input.as_str()).map(|(weight, ..)| weight.name());
        for (input, name) in node.inputs.iter().enumerate() {
            let Some(&(weight, transposed, ty)) = weights.get(name.as_str()) else { continue };
            let kind = kind(node, input, weight, transposed).filter(|_| !routers.contains(&i));
            let kind = kind.filter(|kind| is_large(weight, *kind));
            let partners = match kind {
                Some(Kind::Experts) => node.inputs[1..3].iter().filter_map(of_node).map(str::to_owned).collect(),
                _ => Vec::new(),
            };
            match (kind, found.iter().find(|other| other.weight.name() == weight.name())) {
                (None, _) => drop(others.insert(weight.name())),
                (Some(kind), None) => found.push(Candidate { weight: weight.clone(), kind, ty, partners }),
                (Some(kind), Some(other)) => {
                    let same = kind.is_out_in() && other.kind.is_out_in() || kind == other.kind;
                    if !same || ty != other.ty {
                        others.insert(weight.name());
                    }
                }
            }
        }
    }
    found.retain(|candidate| !others.contains(candidate.weight.name()));
    let names: BTreeSet<String> = found.iter().map(|candidate| candidate.weight.name().to_owned()).collect();
    found.retain(|candidate| candidate.partners.iter().all(|name| names.contains(name)));
    found
}

impl Kind {
    fn is_out_in(self) -> bool {
        matches!(self, Kind::Dense | Kind::Embedding | Kind::OutIn)
    }
}

fn is_large(weight: &Weight, kind: Kind) -> bool {
    let shape = weight.shape();
    let rows = match kind {
        Kind::Dense | Kind::Embedding | Kind::OutIn => shape[0],
        Kind::PerHead => shape[0] * shape[2],
        Kind::InOut | Kind::Experts => shape[2],
    };
    weight.elements() >= LEAST_NUMBERS && rows >= LEAST_ROWS
}

/// How the node uses its input, which is that weight.
fn kind(node: &Node, input: usize, weight: &Weight, transposed: bool) -> Option<Kind> {
    let rank = weight.shape().len();
    match (node.domain, node.op_type, input) {
        ("", "MatMul", 1) if transposed => Some(Kind::Dense),
        ("", "Gather", 0) if rank == 2 && !transposed && axis(node) == 0 => Some(Kind::Embedding),
        (DOMAIN, op, 1) if op == RoutedProjection::NAME => Some(if rank == 3 { Kind::PerHead } else { Kind::OutIn }),
        (DOMAIN, op, 1) if op == RoutedCombine::NAME => Some(if rank == 3 { Kind::InOut } else { Kind::OutIn }),
        (DOMAIN, op, 1 | 2) if op == RoutedMlp::NAME => Some(Kind::Experts),
        _ => None,
    }
}

fn axis(node: &Node) -> i64 {
    let found = node.attributes.iter().find_map(|(name, value)| match value {
        Attribute::Int(axis) if *name == "axis" => Some(*axis),
        _ => None,
    });
    found.unwrap_or(0)
}

/// The nodes of whose values only gates are made.
fn routers(graph: &Graph) -> BTreeSet<usize> {
    let (mut producers, mut readers) = (BTreeMap::new(), BTreeMap::<&str, Vec<usize>>::new());
    for (i, node) in graph.nodes.iter().enumerate() {
        producers.extend(node.outputs.iter().map(|output| (output.as_str(), i)));
        for input in &node.inputs {
            readers.entry(input).or_default().push(i);
        }
    }
    let gates = graph.outputs.iter().filter(|output| output.name.starts_with(GATES));
    let mut routers = BTreeSet::new();
    // An output that shows gates, and the node that makes them.
    let mut open: Vec<usize> = gates.filter_map(|output| producers.get(output.name.as_str()).copied()).collect();
    for &shown in &open.clone() {
        open.extend(graph.nodes[shown].inputs.iter().filter_map(|gates| producers.get(gates.as_str())));
    }
    while let Some(i) = open.pop() {
        if !routers.insert(i) {
            continue;
        }
        for input in &graph.nodes[i].inputs {
            let only_gates = |name: &str| readers.get(name).is_some_and(|all| all.iter().all(|i| routers.contains(i)));
            if let Some(&producer) = producers.get(input.as_str()).filter(|_| only_gates(input)) {
                open.push(producer);
            }
        }
    }
    routers
}
