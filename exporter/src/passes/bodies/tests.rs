#![allow(clippy::expect_used, clippy::panic)]

use super::*;
use crate::graph::{Attribute, Dim, ElementType, Initializer, Source, Value};
use moh_operators::{
    Definition, RoutedAttention, RoutedCombine, RoutedMlp, RoutedProjection, RoutedProjectionNBits, TopKRouter,
};

fn value(name: &str, dims: &[usize]) -> Value {
    // 0 stands for a dimension that is not known.
    let dims = dims.iter().map(|&d| if d == 0 { Dim::Unknown } else { Dim::Fixed(d) }).collect();
    Value { name: name.to_owned(), ty: ElementType::F32, dims }
}

/// A node of a graph: its inputs by name, and its integer attributes.
type Call<'a> = (&'a [&'a str], &'a [(&'static str, i64)]);

/// A graph of nodes of one operator, which read its inputs.
fn graph<O: Definition>(inputs: &[(&str, &[usize])], calls: &[Call<'_>]) -> Graph {
    let node = |(i, (inputs, attributes)): (usize, &Call<'_>)| Node {
        op_type: O::NAME,
        domain: DOMAIN,
        name: format!("n{i}"),
        inputs: inputs.iter().map(|&name| name.to_owned()).collect(),
        outputs: vec![format!("n{i}")],
        attributes: attributes.iter().map(|&(name, v)| (name, Attribute::Int(v))).collect(),
    };
    Graph {
        name: String::new(),
        opset: 21,
        ir_version: 10,
        inputs: inputs.iter().map(|(name, dims)| value(name, dims)).collect(),
        outputs: (0..calls.len()).map(|i| value(&format!("n{i}"), &[0, 0, 0])).collect(),
        initializers: vec![],
        nodes: calls.iter().enumerate().map(node).collect(),
        values: BTreeMap::new(),
        functions: vec![],
        metadata: BTreeMap::new(),
    }
}

/// Runs the pass; every node of an operator that is left is one that the operator accepts, and has the inputs of the body.
fn run(graph: &mut Graph) {
    WriteBodies::default().run(graph).expect("the pass runs");
    for node in graph.nodes.iter().filter(|node| node.domain == DOMAIN) {
        let call = super::Call::of(graph, node).expect("attributes that are accepted").expect("an operator");
        call.infer().unwrap_or_else(|refused| panic!("{} {:?}: {refused}", node.name, node.inputs));
        let body = graph.functions.iter().find(|body| body.operator == call.operator()).expect("a body");
        assert_eq!(body.inputs.len(), node.inputs.len(), "{}", node.name);
        let own = call.variant().expect("its own attributes");
        let served = [false, true].map(|causal| call.operator().body(Variant { causal, ..own }).nodes);
        assert!(served.contains(&body.nodes), "{}: the body of another variant", node.name);
    }
}

fn initializer<'a>(graph: &'a Graph, name: &str) -> &'a Initializer {
    graph.initializers.iter().find(|init| init.name == name).unwrap_or_else(|| panic!("no {name}"))
}

const ATTENTION: [(&str, &[usize]); 6] = [
    ("query", &[0, 0, 8]),
    ("key", &[0, 0, 8]),
    ("value", &[0, 0, 8]),
    ("gates", &[0, 0, 2]),
    ("bias", &[1, 1, 0, 0]),
    ("cached", &[0, 2, 0, 4]),
];

/// With scale, which is no integer.
fn attention(calls: &[Call<'_>]) -> Graph {
    let mut graph = graph::<RoutedAttention>(&ATTENTION, calls);
    for node in &mut graph.nodes {
        node.attributes.push(("scale", Attribute::Float(0.5)));
    }
    graph
}

#[test]
fn one_body_serves_nodes_with_and_without_a_bias() {
    let heads = [("num_heads", 2), ("kv_num_heads", 2), ("is_causal", 0)];
    let causal = [("num_heads", 2), ("kv_num_heads", 2), ("is_causal", 1)];
    let (with, without) = (["query", "key", "value", "gates", "bias"], ["query", "key", "value", "gates"]);
    let mut mixed = attention(&[(&with, &heads), (&without, &causal)]);
    run(&mut mixed);
    assert_eq!(mixed.functions.len(), 1);
    assert_eq!(mixed.functions[0].inputs.len(), 5);
    assert_eq!(mixed.nodes[1].inputs[4], "ai.moh/zero.f32");
    assert_eq!(mixed.initializers[0].dims, [1, 1, 1, 1]);
    assert!(mixed.functions[0].nodes.iter().any(|node| node.output == "allowed"), "a node is causal");

    let mut plain = attention(&[(&without, &heads), (&without, &heads)]);
    run(&mut plain);
    assert_eq!(plain.functions[0].inputs.len(), 4);
    assert!(plain.initializers.is_empty());
}

#[test]
fn zeros_have_the_shape_of_the_bias_that_is_absent() {
    let inputs: [(&str, &[usize]); 5] =
        [("x", &[0, 0, 6]), ("narrow", &[8, 6]), ("wide", &[12, 6]), ("gates", &[0, 0, 2]), ("bias", &[8])];
    let heads = [("num_heads", 2), ("weight_layout", 0)];
    let calls: [Call<'_>; 3] = [
        (&["x", "narrow", "gates"], &heads),
        (&["x", "narrow", "gates", "bias"], &heads),
        (&["x", "wide", "gates"], &heads),
    ];
    let mut mixed = graph::<RoutedProjection>(&inputs, &calls);
    run(&mut mixed);
    assert_eq!(mixed.nodes.len(), 3);
    assert_eq!(mixed.nodes[0].inputs[3], "ai.moh/zeros[8].f32");
    assert_eq!(mixed.nodes[2].inputs[3], "ai.moh/zeros[12].f32");
    assert_eq!(initializer(&mixed, "ai.moh/zeros[12].f32").bytes(), 48);

    let inputs: [(&str, &[usize]); 4] = [("x", &[0, 0, 8]), ("weight", &[6, 8]), ("gates", &[0, 0, 2]), ("bias", &[6])];
    let calls: [Call<'_>; 2] = [(&["x", "weight", "gates", "bias"], &heads), (&["x", "weight", "gates"], &heads)];
    let mut mixed = graph::<RoutedCombine>(&inputs, &calls);
    run(&mut mixed);
    assert_eq!(initializer(&mixed, &mixed.nodes[1].inputs[3]).dims, [6]);

    let inputs: [(&str, &[usize]); 6] = [
        ("x", &[0, 0, 6]),
        ("fc1", &[3, 6, 10]),
        ("fc2", &[3, 5, 7]),
        ("gates", &[0, 0, 3]),
        ("bias1", &[3, 10]),
        ("bias2", &[3, 7]),
    ];
    let swiglu = [("num_experts", 3), ("activation", 4)];
    let calls: [Call<'_>; 2] =
        [(&["x", "fc1", "fc2", "gates"], &swiglu), (&["x", "fc1", "fc2", "gates", "bias1", "bias2"], &swiglu)];
    let mut mixed = graph::<RoutedMlp>(&inputs, &calls);
    run(&mut mixed);
    let dims = |i: usize| initializer(&mixed, &mixed.nodes[0].inputs[i]).dims.clone();
    assert_eq!((dims(4), dims(5)), (vec![3, 10], vec![3, 7]));
}

/// Absent zero points are the middle of the range: 8 for 4 bits, 128 for 8 bits.
#[test]
fn zero_points_stand_in_for_those_that_are_absent() {
    let inputs: [(&str, &[usize]); 7] = [
        ("x", &[0, 0, 96]),
        ("four", &[12, 3, 16]),
        ("eight", &[12, 3, 32]),
        ("scales", &[12, 3]),
        ("gates", &[0, 0, 3]),
        ("bias", &[12]),
        ("zero_points", &[12, 2]),
    ];
    let bits = |bits| [("num_heads", 3), ("bits", bits), ("block_size", 32), ("accuracy_level", 0)];
    let (four, eight) = (bits(4), bits(8));
    let calls: [Call<'_>; 3] = [
        (&["x", "four", "scales", "gates"], &four),
        (&["x", "eight", "scales", "gates", "bias"], &eight),
        (&["x", "four", "scales", "gates", "bias", "zero_points"], &four),
    ];
    let mut mixed = graph::<RoutedProjectionNBits>(&inputs, &calls);
    run(&mut mixed);
    assert_eq!(mixed.nodes[0].inputs[4..], ["ai.moh/zeros[12].f32", "ai.moh/all136[12,2].u8"]);
    assert_eq!(mixed.nodes[1].inputs[5], "ai.moh/all128[12,3].u8");
    let Source::Bytes(bytes) = &initializer(&mixed, "ai.moh/all136[12,2].u8").source else { panic!("no bytes") };
    assert_eq!(bytes[..], [0x88; 24]);
}

#[test]
fn nodes_whose_zeros_are_not_known_become_standard_operators() {
    let inputs: [(&str, &[usize]); 4] = [("x", &[0, 0, 6]), ("weight", &[0, 6]), ("gates", &[0, 0, 2]), ("bias", &[0])];
    let heads = [("num_heads", 2), ("weight_layout", 0)];
    let calls: [Call<'_>; 2] = [(&["x", "weight", "gates", "bias"], &heads), (&["x", "weight", "gates"], &heads)];
    let mut mixed = graph::<RoutedProjection>(&inputs, &calls);
    run(&mut mixed);
    assert_eq!(mixed.nodes.iter().filter(|node| node.domain == DOMAIN).count(), 1);
    assert_eq!(mixed.nodes.last().map(|node| (&node.outputs[0][..], node.domain)), Some(("n1", "")));
}

fn router(calls: &[Call<'_>]) -> Graph {
    let mut graph =
        graph::<TopKRouter>(&[("scores", &[0, 0, 4]), ("balanced", &[0, 0, 5]), ("query", &[0, 0, 8])], calls);
    for (node, (_, attributes)) in graph.nodes.iter_mut().zip(calls) {
        let shared = if matches!(attributes[0].1, 1 | 2) { vec![] } else { vec![0] };
        node.attributes.push(("shared_heads", Attribute::Ints(shared)));
    }
    graph
}

#[test]
fn nodes_of_another_kind_become_standard_operators() {
    let two_stage = [("kind", 0), ("num_heads", 4), ("top_k", 2)];
    let norms = [("kind", 3), ("num_heads", 4), ("top_k", 2)];
    let mut mixed = router(&[(&["balanced"], &two_stage), (&["query"], &norms)]);
    run(&mut mixed);
    assert_eq!(mixed.functions.len(), 1);
    assert_eq!(mixed.nodes.iter().filter(|node| node.op_type == "TopKRouter").count(), 1);
    let outputs = |op_type: &str| mixed.nodes.iter().find(|node| node.op_type == op_type).map(|n| &n.outputs[..]);
    assert_eq!(outputs("TopK"), Some(&["n1/selected".to_owned(), "n1/selected_indices".to_owned()][..]));
    assert_eq!(mixed.nodes.last().map(|node| &node.outputs[0][..]), Some("n1"));
}

#[test]
fn nodes_of_another_layout_become_standard_operators() {
    let heads = [("num_heads", 2), ("kv_num_heads", 2), ("is_causal", 0)];
    let (flat, cached) = (["query", "key", "value", "gates"], ["query", "cached", "cached", "gates"]);
    for calls in [[&flat, &cached], [&cached, &flat]] {
        let mut mixed = attention(&calls.map(|inputs| (&inputs[..], &heads[..])));
        run(&mut mixed);
        assert_eq!(mixed.nodes[0].domain, DOMAIN);
        assert_eq!(mixed.nodes.iter().filter(|node| node.domain == DOMAIN).count(), 1);
        assert_eq!(mixed.nodes.last().map(|node| &node.outputs[0][..]), Some("n1"));
    }

    let inputs: [(&str, &[usize]); 4] =
        [("x", &[0, 0, 6]), ("matrix", &[8, 6]), ("stacked", &[2, 6, 4]), ("gates", &[0, 0, 2])];
    let calls: [Call<'_>; 2] = [
        (&["x", "matrix", "gates"], &[("num_heads", 2), ("weight_layout", 0)]),
        (&["x", "stacked", "gates"], &[("num_heads", 2), ("weight_layout", 1)]),
    ];
    let mut mixed = graph::<RoutedProjection>(&inputs, &calls);
    run(&mut mixed);
    assert_eq!(mixed.nodes.iter().filter(|node| node.domain == DOMAIN).count(), 1);
}

#[test]
fn a_router_has_no_layout() {
    let calls: [Call<'_>; 1] = [(&["scores"], &[("kind", 1), ("num_heads", 4), ("top_k", 2)])];
    let graph = router(&calls);
    let call = super::Call::of(&graph, &graph.nodes[0]).expect("attributes that are accepted").expect("an operator");
    assert!(!call.variant().expect("its own attributes").per_head);
}

#[test]
fn portable_models_have_no_node_of_ours() {
    let calls: [Call<'_>; 1] = [(&["scores"], &[("kind", 1), ("num_heads", 4), ("top_k", 2)])];
    let mut graph = router(&calls);
    WriteBodies { attention: AttentionStyle::Portable }.run(&mut graph).expect("the pass runs");
    assert!(graph.functions.is_empty() && graph.nodes.iter().all(|node| node.domain.is_empty()));
}

/// A target's styles stand back for standard operators; one that was asked for is refused.
#[test]
fn styles_of_ours_beside_standard_operators() {
    let settled = |change: fn(&mut Options)| {
        let bodies = WriteBodies { attention: AttentionStyle::Portable };
        let mut options = Options { bodies, ..Options::default() };
        change(&mut options);
        options.settle(Some(crate::Target::OrtCpu), false);
        options
    };
    let usual = settled(|_| ());
    assert!(usual.check().is_ok());
    assert_eq!([usual.dense.style, usual.norms.style, usual.convolutions.style], [None; 3]);
    const MOH: Option<DenseStyle> = Some(DenseStyle::Moh);
    let refused = |change| match settled(change).check() {
        Err(Error::Portable { option }) => option,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(|options| options.dense.style = MOH), "--dense-layers moh");
    assert_eq!(refused(|options| options.norms.style = MOH), "--norms moh");
    assert_eq!(refused(|options| options.convolutions.style = MOH), "--convolutions moh");
}
