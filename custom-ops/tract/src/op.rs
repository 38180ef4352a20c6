//! One ai.moh operator as a tract operator, before and after type inference.

use crate::facts::{self, Known};
use crate::{constant, kernel};
use moh_kernels::Attributes;
use tract_onnx::tract_hir::internal::*;

/// An operator with its attributes; which one, only the attributes know.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MohOp {
    attributes: Attributes,
    /// For every input in schema order the position among the inputs that are there.
    slots: TVec<Option<usize>>,
}

// An attribute is never NaN in an operator that runs: validation refuses it.
impl Eq for MohOp {}

impl MohOp {
    pub(crate) fn new(attributes: Attributes, slots: TVec<Option<usize>>) -> MohOp {
        MohOp { attributes, slots }
    }

    fn label(&self) -> StaticName {
        self.attributes.operator().name.into()
    }

    /// `given`, what tract has, in schema order.
    fn in_schema_order<'a, T>(&self, given: &'a [T]) -> TractResult<Vec<Option<&'a T>>> {
        let expected = self.slots.iter().flatten().count();
        ensure!(given.len() == expected, "{}: expected {expected} inputs, found {}", self.label(), given.len());
        Ok(self.slots.iter().map(|slot| slot.and_then(|slot| given.get(slot))).collect())
    }

    fn output(&self, given: &[Known<'_>]) -> TractResult<(DatumType, TVec<TDim>)> {
        facts::output(&self.attributes, &self.in_schema_order(given)?)
    }
}

impl Expansion for MohOp {
    fn name(&self) -> StaticName {
        self.label()
    }

    fn rules<'r, 'p: 'r, 's: 'r>(
        &'s self,
        solver: &mut Solver<'r>,
        inputs: &'p [TensorProxy],
        outputs: &'p [TensorProxy],
    ) -> InferenceResult {
        check_output_arity(outputs, 1)?;
        solver.given_all(inputs.iter().map(|input| &input.datum_type), move |solver, types: Vec<DatumType>| {
            solver.given_all(inputs.iter().map(|input| &input.shape), move |solver, shapes: Vec<TVec<TDim>>| {
                let known: Vec<Known<'_>> =
                    types.iter().zip(&shapes).map(|(&datum_type, shape)| Known { datum_type, shape }).collect();
                let (datum_type, shape) = self.output(&known)?;
                solver.equals(&outputs[0].datum_type, datum_type)?;
                solver.equals(&outputs[0].shape, shape)
            })
        })
    }

    fn wire(&self, prefix: &str, model: &mut TypedModel, inputs: &[OutletId]) -> TractResult<TVec<OutletId>> {
        model.wire_node(prefix, self.clone(), inputs)
    }
}

impl Op for MohOp {
    fn name(&self) -> StaticName {
        self.label()
    }

    fn info(&self) -> TractResult<Vec<String>> {
        Ok(self.attributes.iter().map(|(def, value)| format!("{}: {value:?}", def.name)).collect())
    }

    fn validation(&self) -> Validation {
        Validation::Rounding
    }

    op_as_typed_op!();
}

impl TypedOp for MohOp {
    fn output_facts(&self, inputs: &[&TypedFact]) -> TractResult<TVec<TypedFact>> {
        let known: Vec<Known<'_>> =
            inputs.iter().map(|fact| Known { datum_type: fact.datum_type, shape: fact.shape.dims() }).collect();
        let (datum_type, shape) = self.output(&known)?;
        Ok(tvec!(datum_type.fact(shape)))
    }

    as_op!();
}

impl EvalOp for MohOp {
    op_out_of_plan!();

    fn eval(&self, _: &EvalContext, inputs: TVec<TValue>) -> TractResult<TVec<TValue>> {
        let tensors = self.in_schema_order(&inputs)?;
        let tensors: Vec<_> = tensors
            .into_iter()
            .map(|tensor| tensor.map(|tensor| constant::borrow(tensor)).transpose())
            .collect::<TractResult<_>>()?;
        Ok(tvec!(kernel::run(&self.attributes, &tensors, None)?.into_tvalue()))
    }
}
