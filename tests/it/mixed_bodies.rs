//! Models that mix nodes with and without optional inputs, and nodes of different layouts: one body serves them, zeros stand in for
//! absent inputs, and what it does not serve is written as standard operators.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use crate::every_operator::{element_type, tensor};
use moh::{Table, floats, passes, runtimes};
use moh_conformance::Buffer;
use moh_export::AttentionStyle;
use moh_export::encode::encode;
use moh_export::graph::{Attribute, Dim, Graph, Node, Value};
use moh_export::passes::Gates;
use moh_export::weights::Plan;
use moh_models::sample::Rng;
use moh_operators::{
    Attributes, DOMAIN, DType, Definition, Operator, RoutedAttention, RoutedCombine, RoutedCombineNBits, RoutedMlp,
    RoutedProjection, Tensor as View, Value as AttributeValue, tolerance,
};
use moh_runtime::Model;
use std::collections::BTreeMap;

/// A node: its inputs by name, and its attributes.
type Call = (&'static [&'static str], &'static [(&'static str, i64)]);

/// A model of nodes of one operator.
struct Mixture {
    operator: &'static Operator,
    inputs: &'static [(&'static str, &'static [usize])],
    calls: &'static [Call],
}

const MIXTURES: &[Mixture] = &[
    Mixture {
        operator: RoutedProjection::OPERATOR,
        inputs: &[("x", &[2, 3, 6]), ("narrow", &[8, 6]), ("wide", &[12, 6]), ("gates", &[2, 3, 2]), ("bias", &[8])],
        calls: &[
            (&["x", "narrow", "gates"], &[("num_heads", 2), ("weight_layout", 0)]),
            (&["x", "narrow", "gates", "bias"], &[("num_heads", 2), ("weight_layout", 0)]),
            (&["x", "wide", "gates"], &[("num_heads", 2), ("weight_layout", 0)]),
        ],
    },
    Mixture {
        operator: RoutedProjection::OPERATOR,
        inputs: &[("x", &[2, 3, 6]), ("matrix", &[8, 6]), ("stacked", &[2, 6, 4]), ("gates", &[2, 3, 2])],
        calls: &[
            (&["x", "stacked", "gates"], &[("num_heads", 2), ("weight_layout", 1)]),
            (&["x", "matrix", "gates"], &[("num_heads", 2), ("weight_layout", 0)]),
        ],
    },
    Mixture {
        operator: RoutedCombine::OPERATOR,
        inputs: &[("x", &[2, 3, 8]), ("weight", &[6, 8]), ("gates", &[2, 3, 2]), ("bias", &[6])],
        calls: &[
            (&["x", "weight", "gates", "bias"], &[("num_heads", 2), ("weight_layout", 0)]),
            (&["x", "weight", "gates"], &[("num_heads", 2), ("weight_layout", 0)]),
        ],
    },
    Mixture {
        operator: RoutedMlp::OPERATOR,
        inputs: &[
            ("x", &[2, 3, 6]),
            ("fc1", &[3, 6, 10]),
            ("fc2", &[3, 5, 7]),
            ("gates", &[2, 3, 3]),
            ("bias1", &[3, 10]),
            ("bias2", &[3, 7]),
        ],
        calls: &[
            (&["x", "fc1", "fc2", "gates"], &[("num_experts", 3), ("activation", 4)]),
            (&["x", "fc1", "fc2", "gates", "bias1", "bias2"], &[("num_experts", 3), ("activation", 4)]),
        ],
    },
    Mixture {
        operator: RoutedCombineNBits::OPERATOR,
        inputs: &[
            ("x", &[2, 3, 96]),
            ("packed4", &[6, 3, 16]),
            ("packed8", &[6, 3, 32]),
            ("scales", &[6, 3]),
            ("gates", &[2, 3, 2]),
            ("bias", &[6]),
            ("gate", &[2, 1, 6]),
            ("residual", &[2, 3, 6]),
            ("packed zero points", &[6, 2]),
        ],
        calls: &[
            (&["x", "packed4", "scales", "gates"], BITS_4),
            (&["x", "packed8", "scales", "gates", "bias"], BITS_8),
            (&["x", "packed4", "scales", "gates", "bias", "gate"], BITS_4),
            (&["x", "packed8", "scales", "gates", "bias", "gate", "residual"], BITS_8),
            (&["x", "packed4", "scales", "gates", "bias", "gate", "residual", "packed zero points"], BITS_4),
        ],
    },
    Mixture {
        operator: RoutedAttention::OPERATOR,
        inputs: &[
            ("query", &[2, 3, 8]),
            ("key", &[2, 5, 8]),
            ("cached", &[2, 2, 5, 4]),
            ("gates", &[2, 3, 2]),
            ("bias", &[1, 1, 3, 5]),
        ],
        calls: &[
            (&["query", "key", "key", "gates"], &[("num_heads", 2), ("kv_num_heads", 2), ("is_causal", 0)]),
            (&["query", "cached", "cached", "gates"], &[("num_heads", 2), ("kv_num_heads", 2), ("is_causal", 0)]),
            (&["query", "key", "key", "gates", "bias"], &[("num_heads", 2), ("kv_num_heads", 2), ("is_causal", 1)]),
        ],
    },
];

const BITS_4: &[(&str, i64)] = &[("num_heads", 2), ("bits", 4), ("block_size", 32), ("accuracy_level", 0)];
const BITS_8: &[(&str, i64)] = &[("num_heads", 2), ("bits", 8), ("block_size", 32), ("accuracy_level", 0)];

const SCALE: (&str, f32) = ("scale", 0.5);

/// The element type of an input.
fn dtype(name: &str) -> DType {
    if name.starts_with("packed") { DType::U8 } else { DType::F32 }
}

impl Mixture {
    /// Normal numbers, small enough for outputs of magnitude 4 and less, with every third gate off; bytes of packed inputs.
    fn values(&self) -> BTreeMap<&'static str, (Vec<usize>, Buffer)> {
        let rng = &mut Rng::new(7);
        let value = |(name, shape): &(&'static str, &[usize])| {
            let mut data: Vec<f32> = (0..shape.iter().product()).map(|_| 0.5 * rng.normal()).collect();
            match *name {
                "gates" => data.iter_mut().step_by(3).for_each(|gate| *gate = 0.0),
                "scales" => data.iter_mut().for_each(|scale| *scale /= 128.0),
                name if dtype(name) == DType::U8 => data.iter_mut().for_each(|x| *x = (1000.0 * *x).rem_euclid(256.0)),
                _ => {}
            }
            (*name, (shape.to_vec(), Buffer::new(dtype(name), &data)))
        };
        self.inputs.iter().map(value).collect()
    }

    fn attributes(&self, call: &Call) -> Attributes {
        let int = |name: &str| call.1.iter().find(|(n, _)| *n == name).map(|(_, v)| AttributeValue::Int(*v));
        let scale = |name: &str| (name == SCALE.0).then_some(AttributeValue::Float(SCALE.1));
        Attributes::read(self.operator, |def| int(def.name).or_else(|| scale(def.name))).unwrap()
    }

    fn expected(&self, call: &Call) -> Vec<f64> {
        let values = self.values();
        let tensors = call.0.iter().map(|name| &values[name]);
        let inputs: Vec<Option<View<'_>>> =
            tensors.map(|(shape, buffer)| Some(View { shape, data: buffer.data() })).collect();
        self.operator.reference(&self.attributes(call), &inputs).unwrap()
    }

    fn graph(&self) -> Graph {
        let value = |name: &str, dims: Vec<Dim>| Value { name: name.to_owned(), ty: element_type(dtype(name)), dims };
        let fixed = |dims: &[usize]| dims.iter().map(|&d| Dim::Fixed(d)).collect();
        let values = self.values();
        let output = |(i, call): (usize, &Call)| {
            let shapes: Vec<Option<&[usize]>> = call.0.iter().map(|name| Some(&values[name].0[..])).collect();
            value(&format!("n{i}"), fixed(&self.operator.output_shape(&self.attributes(call), &shapes).unwrap()))
        };
        let node = |(i, call): (usize, &Call)| Node {
            op_type: self.operator.name,
            domain: DOMAIN,
            name: format!("n{i}"),
            inputs: call.0.iter().map(|&name| name.to_owned()).collect(),
            outputs: vec![format!("n{i}")],
            attributes: self.attributes(call).iter().map(|(def, value)| (def.name, attribute(value))).collect(),
        };
        Graph {
            name: "mixture".to_owned(),
            opset: 21,
            ir_version: 10,
            inputs: self.inputs.iter().map(|(name, dims)| value(name, fixed(dims))).collect(),
            outputs: self.calls.iter().enumerate().map(output).collect(),
            initializers: vec![],
            nodes: self.calls.iter().enumerate().map(node).collect(),
            values: BTreeMap::new(),
            functions: vec![],
            metadata: BTreeMap::new(),
        }
    }
}

pub(crate) fn attribute(value: &AttributeValue) -> Attribute {
    match value {
        AttributeValue::Int(v) => Attribute::Int(*v),
        AttributeValue::Float(v) => Attribute::Float(*v),
        AttributeValue::Ints(v) => Attribute::Ints(v.clone()),
    }
}

#[test]
fn every_runtime_follows_the_reference() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    let mut table = Table::new("Mixed nodes against the f64 reference");
    for mixture in MIXTURES {
        let mut graph = mixture.graph();
        moh_export::passes::run(&mut graph, &passes(AttentionStyle::Routed, Gates::Hidden)).unwrap();
        assert_eq!(graph.functions.len(), 1);
        std::fs::write(&path, encode(&graph, &Plan::new(&graph), "none").unwrap()).unwrap();
        for (way, options) in runtimes() {
            let what = format!("{way}, {}", mixture.operator.name);
            let mut model = Model::load(&path, &options).unwrap_or_else(|refused| panic!("{what}: {refused}"));
            let given = mixture
                .values()
                .into_iter()
                .map(|(name, (shape, buffer))| (name, tensor(&shape, buffer.data()).into()));
            let outputs = model.run(given).unwrap_or_else(|refused| panic!("{what}: {refused}"));
            for (i, (call, output)) in mixture.calls.iter().zip(&outputs).enumerate() {
                let (found, expected) = (floats(&output.to_tensor().unwrap()), mixture.expected(call));
                assert_eq!(found.len(), expected.len(), "{what}");
                let error =
                    found.iter().zip(&expected).fold(0.0, |max, (a, b)| f64::max(max, (f64::from(*a) - b).abs()));
                table.add(
                    way,
                    &format!("{} {i}", mixture.operator.name),
                    error,
                    tolerance::operator_output(DType::F32),
                );
            }
        }
    }
    table.finish();
}
