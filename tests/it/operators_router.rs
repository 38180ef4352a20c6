//! TopKRouter in every runtime against the f64 reference: our kernel, the body that files carry, and the body inlined.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use half::f16;
use moh::{Table, passes, runtimes};
use moh_export::encode::encode;
use moh_export::graph::{Attribute, Dim, Graph, Node, Value};
use moh_export::passes::Gates;
use moh_export::weights::Plan;
use moh_export::{AttentionStyle, ElementType};
use moh_models::sample::Rng;
use moh_operators::top_k_router::{Heads, Kind};
use moh_operators::{
    Attributes, DOMAIN, DType, Data, Definition, Operator, Tensor as View, TopKRouter, Value as AttributeValue,
    tolerance,
};
use moh_runtime::{Model, Tensor};
use std::collections::BTreeMap;

const OPERATOR: &Operator = TopKRouter::OPERATOR;

/// A call.
#[derive(Debug, Clone, Copy)]
struct Case {
    kind: Kind,
    heads: usize,
    shared: &'static [i64],
    top_k: usize,
    half: bool,
}

const HEAD_DIM: usize = 12;

fn cases() -> Vec<Case> {
    let case = |kind, heads, shared, top_k| Case { kind, heads, shared, top_k, half: false };
    let norms = case(Kind::QueryNorms, 8, &[0, 5], 3);
    vec![
        case(Kind::TwoStage, 6, &[0, 1], 2),
        case(Kind::TwoStage, 6, &[0, 1, 2, 3, 4, 5], 0),
        case(Kind::TwoStage, 4, &[0, 1], 2),
        case(Kind::TwoStage, 12, &[1, 5, 6, 11], 3),
        case(Kind::TwoStage, 6, &[3], 2),
        case(Kind::TwoStage, 6, &[], 2),
        case(Kind::TwoStage, 2, &[1], 1),
        case(Kind::Probabilities, 9, &[], 4),
        case(Kind::Probabilities, 5, &[], 5),
        case(Kind::Renormalized, 9, &[], 1),
        norms,
        Case { half: true, ..norms },
        case(Kind::QueryNorms, 8, &[], 2),
        case(Kind::QueryNorms, 4, &[2, 3], 0),
    ]
}

impl Case {
    fn values(&self) -> Vec<(&'static str, AttributeValue)> {
        let ints = [("kind", self.kind as i64), ("num_heads", self.heads as i64), ("top_k", self.top_k as i64)];
        let shared = ("shared_heads", AttributeValue::Ints(self.shared.to_vec()));
        ints.into_iter().map(|(name, v)| (name, AttributeValue::Int(v))).chain([shared]).collect()
    }

    fn attributes(&self) -> Attributes {
        let values: BTreeMap<_, _> = self.values().into_iter().collect();
        Attributes::read(OPERATOR, |def| values.get(def.name).cloned()).unwrap()
    }

    fn shape(&self) -> [usize; 3] {
        let width = match self.kind {
            Kind::QueryNorms => self.heads * HEAD_DIM,
            _ => Heads::read(self.attributes().get::<TopKRouter>().unwrap()).unwrap().columns(),
        };
        [2, 7, width]
    }

    /// Half of the scores are halves: many are equal.
    fn scores(&self) -> Vec<f32> {
        let rng = &mut Rng::new(self.heads as u64 * 31 + self.top_k as u64);
        let number = |_| match (rng.normal(), rng.normal() < 0.0 && self.kind != Kind::QueryNorms) {
            (x, true) => (2.0 * x).round() / 2.0,
            (x, false) => f16::from_f32(x).to_f32(),
        };
        (0..self.shape().iter().product()).map(number).collect()
    }

    fn graph(&self, opset: (i64, i64), symbolic: bool) -> Graph {
        let named = |size: usize, name: &str| if symbolic { Dim::Named(name.to_owned()) } else { Dim::Fixed(size) };
        let [batch, q_len, width] = self.shape();
        let dims = |width: usize| vec![named(batch, "batch"), named(q_len, "sequence"), Dim::Fixed(width)];
        let ty = if self.half { ElementType::F16 } else { ElementType::F32 };
        let attribute = |value| match value {
            AttributeValue::Ints(v) => Attribute::Ints(v),
            AttributeValue::Int(v) => Attribute::Int(v),
            AttributeValue::Float(v) => Attribute::Float(v),
        };
        Graph {
            name: "operator".to_owned(),
            opset: opset.0,
            ir_version: opset.1,
            inputs: vec![Value { name: "scores".to_owned(), ty, dims: dims(width) }],
            outputs: vec![Value { name: "gates".to_owned(), ty: ElementType::F32, dims: dims(self.heads) }],
            initializers: vec![],
            nodes: vec![Node {
                op_type: OPERATOR.name,
                domain: DOMAIN,
                name: "router".to_owned(),
                inputs: vec!["scores".to_owned()],
                outputs: vec!["gates".to_owned()],
                attributes: self.values().into_iter().map(|(name, value)| (name, attribute(value))).collect(),
            }],
            values: BTreeMap::new(),
            functions: vec![],
            metadata: BTreeMap::new(),
        }
    }
}

#[test]
fn every_runtime_follows_the_reference() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    let mut table = Table::new("TopKRouter against the f64 reference");
    for case in cases() {
        let scores = case.scores();
        let expected = OPERATOR
            .reference(&case.attributes(), &[Some(View { shape: &case.shape(), data: Data::F32(&scores) })])
            .unwrap();
        let input = match case.half {
            true => Tensor::new(case.shape().to_vec(), scores.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>()),
            false => Tensor::new(case.shape().to_vec(), scores),
        };
        let input = input.unwrap();
        for (style, opset, symbolic) in [
            (AttentionStyle::Routed, (20, 9), true),
            (AttentionStyle::Routed, (21, 10), false),
            (AttentionStyle::Portable, (20, 9), false),
            (AttentionStyle::Portable, (21, 10), true),
        ] {
            let mut graph = case.graph(opset, symbolic);
            moh_export::passes::run(&mut graph, &passes(style, Gates::Hidden)).unwrap();
            std::fs::write(&path, encode(&graph, &Plan::new(&graph), "none").unwrap()).unwrap();
            for (way, options) in runtimes() {
                let what = format!("{way} {style:?} {case:?}");
                let run = || -> Result<_, moh_runtime::Error> {
                    let mut model = Model::load(&path, &options)?;
                    Ok(model.run([("scores", input.clone().into())])?[0].to_tensor()?.data().to_f32().unwrap())
                };
                let found = run().unwrap_or_else(|e| panic!("{what}: {e}"));
                assert_eq!(found.len(), expected.len(), "{what}");
                let zeros = |on: &mut dyn Iterator<Item = bool>| on.collect::<Vec<_>>();
                let same =
                    zeros(&mut found.iter().map(|x| *x == 0.0)) == zeros(&mut expected.iter().map(|x| *x == 0.0));
                assert!(same, "{what}: other heads: {found:?}, expected {expected:?}");
                let error =
                    found.iter().zip(&expected).fold(0.0, |max, (a, b)| f64::max(max, (f64::from(*a) - b).abs()));
                table.add(way, &format!("{:?} {style:?}", case.kind), error, tolerance::operator_output(DType::F32));
            }
        }
    }
    table.finish();
}
