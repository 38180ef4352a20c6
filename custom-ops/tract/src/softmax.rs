//! Softmax of short rows, such as a router's.

use tract_onnx::tract_core::ops::nn::{Softmax, SoftmaxKind};
use tract_onnx::tract_hir::internal::*;

/// Softmax along the last axis in float32.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RowSoftmax;

/// Maximum row length; tract's softmax, which is made for long rows, is faster above it.
const LONGEST: usize = 64;

pub(crate) fn softmax(
    _: &(),
    model: &TypedModel,
    node: &TypedNode,
    _: &str,
    op: &Softmax,
) -> TractResult<Option<TypedModelPatch>> {
    let x = model.outlet_fact(node.inputs[0])?;
    rule_if!(op.kind == SoftmaxKind::Softmax && op.quant_output_dt.is_none() && x.datum_type == f32::datum_type());
    rule_if!(x.rank() > 0 && *op.axes == [x.rank() - 1]);
    rule_if!(x.shape[x.rank() - 1].to_usize().is_ok_and(|length| length <= LONGEST));
    TypedModelPatch::replace_single_op(model, node, &node.inputs, RowSoftmax).map(Some)
}

impl Op for RowSoftmax {
    fn name(&self) -> StaticName {
        "Softmax".into()
    }

    fn validation(&self) -> Validation {
        Validation::Rounding
    }

    op_as_typed_op!();
}

impl TypedOp for RowSoftmax {
    fn output_facts(&self, inputs: &[&TypedFact]) -> TractResult<TVec<TypedFact>> {
        Ok(tvec!(inputs[0].without_value()))
    }

    as_op!();
}

impl EvalOp for RowSoftmax {
    op_out_of_plan!();

    fn eval(&self, _: &EvalContext, inputs: TVec<TValue>) -> TractResult<TVec<TValue>> {
        let mut x = args_1!(inputs).into_tensor();
        let length = x.shape().last().copied().unwrap_or(1).max(1);
        for row in x.try_as_plain_ram_mut()?.as_slice_mut::<f32>()?.chunks_exact_mut(length) {
            let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut sum = 0.0;
            for x in row.iter_mut() {
                *x = (*x - most).exp();
                sum += *x;
            }
            row.iter_mut().for_each(|x| *x /= sum);
        }
        Ok(tvec!(x.into_tvalue()))
    }
}
