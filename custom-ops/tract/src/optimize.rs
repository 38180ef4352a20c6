//! Rewrites of whole models.

use crate::constant::Made;
use crate::convolution::convolution;
use crate::elementwise::elementwise;
use crate::linear::{Layout, Linear};
use crate::op::MohOp;
use crate::softmax::softmax;
use tract_onnx::tract_core::ops::binary::TypedBinOp;
use tract_onnx::tract_core::ops::einsum::EinSum;
use tract_onnx::tract_core::ops::math::Add;
use tract_onnx::tract_hir::internal::*;

/// As tract's `into_optimized`, with this crate's kernels for products with constant matrices, depthwise convolutions, sums and
/// products element by element and the softmax of short rows, all for dimensions that may be symbols; the weights of these and of
/// the ai.moh operators are packed once.
///
/// tract cuts no product along its inner length, so that large ones wait for memory, and has its faster convolutions and
/// broadcasts for shapes alone that are all numbers.
///
/// # Errors
/// Those of tract.
pub fn optimize(mut model: TypedModel) -> TractResult<TypedModel> {
    // Before tract splits products whose parts are used apart, such as a router's.
    Rewriter::default().with_rule_for("linear", linear).rewrite(&(), &mut model)?;
    let mut model = model.into_decluttered()?;
    Rewriter::default()
        .with_rule_for("linear", linear)
        .with_rule_for("bias", bias)
        .with_rule_for("constants", constants)
        .with_rule_for("convolution", convolution)
        .rewrite(&(), &mut model)?;
    Rewriter::default()
        .with_rule_for("elementwise", elementwise)
        .with_rule_for("softmax", softmax)
        .rewrite(&(), &mut model)?;
    let mut model = model.into_optimized()?;
    let mut made = Made::default();
    // One by one, now that nothing else holds the tensors: they never take twice the memory.
    for node in &mut model.nodes {
        if let Some(op) = node.op_as_mut::<Linear>() {
            op.pack(&mut made)?;
        } else if let Some(op) = node.op_as_mut::<MohOp>() {
            op.pack(&mut made)?;
        }
    }
    Ok(model)
}

/// A product whose right side is constant.
fn linear(
    _: &(),
    model: &TypedModel,
    node: &TypedNode,
    name: &str,
    op: &EinSum,
) -> TractResult<Option<TypedModelPatch>> {
    rule_if!(op.q_params.is_none() && node.inputs.len() == 2);
    rule_if_some!(layout = layout(&op.axes));
    let x = model.outlet_fact(node.inputs[0])?.datum_type;
    rule_if!(x == op.operating_dt && crate::facts::dtype(x).is_some());
    rule_if_some!(weight = &model.outlet_fact(node.inputs[1])?.konst);
    rule_if!(weight.datum_type() == x && weight.rank() == 2);
    TypedModelPatch::replace_single_op(model, node, &node.inputs[..1], Linear::new(weight.clone(), layout)?)
        .map(|patch| Some(patch.with_context(name)))
}

/// The matrix's layout where only the last axes of the left side and of the output differ, and these are the matrix's.
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

/// The addition of a constant row.
fn bias(_: &(), model: &TypedModel, node: &TypedNode, name: &str, op: &Linear) -> TractResult<Option<TypedModelPatch>> {
    rule_if!(!op.has_bias() && !model.output_outlets()?.contains(&node.id.into()));
    rule_if_some!(next = model.single_succ(node.id)?);
    rule_if!(next.op_as::<TypedBinOp>().is_some_and(|op| op.0.is::<Add>() && op.1.is_none()));
    let other = next.inputs[usize::from(next.inputs[0].node == node.id)];
    rule_if_some!(bias = &model.outlet_fact(other)?.konst);
    rule_if!(bias.len() == op.columns() && bias.shape().last() == Some(&op.columns()));
    rule_if!(bias.datum_type() == model.outlet_fact(node.id.into())?.datum_type);
    let mut patch = TypedModelPatch::new(name);
    let x = patch.tap_model(model, node.inputs[0])?;
    let output = patch.wire_node(&next.name, op.with_bias(bias.clone())?, &[x])?[0];
    patch.shunt_outside(model, next.id.into(), output)?;
    Ok(Some(patch))
}

/// One of our operators with constant inputs.
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
    // The first input stays: tract knows of no operator without any that is no constant.
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
