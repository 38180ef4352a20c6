//! Models that mix nodes with and without optional inputs, and nodes of different layouts: one body serves them, zeros stand in for
//! absent inputs, and what it does not serve is written as standard operators.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use moh::{Table, floats, passes, runtimes};
use moh_export::encode::encode;
use moh_export::graph::{Attribute, Dim, Graph, Node, Value};
use moh_export::passes::Gates;
use moh_export::weights::Plan;
use moh_export::{AttentionStyle, ElementType};
use moh_models::sample::Rng;
use moh_operators::{
    Attributes, DOMAIN, DType, Data, Definition, Operator, RoutedAttention, RoutedCombine, RoutedMlp, RoutedProjection,
    Tensor as View, Value as AttributeValue, tolerance,
};
use moh_runtime::{Model, Tensor};
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

const SCALE: (&str, f32) = ("scale", 0.5);

impl Mixture {
    /// Normal numbers, small enough for outputs of magnitude 4 and less, with every third gate off.
    fn values(&self) -> BTreeMap<&'static str, (Vec<usize>, Vec<f32>)> {
        let rng = &mut Rng::new(7);
        let value = |(name, shape): &(&'static str, &[usize])| {
            let mut data: Vec<f32> = (0..shape.iter().product()).map(|_| 0.5 * rng.normal()).collect();
            if *name == "gates" {
                data.iter_mut().step_by(3).for_each(|gate| *gate = 0.0);
            }
            (*name, (shape.to_vec(), data))
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
            tensors.map(|(shape, data)| Some(View { shape, data: Data::F32(data) })).collect();
        self.operator.reference(&self.attributes(call), &inputs).unwrap()
    }

    fn graph(&self) -> Graph {
        let value = |name: &str, dims: Vec<Dim>| Value { name: name.to_owned(), ty: ElementType::F32, dims };
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
                .map(|(name, (shape, data))| (name, Tensor::new(shape, data).unwrap().into()));
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
