//! What a written graph says of its values, and how it writes its numbers: other tools read both.

use super::support::{Case, read, unverified};
use moh_export::proto::tensor_shape_proto::dimension::Value as Dim;
use moh_export::proto::{ModelProto, NodeProto, TensorShapeProto, type_proto};
use moh_export::{AttentionStyle, Options};
use std::collections::BTreeMap;

/// Declared shapes of the values between inputs and outputs.
fn declared(model: &ModelProto) -> BTreeMap<&str, &TensorShapeProto> {
    let mut shapes = BTreeMap::new();
    for info in &model.graph.as_ref().unwrap().value_info {
        let Some(type_proto::Value::TensorType(tensor)) = &info.r#type.as_ref().unwrap().value else {
            panic!("{info:?}")
        };
        shapes.insert(info.name(), tensor.shape.as_ref().unwrap());
    }
    shapes
}

/// ONNX's usual one is ten times that of a DiT.
#[test]
fn norms_have_the_models_epsilon() {
    let case = Case::new("dit-tiny-75");
    case.export(&unverified()).unwrap();
    let graph = read(&case.output()).graph.unwrap();
    let norms: Vec<_> = graph.node.iter().filter(|node| node.op_type() == "LayerNormalization").collect();
    assert!(!norms.is_empty());
    for norm in norms {
        let epsilon = norm.attribute.iter().find(|attribute| attribute.name() == "epsilon").unwrap();
        assert_eq!(epsilon.f(), 1e-6, "{}", norm.name());
    }
}

/// onnxruntime loses the batch where a Reshape infers it, and then compares each value with all before: 15 s for a ViT.
#[test]
fn no_value_loses_its_batch() {
    for name in ["vit-tiny-b", "dit-tiny-75", "llama-moh-tiny", "moa-enc-tiny"] {
        let case = Case::new(name);
        case.export(&unverified()).unwrap();
        let model = read(&case.output());
        let graph = model.graph.as_ref().unwrap();
        let declared = declared(&model);
        let outputs: Vec<&str> = graph.output.iter().map(|output| output.name()).collect();
        let inner = graph.node.iter().flat_map(|node| &node.output).filter(|name| !outputs.contains(&name.as_str()));
        let mut reshaped = 0;
        for value in inner {
            let shape = declared.get(value.as_str()).unwrap_or_else(|| panic!("{name}: {value} is not declared"));
            for (axis, dim) in shape.dim.iter().enumerate() {
                assert!(dim.value.is_some(), "{name}: {value}, axis {axis}");
            }
            let by_batch = |dim: &Option<Dim>| matches!(dim, Some(Dim::DimParam(p)) if p.starts_with("batch"));
            reshaped += usize::from(shape.dim.first().is_some_and(|dim| by_batch(&dim.value)));
        }
        assert!(reshaped > graph.node.len() / 2, "{name}: only {reshaped} values of {}", graph.node.len());
    }
}

/// Some tools (onnxslim) read a literal `value_float` as float64, and write models that no runtime loads.
#[test]
fn float_constants_are_tensors() {
    for attention in [AttentionStyle::Routed, AttentionStyle::Portable] {
        for name in ["vit-tiny-b", "dit-tiny-75", "llama-moh-tiny"] {
            let case = Case::new(name);
            let mut options = unverified();
            options.passes.bodies.attention = attention;
            case.export(&Options { force: true, ..options }).unwrap();
            let model = read(&case.output());
            let nodes = model.graph.iter().flat_map(|graph| &graph.node);
            let all: Vec<&NodeProto> = nodes.chain(model.functions.iter().flat_map(|f| &f.node)).collect();
            let constants = all.iter().filter(|node| node.op_type() == "Constant");
            for attribute in constants.flat_map(|node| &node.attribute) {
                assert!(
                    attribute.name() != "value_float" || attribute.ref_attr_name.is_some(),
                    "{name}: {attribute:?}"
                );
            }
        }
    }
}
