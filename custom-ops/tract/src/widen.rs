//! float16 in tract's own operators.

use half::slice::HalfFloatSliceExt as _;
use std::collections::HashSet;
use tract_onnx::tract_core::ops::binary::TypedBinOp;
use tract_onnx::tract_core::ops::cast::{Cast, cast};
use tract_onnx::tract_core::ops::cnn::{Conv, Deconv};
use tract_onnx::tract_core::ops::einsum::EinSum;
use tract_onnx::tract_core::ops::element_wise::ElementWiseOp;
use tract_onnx::tract_core::ops::nn::{Reduce, Reducer, Softmax};
use tract_onnx::tract_hir::internal::*;

const NARROW: DatumType = DatumType::F16;
const WIDE: DatumType = DatumType::F32;

/// Names of a model's own casts.
type Own = HashSet<String>;

/// Computes in float32, between casts, what tract would compute in float16, outside of loops. tract emulates float16, number by
/// number, on processors without such arithmetic. This crate's operators read and write float16 themselves.
pub(crate) fn widen(model: &mut TypedModel) -> TractResult<()> {
    let own = model.nodes.iter().filter(|node| node.op_is::<Cast>()).map(|node| node.name.clone()).collect();
    Rewriter::default()
        .with_rule_for("wide element-wise", rule::<ElementWiseOp>)
        .with_rule_for("wide binary", rule::<TypedBinOp>)
        .with_rule_for("wide product", rule::<EinSum>)
        .with_rule_for("wide convolution", rule::<Conv>)
        .with_rule_for("wide deconvolution", rule::<Deconv>)
        .with_rule_for("wide softmax", rule::<Softmax>)
        .with_rule_for("wide reduction", rule::<Reduce>)
        .with_rule_for("cancelled casts", cancel)
        .rewrite(&own, model)
}

/// An operator that may compute in float16.
trait Widen: Sized {
    /// The operator in float32; nothing for one that is quantised, or only moves numbers.
    fn wide(&self) -> Option<Self>;
}

impl Widen for ElementWiseOp {
    fn wide(&self) -> Option<Self> {
        Some(ElementWiseOp(self.0.clone(), self.1.map(wide)))
    }
}

impl Widen for TypedBinOp {
    fn wide(&self) -> Option<Self> {
        Some(TypedBinOp(self.0.clone(), self.1.map(wide)))
    }
}

impl Widen for EinSum {
    fn wide(&self) -> Option<Self> {
        self.q_params.is_none().then(|| EinSum { operating_dt: wide(self.operating_dt), ..self.clone() })
    }
}

impl Widen for Conv {
    fn wide(&self) -> Option<Self> {
        self.q_params.is_none().then(|| self.clone())
    }
}

impl Widen for Deconv {
    fn wide(&self) -> Option<Self> {
        Some(self.clone())
    }
}

impl Widen for Softmax {
    fn wide(&self) -> Option<Self> {
        self.quant_output_dt.is_none().then(|| self.clone())
    }
}

impl Widen for Reduce {
    fn wide(&self) -> Option<Self> {
        matches!(self.reducer, Reducer::Sum | Reducer::Prod | Reducer::MeanOfSquares).then(|| self.clone())
    }
}

fn wide(datum_type: DatumType) -> DatumType {
    if datum_type == NARROW { WIDE } else { datum_type }
}

fn rule<O: Widen + TypedOp>(
    _: &Own,
    model: &TypedModel,
    node: &TypedNode,
    name: &str,
    op: &O,
) -> TractResult<Option<TypedModelPatch>> {
    rule_if!(model.node_input_facts(node.id)?.iter().any(|fact| fact.datum_type == NARROW));
    rule_if_some!(op = op.wide());
    let mut patch = TypedModelPatch::new("float32 in place of float16");
    let mut inputs = patch.taps(model, &node.inputs)?;
    for (i, input) in inputs.iter_mut().enumerate() {
        if patch.outlet_fact(*input)?.datum_type == NARROW {
            *input = patch.wire_node(format!("{name}.wide_{i}"), cast(WIDE), &[*input])?[0];
        }
    }
    for (i, output) in patch.wire_node(name, op, &inputs)?.into_iter().enumerate() {
        let outlet = OutletId::new(node.id, i);
        let output = match model.outlet_fact(outlet)?.datum_type == NARROW {
            true => patch.wire_node(format!("{name}.narrow_{i}"), cast(NARROW), &[output])?[0],
            false => output,
        };
        patch.shunt_outside(model, outlet, output)?;
    }
    Ok(Some(patch))
}

/// Reads a float32 tensor that was rounded to float16 and back as it was before, as onnxruntime does. A model that asks for both casts
/// itself wants the rounding.
fn cancel(
    own: &Own,
    model: &TypedModel,
    node: &TypedNode,
    name: &str,
    op: &Cast,
) -> TractResult<Option<TypedModelPatch>> {
    let narrowed = model.node(node.inputs[0].node);
    rule_if!(op.to == WIDE && narrowed.op_as::<Cast>().is_some_and(|cast| cast.to == NARROW));
    rule_if!(!(own.contains(name) && own.contains(&narrowed.name)));
    rule_if!(model.outlet_fact(narrowed.inputs[0])?.datum_type == WIDE);
    let mut patch = TypedModelPatch::new("not rounded in between");
    let x = patch.tap_model(model, narrowed.inputs[0])?;
    patch.shunt_outside(model, node.id.into(), x)?;
    Ok(Some(patch))
}

/// A cast between float16 and float32 with the processor's instructions for it, which tract's cast does without.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Convert {
    to: DatumType,
}

impl Convert {
    /// What replaces the cast of a tensor of type `from`.
    pub(crate) fn of(cast: &Cast, from: DatumType) -> Option<Convert> {
        matches!((from, cast.to), (NARROW, WIDE) | (WIDE, NARROW)).then_some(Convert { to: cast.to })
    }
}

impl Op for Convert {
    fn name(&self) -> StaticName {
        "Cast".into()
    }

    op_as_typed_op!();
}

impl TypedOp for Convert {
    fn output_facts(&self, inputs: &[&TypedFact]) -> TractResult<TVec<TypedFact>> {
        Ok(tvec!(self.to.fact(inputs[0].shape.clone())))
    }

    as_op!();
}

impl EvalOp for Convert {
    op_out_of_plan!();

    fn eval(&self, _: &EvalContext, inputs: TVec<TValue>) -> TractResult<TVec<TValue>> {
        let x = args_1!(inputs);
        // SAFETY: every bit pattern is a float, and the conversion writes every element.
        let mut output = unsafe { Tensor::uninitialized_dt(self.to, x.shape())? };
        let (from, mut to) = (x.try_as_plain_ram()?, output.try_as_plain_ram_mut()?);
        if self.to == NARROW {
            to.as_slice_mut::<f16>()?.convert_from_f32_slice(from.as_slice()?);
        } else {
            from.as_slice::<f16>()?.convert_to_f32_slice(to.as_slice_mut()?);
        }
        Ok(tvec!(output.into_tvalue()))
    }
}
