//! Parses ONNX nodes.

use crate::constant::Constant;
use crate::op::MohOp;
use crate::prepare::hold;
use moh_operators::{AttributeDef, Attributes, DOMAIN, Value};
use tract_onnx::model::{ParsingContext, optional_inputs};
use tract_onnx::pb::NodeProto;
use tract_onnx::pb::attribute_proto::AttributeType;
use tract_onnx::tract_hir::internal::*;

/// Parses a node; tract adds the node's name to errors.
pub(crate) fn parse(context: &ParsingContext, node: &NodeProto) -> TractResult<(Box<dyn InferenceOp>, Vec<String>)> {
    let operator =
        moh_operators::operator(&node.op_type).with_context(|| format!("no operator {DOMAIN}.{}", node.op_type))?;
    ensure!(
        node.domain == DOMAIN,
        "{}: expected an operator of domain {DOMAIN}, found one of domain {:?}",
        node.op_type,
        node.domain
    );
    ensure!(
        node.input.len() <= operator.inputs.len(),
        "{}: expected at most {} inputs, found {}",
        operator.name,
        operator.inputs.len(),
        node.input.len()
    );
    ensure!(node.output.len() == 1, "{}: expected 1 output, found {}", operator.name, node.output.len());
    let slots: TVec<Option<usize>> = optional_inputs(node).take(node.input.len()).collect();
    let given = slots.clone();
    let mut op = MohOp::new(Attributes::read(operator, |def| value(node, def))?, slots);
    for (i, operand) in operator.inputs.iter().enumerate() {
        if let Some(tensor) = hold::held(node, i) {
            op.hold(i, Constant::held(context, tensor)?);
        } else {
            let present = given.get(i).is_some_and(Option::is_some);
            ensure!(operand.optional || present, "{}: input {} is missing", operator.name, operand.name);
        }
    }
    Ok((expand(op), vec![]))
}

fn value(node: &NodeProto, def: &AttributeDef) -> Option<Value> {
    let attribute = node.attribute.iter().find(|attribute| attribute.name == def.name)?;
    match AttributeType::try_from(attribute.r#type) {
        Ok(AttributeType::Int) => Some(Value::Int(attribute.i)),
        Ok(AttributeType::Float) => Some(Value::Float(attribute.f)),
        Ok(AttributeType::Ints) => Some(Value::Ints(attribute.ints.clone())),
        _ => None,
    }
}
