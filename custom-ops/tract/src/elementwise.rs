//! Element-wise addition and multiplication.

use tract_onnx::tract_core::broadcast::multi_broadcast;
use tract_onnx::tract_core::ops::binary::TypedBinOp;
use tract_onnx::tract_core::ops::math::{Add, Mul};
use tract_onnx::tract_hir::internal::*;

/// `a + b` or `a * b` in float32 with broadcasting. tract's fast versions require fully known shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Elementwise {
    Add,
    Mul,
}

pub(crate) fn elementwise(
    _: &(),
    model: &TypedModel,
    node: &TypedNode,
    _: &str,
    op: &TypedBinOp,
) -> TractResult<Option<TypedModelPatch>> {
    let facts = model.node_input_facts(node.id)?;
    // With known shapes tract fuses operators itself.
    rule_if!(op.1.is_none() && facts.iter().any(|fact| !fact.shape.is_concrete()));
    rule_if!(facts.iter().all(|fact| fact.datum_type == f32::datum_type()));
    let op = match () {
        () if op.0.is::<Add>() => Elementwise::Add,
        () if op.0.is::<Mul>() => Elementwise::Mul,
        () => return Ok(None),
    };
    TypedModelPatch::replace_single_op(model, node, &node.inputs, op).map(Some)
}

impl Op for Elementwise {
    fn name(&self) -> StaticName {
        match self {
            Elementwise::Add => "Add".into(),
            Elementwise::Mul => "Mul".into(),
        }
    }

    op_as_typed_op!();
}

impl TypedOp for Elementwise {
    fn output_facts(&self, inputs: &[&TypedFact]) -> TractResult<TVec<TypedFact>> {
        let shapes: TVec<_> = inputs.iter().map(|fact| &fact.shape).collect();
        Ok(tvec!(f32::fact(multi_broadcast(&shapes)?)))
    }

    as_op!();
}

impl EvalOp for Elementwise {
    op_out_of_plan!();

    fn eval(&self, _: &EvalContext, inputs: TVec<TValue>) -> TractResult<TVec<TValue>> {
        let (a, b) = args_2!(inputs);
        let shape = multi_broadcast(&[a.shape(), b.shape()])?;
        // Both operations are commutative: computed in place in an operand that has the output's shape and no other
        // user.
        let reusable = |x: &TValue| x.shape() == &*shape && x.is_exclusive();
        let (a, b) = if !reusable(&a) && reusable(&b) { (b, a) } else { (a, b) };
        let mut output = match a.shape() == &*shape {
            true => a.into_tensor(),
            false => a.broadcast_to_shape(&shape)?,
        };
        let (mut to, from) = (output.try_as_plain_ram_mut()?, b.try_as_plain_ram()?);
        let (to, from) = (to.as_slice_mut::<f32>()?, from.as_slice::<f32>()?);
        match self {
            Elementwise::Add => apply(&shape, to, b.shape(), from, |a, b| *a += b),
            Elementwise::Mul => apply(&shape, to, b.shape(), from, |a, b| *a *= b),
        }
        Ok(tvec!(output.into_tvalue()))
    }
}

/// Applies `f` to every element of `to` (of `shape`) and the corresponding element of `from`, which is broadcast.
fn apply(shape: &[usize], to: &mut [f32], from_shape: &[usize], from: &[f32], f: impl Fn(&mut f32, f32)) {
    if to.is_empty() {
        return;
    }
    // The innermost axes that are contiguous in both, or along which `from` is constant.
    let spread = from_shape.last() != shape.last();
    let same = |axis: &usize| if spread { from_shape[*axis] == 1 } else { from_shape[*axis] == shape[*axis] };
    let outer = (0..shape.len()).rev().take_while(same).last().unwrap_or(shape.len());
    let inner: usize = shape[outer..].iter().product();
    let mut index: TVec<usize> = tvec!(0; outer);
    for to in to.chunks_exact_mut(inner) {
        let row = (0..outer)
            .fold(0, |row, axis| row * from_shape[axis] + if from_shape[axis] == 1 { 0 } else { index[axis] });
        if spread {
            to.iter_mut().for_each(|a| f(a, from[row]));
        } else {
            to.iter_mut().zip(&from[row * inner..]).for_each(|(a, &b)| f(a, b));
        }
        for axis in (0..outer).rev() {
            index[axis] += 1;
            if index[axis] < shape[axis] {
                break;
            }
            index[axis] = 0;
        }
    }
}
