//! The memory that a model will need where it runs, reckoned from its graph.

use crate::graph::{Attribute, Dim, ElementType, Graph, Value};
use crate::target::Row;
use crate::text::bytes;
use moh_operators::{CacheUpdate, DOMAIN, Definition};
use moh_runtime::names;
use serde::Serialize;
use std::collections::{BTreeSet, HashMap};
use std::fmt;

/// New tokens of the longest call that is reckoned with.
const TOKENS: usize = 512;

/// Cached tokens, unless the model takes fewer.
const CONTEXT: usize = 4096;

/// Bytes that one session needs at batch size 1. What the runtime takes for itself, some 100 MB, is not in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// The weights, as they are written.
    pub weights: u64,
    /// What the runtime keeps of them besides: float32 for float16, or parts of quantised weights in another order.
    pub copies: u64,
    /// The caches of `context` tokens, twice where a call reads one and writes another.
    pub cache: u64,
    /// Cached tokens; 0 for models without a cache.
    pub context: usize,
    /// The most that a call's values take at one time, in the order of the nodes.
    pub activations: u64,
    /// New tokens of that call; 0 where its size is fixed otherwise.
    pub tokens: usize,
}

impl Memory {
    /// Of `graphs`, whose weights of one name are one tensor and which do not run at the same time; `longest` is the most tokens that
    /// the model takes.
    pub(crate) fn new(graphs: &[&Graph], row: &Row, longest: Option<usize>) -> Memory {
        let limit = longest.unwrap_or(usize::MAX);
        let (context, tokens) = (CONTEXT.min(limit), TOKENS.min(limit));
        let mut memory = Memory { weights: 0, copies: 0, cache: 0, context: 0, activations: 0, tokens: 0 };
        let mut names = BTreeSet::new();
        for graph in graphs {
            let new: Vec<_> = graph.initializers.iter().filter(|init| names.insert(init.name.as_str())).collect();
            memory.weights += new.iter().map(|init| init.bytes() as u64).sum::<u64>();
            if row.widens {
                let narrow = new.iter().filter(|init| init.ty == ElementType::F16);
                memory.copies += narrow.map(|init| init.bytes() as u64).sum::<u64>();
            }
            if row.packs {
                memory.copies += packed(graph);
            }
            let long = Sizes { past: context, sequence: 0 };
            let caches: u64 = graph.inputs.iter().filter(is_cache).map(|input| long.bytes(input)).sum();
            let written = if in_place(graph) { caches } else { 2 * caches };
            if written > memory.cache {
                (memory.cache, memory.context) = (written, context);
            }
            let takes_tokens = graph.inputs.iter().any(|input| input.dims.iter().any(names_tokens));
            let call = peak(graph, Sizes { past: 0, sequence: tokens });
            if call > memory.activations {
                (memory.activations, memory.tokens) = (call, if takes_tokens { tokens } else { 0 });
            }
        }
        memory
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.weights + self.copies + self.cache + self.activations
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: weights {}", bytes(self.total()), bytes(self.weights))?;
        if self.copies > 0 {
            write!(f, " + copies of them {}", bytes(self.copies))?;
        }
        if self.cache > 0 {
            write!(f, " + cache {} at {} tokens", bytes(self.cache), self.context)?;
        }
        write!(f, " + activations {}", bytes(self.activations))?;
        if self.tokens > 0 {
            write!(f, " of {} tokens", self.tokens)?;
        }
        f.write_str("; the runtime itself comes on top")
    }
}

/// Lengths of a call; the batch size is 1.
#[derive(Clone, Copy)]
struct Sizes {
    past: usize,
    sequence: usize,
}

impl Sizes {
    /// Of a name or a sum of names; what is known only at run time counts as nothing.
    fn of(self, dim: &Dim) -> usize {
        let term = |name: &str| match name {
            "batch" => 1,
            "sequence" | "encoder_sequence" => self.sequence,
            _ if name.contains("past") || name == "capacity" => self.past,
            _ => name.parse().unwrap_or(0),
        };
        match dim {
            Dim::Fixed(n) => *n,
            Dim::Named(names) => names.split('+').map(|name| term(name.trim())).sum(),
            Dim::Unknown => 0,
        }
    }

    fn bytes(self, value: &Value) -> u64 {
        value.dims.iter().map(|dim| self.of(dim) as u64).product::<u64>() * value.ty.size() as u64
    }
}

fn names_tokens(dim: &Dim) -> bool {
    matches!(dim, Dim::Named(name) if name.contains("sequence"))
}

/// Whether an input is part of a key-value cache.
pub(crate) fn is_cache(value: &&Value) -> bool {
    value.name.starts_with(names::PAST)
}

/// Whether caches are written where they are read.
fn in_place(graph: &Graph) -> bool {
    graph.nodes.iter().any(|node| node.domain == DOMAIN && node.op_type == CacheUpdate::NAME)
}

/// What onnxruntime's products of 8-bit activations keep besides the weights: scales in another order, and a sum for each of them.
fn packed(graph: &Graph) -> u64 {
    let narrow = |(name, value): &(&str, Attribute)| *name == "accuracy_level" && *value == Attribute::Int(4);
    let nodes = graph.nodes.iter().filter(|node| node.op_type == "MatMulNBits" && node.attributes.iter().any(narrow));
    let scales: BTreeSet<&str> = nodes.filter_map(|node| node.inputs.get(2)).map(String::as_str).collect();
    let of = graph.initializers.iter().filter(|init| scales.contains(init.name.as_str()));
    2 * of.map(|init| init.bytes() as u64).sum::<u64>()
}

/// The most that the values of a call take at one time: from the node that makes one to the last that reads it. Presents are caches,
/// and runtimes join the dequantisation of weights to what reads them.
fn peak(graph: &Graph, sizes: Sizes) -> u64 {
    let is_output = |name: &str| graph.outputs.iter().any(|output| output.name == name);
    let mut last: HashMap<&str, usize> = HashMap::new();
    for (i, node) in graph.nodes.iter().enumerate() {
        for name in node.inputs.iter().chain(&node.outputs) {
            last.insert(name, i);
        }
    }
    let dequantized = graph.nodes.iter().filter(|node| node.op_type == "DequantizeLinear");
    let joined: BTreeSet<&str> = dequantized.flat_map(|node| &node.outputs).map(String::as_str).collect();
    let size = |name: &str| match name.starts_with(names::PRESENT) || joined.contains(name) {
        true => 0,
        false => graph.values.get(name).map_or(0, |value| sizes.bytes(value)),
    };
    let (mut live, mut most) = (0, 0);
    for (i, node) in graph.nodes.iter().enumerate() {
        live += node.outputs.iter().map(|name| size(name)).sum::<u64>();
        most = most.max(live);
        let done: BTreeSet<&str> = node.inputs.iter().chain(&node.outputs).map(String::as_str).collect();
        let done = done.into_iter().filter(|name| last.get(name) == Some(&i) && !is_output(name));
        live -= done.map(size).sum::<u64>();
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Node;
    use std::collections::BTreeMap;

    /// x (2) -> a (10) -> b (20) -> c (5), which is the output; d (7) of a, which is read last, too.
    #[test]
    fn a_value_lives_until_it_is_read_last() {
        let value = |name: &str, n: usize| Value {
            name: name.to_owned(),
            ty: ElementType::F32,
            dims: vec![Dim::Named("sequence".to_owned()), Dim::Fixed(n)],
        };
        let node = |input: &str, output: &str| Node {
            op_type: "Relu",
            domain: "",
            name: output.to_owned(),
            inputs: vec![input.to_owned()],
            outputs: vec![output.to_owned()],
            attributes: vec![],
        };
        let sizes = [("a", 10), ("b", 20), ("c", 5), ("d", 7)];
        let graph = Graph {
            name: "test".to_owned(),
            opset: 21,
            ir_version: 10,
            inputs: vec![value("x", 2)],
            outputs: vec![value("c", 5)],
            initializers: vec![],
            nodes: vec![node("x", "a"), node("a", "b"), node("b", "c"), node("a", "d")],
            values: sizes.map(|(name, n)| (name.to_owned(), value(name, n))).into(),
            functions: vec![],
            metadata: BTreeMap::new(),
        };
        // a, b and c; after it b goes, and d comes.
        assert_eq!(peak(&graph, Sizes { past: 0, sequence: 3 }), 3 * 4 * (10 + 20 + 5));
    }
}
