//! Computes what follows from known dimensions alone: shapes, their concatenations, and constants of such shapes.

use super::Pass;
use crate::error::Error;
use crate::graph::{Attribute, Dim, ElementType, Graph, Initializer, Node, Source};

/// Constants of more elements stay computed.
const LARGEST: usize = 1 << 20;

/// The pass.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct FoldShapes {}

impl Pass for FoldShapes {
    fn run(&self, graph: &mut Graph) -> Result<(), Error> {
        run(graph);
        Ok(())
    }
}

fn run(graph: &mut Graph) {
    for node in std::mem::take(&mut graph.nodes) {
        match constant(graph, &node) {
            Some(initializer) => {
                graph.values.remove(&initializer.name);
                graph.initializers.push(initializer);
            }
            None => graph.nodes.push(node),
        }
    }
}

/// The constant that stands for the node's output.
fn constant(graph: &Graph, node: &Node) -> Option<Initializer> {
    if !node.domain.is_empty() || graph.outputs.iter().any(|output| output.name == node.outputs[0]) {
        return None;
    }
    let (ty, dims, bytes) = match node.op_type {
        "Shape" => of_ints(&shape(graph, node)?),
        "Concat" => {
            let parts: Option<Vec<Vec<i64>>> = node.inputs.iter().map(|name| ints(graph, name)).collect();
            of_ints(&parts?.concat())
        }
        "ConstantOfShape" => {
            let dims: Vec<usize> =
                ints(graph, &node.inputs[0])?.into_iter().map(|d| usize::try_from(d).ok()).collect::<Option<_>>()?;
            let elements = dims.iter().product();
            let (ty, value) = node.attributes.iter().find_map(|(_, value)| match value {
                Attribute::Scalar(ty, value) if elements <= LARGEST => Some((*ty, *value)),
                _ => None,
            })?;
            (ty, dims, ty.bytes_of(value).repeat(elements))
        }
        _ => return None,
    };
    Some(Initializer { name: node.outputs[0].clone(), ty, dims, source: Source::Bytes(bytes) })
}

fn of_ints(values: &[i64]) -> (ElementType, Vec<usize>, Vec<u8>) {
    (ElementType::I64, vec![values.len()], values.iter().flat_map(|v| v.to_le_bytes()).collect())
}

/// The dimensions that a Shape node gives, where all of them are known.
fn shape(graph: &Graph, node: &Node) -> Option<Vec<i64>> {
    let dims = graph.value(&node.inputs[0])?.dims;
    let bound = |name: &str, default: usize| {
        let given = node.attributes.iter().find_map(|(n, value)| match value {
            Attribute::Int(v) if *n == name => Some(*v),
            _ => None,
        });
        given.map_or(default, |v| if v < 0 { dims.len().saturating_sub(v.unsigned_abs() as usize) } else { v as usize })
    };
    let range = bound("start", 0)..bound("end", dims.len()).min(dims.len());
    let known = |dim: &Dim| if let Dim::Fixed(n) = dim { Some(*n as i64) } else { None };
    dims.get(range)?.iter().map(known).collect()
}

/// A 1-D int64 constant's elements.
fn ints(graph: &Graph, name: &str) -> Option<Vec<i64>> {
    let init = graph.initializers.iter().find(|init| init.name == name)?;
    match (&init.source, init.ty, init.dims.len()) {
        (Source::Bytes(bytes), ElementType::I64, 1) => {
            Some(bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Value;
    use std::collections::BTreeMap;

    fn graph(tokens: Dim) -> Graph {
        let node = |op_type, name: &str, inputs: &[&str], attributes| Node {
            op_type,
            domain: "",
            name: name.to_owned(),
            inputs: inputs.iter().map(|&input| input.to_owned()).collect(),
            outputs: vec![name.to_owned()],
            attributes,
        };
        let value = |name: &str, ty, dims| Value { name: name.to_owned(), ty, dims };
        let x = value("x", ElementType::F32, vec![Dim::Fixed(2), tokens, Dim::Fixed(4)]);
        Graph {
            name: String::new(),
            opset: 21,
            ir_version: 10,
            inputs: vec![x.clone()],
            outputs: vec![value("sum", ElementType::F32, x.dims)],
            initializers: vec![Initializer {
                name: "width".to_owned(),
                ty: ElementType::I64,
                dims: vec![1],
                source: Source::Bytes(5i64.to_le_bytes().to_vec()),
            }],
            nodes: vec![
                node("Shape", "leading", &["x"], vec![("start", Attribute::Int(0)), ("end", Attribute::Int(-1))]),
                node("Concat", "shape", &["leading", "width"], vec![("axis", Attribute::Int(0))]),
                node("ConstantOfShape", "ones", &["shape"], vec![("value", Attribute::Scalar(ElementType::F32, 1.0))]),
                node("Add", "sum", &["x", "ones"], vec![]),
            ],
            values: BTreeMap::new(),
            functions: vec![],
            metadata: BTreeMap::new(),
        }
    }

    #[test]
    fn a_constant_of_known_shape() {
        let mut known = graph(Dim::Fixed(3));
        run(&mut known);
        assert_eq!(known.nodes.len(), 1);
        let ones = known.initializers.iter().find(|init| init.name == "ones").map(|init| init.dims.clone());
        assert_eq!(ones, Some(vec![2, 3, 5]));
    }

    #[test]
    fn a_symbol_stays_computed() {
        let mut symbolic = graph(Dim::Named("sequence".to_owned()));
        run(&mut symbolic);
        assert_eq!(symbolic.nodes.len(), 4);
    }
}
