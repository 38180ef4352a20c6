//! Optimisation of whole models.

use crate::constant::{Constant, Made};
use crate::convolution::convolution;
use crate::elementwise::elementwise;
use crate::linear::{Layout, Linear};
use crate::nbits::BlockLinear;
use crate::op::MohOp;
use crate::softmax::softmax;
use crate::widen::{Convert, widen};
use std::sync::Arc;
use tract_onnx::tract_core::ops::binary::TypedBinOp;
use tract_onnx::tract_core::ops::cast::Cast;
use tract_onnx::tract_core::ops::einsum::EinSum;
use tract_onnx::tract_core::ops::math::Add;
use tract_onnx::tract_hir::internal::*;

/// Like tract's `into_optimized`, but uses this crate's kernels for products with constant matrices, depthwise
/// convolutions, element-wise sums and products, and the softmax of short rows, all with symbolic dimensions. The
/// weights of these and of the ai.moh operators are packed once.
///
/// tract does not block matrix products along the inner dimension, so large ones are limited by memory, and its faster
/// convolutions and broadcasts require fully known shapes.
///
/// # Errors
/// Those of tract.
pub fn optimize(mut model: TypedModel) -> TractResult<TypedModel> {
    // Before tract splits products whose outputs are sliced, such as a router's.
    Rewriter::default().with_rule_for("linear", linear).rewrite(&(), &mut model)?;
    let mut model = model.into_decluttered()?;
    Rewriter::default()
        .with_rule_for("linear", linear)
        .with_rule_for("bias", bias)
        .with_rule_for("block bias", block_bias)
        .with_rule_for("constants", constants)
        .with_rule_for("convolution", convolution)
        .rewrite(&(), &mut model)?;
    widen(&mut model)?;
    Rewriter::default()
        .with_rule_for("elementwise", elementwise)
        .with_rule_for("softmax", softmax)
        .rewrite(&(), &mut model)?;
    let mut model = model.into_optimized()?;
    let mut made = Made::default();
    // One node at a time, and after other references to the tensors are dropped, so that memory is never doubled.
    for i in 0..model.nodes.len() {
        let from =
            model.nodes[i].inputs.first().map(|&x| model.outlet_fact(x).map(|fact| fact.datum_type)).transpose()?;
        let node = &mut model.nodes[i];
        if let Some(convert) = node.op_as::<Cast>().zip(from).and_then(|(cast, from)| Convert::of(cast, from)) {
            node.op = Box::new(convert);
        } else if let Some(op) = node.op_as_mut::<Linear>() {
            op.pack(&mut made)?;
        } else if let Some(op) = node.op_as_mut::<MohOp>() {
            op.pack(&mut made)?;
        }
    }
    Ok(model)
}

/// Rewrites a product whose right operand is constant.
fn linear(
    _: &(),
    model: &TypedModel,
    node: &TypedNode,
    name: &str,
    op: &EinSum,
) -> TractResult<Option<TypedModelPatch>> {
    rule_if!(op.q_params.is_none() && node.inputs.len() == 2);
    rule_if_some!(layout = layout(&op.axes));
    let x = model.outlet_fact(node.inputs[0])?;
    rule_if!(x.datum_type == op.operating_dt && crate::facts::is_float(x.datum_type));
    rule_if_some!(weight = &model.outlet_fact(node.inputs[1])?.konst);
    // Kernels refuse empty matrices, and rows of 1 that tract would repeat.
    rule_if!(weight.datum_type() == x.datum_type && weight.rank() == 2 && weight.len() > 0);
    let product = Linear::new(Constant::new(weight.clone(), weight.shape())?, layout)?;
    rule_if!(product.fits(&x.shape));
    TypedModelPatch::replace_single_op(model, node, &node.inputs[..1], product)
        .map(|patch| Some(patch.with_context(name)))
}

/// The matrix's layout, if the product is over the last axis of the left operand and all other axes are unchanged.
fn layout(axes: &AxesMapping) -> Option<Layout> {
    let names = |io| axes.axes(io).map(|axis| axis.repr).collect::<Vec<char>>();
    let (left, right, output) = (names(InOut::In(0)), names(InOut::In(1)), names(InOut::Out(0)));
    let (&k, left) = left.split_last()?;
    let (&n, output) = output.split_last()?;
    let plain = left == output && !left.contains(&k) && !left.contains(&n) && k != n;
    match () {
        () if plain && right == [k, n] => Some(Layout::InOut),
        () if plain && right == [n, k] => Some(Layout::OutIn),
        () => None,
    }
}

fn bias(_: &(), model: &TypedModel, node: &TypedNode, name: &str, op: &Linear) -> TractResult<Option<TypedModelPatch>> {
    rule_if!(!op.has_bias());
    fuse_bias(model, node, name, op.columns(), |bias| op.with_bias(bias))
}

fn block_bias(
    _: &(),
    model: &TypedModel,
    node: &TypedNode,
    name: &str,
    op: &BlockLinear,
) -> TractResult<Option<TypedModelPatch>> {
    rule_if!(op.bias.is_none());
    fuse_bias(model, node, name, op.columns(), |bias| op.with_bias(&bias))
}

/// Fuses the addition of a constant row of `columns` elements into the product, whose place `with_bias` takes.
fn fuse_bias<O: Into<Box<dyn TypedOp>>>(
    model: &TypedModel,
    node: &TypedNode,
    name: &str,
    columns: usize,
    with_bias: impl FnOnce(Arc<Tensor>) -> TractResult<O>,
) -> TractResult<Option<TypedModelPatch>> {
    rule_if!(!model.output_outlets()?.contains(&node.id.into()));
    rule_if_some!(next = model.single_succ(node.id)?);
    rule_if!(next.op_as::<TypedBinOp>().is_some_and(|op| op.0.is::<Add>() && op.1.is_none()));
    let other = next.inputs[usize::from(next.inputs[0].node == node.id)];
    rule_if_some!(bias = &model.outlet_fact(other)?.konst);
    rule_if!(bias.len() == columns && bias.shape().last() == Some(&columns));
    rule_if!(bias.datum_type() == model.outlet_fact(node.id.into())?.datum_type);
    let mut patch = TypedModelPatch::new(name);
    let x = patch.tap_model(model, node.inputs[0])?;
    let output = patch.wire_node(&next.name, with_bias(bias.clone())?, &[x])?[0];
    patch.shunt_outside(model, next.id.into(), output)?;
    Ok(Some(patch))
}

/// Moves constant inputs of our operators into the operators.
fn constants(
    _: &(),
    model: &TypedModel,
    node: &TypedNode,
    _: &str,
    op: &MohOp,
) -> TractResult<Option<TypedModelPatch>> {
    let mut constants = Vec::new();
    for &input in &node.inputs {
        let konst = &model.outlet_fact(input)?.konst;
        constants.push(konst.clone().filter(|tensor| crate::facts::dtype(tensor.datum_type()).is_some()));
    }
    // The first input stays an input: tract assumes that an operator without inputs is constant.
    if let Some(first) = constants.first_mut() {
        *first = None;
    }
    rule_if!(constants.iter().any(Option::is_some));
    let others: Vec<OutletId> = node
        .inputs
        .iter()
        .zip(&constants)
        .filter(|(_, constant)| constant.is_none())
        .map(|(input, _)| *input)
        .collect();
    TypedModelPatch::replace_single_op(model, node, &others, op.with_constants(&constants)?).map(Some)
}
