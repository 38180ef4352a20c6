//! An ai.moh operator as a tract operator, before and after type inference.

use crate::constant::{self, Constant, Made};
use crate::facts::{self, Known};
use crate::kernel;
use moh_cpu::Input;
use moh_operators::Attributes;
use std::sync::Arc;
use tract_onnx::tract_core::ops::cast::cast;
use tract_onnx::tract_hir::internal::*;

/// An operator with its attributes, which determine the operator.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MohOp {
    attributes: Attributes,
    /// The inputs in schema order.
    slots: TVec<Slot>,
}

/// The source of an input.
#[derive(Debug, Clone, PartialEq)]
enum Slot {
    Absent,
    /// Index among the node's inputs in tract.
    Given(usize),
    Constant(Constant),
}

// Equality is reflexive: validation refuses NaN attributes.
impl Eq for MohOp {}

impl MohOp {
    /// `slots` has for every input in schema order its index among the inputs that are present.
    pub(crate) fn new(attributes: Attributes, slots: TVec<Option<usize>>) -> MohOp {
        let slots = slots.into_iter().map(|slot| slot.map_or(Slot::Absent, Slot::Given)).collect();
        MohOp { attributes, slots }
    }

    /// Makes input `input` a constant.
    pub(crate) fn hold(&mut self, input: usize, constant: Constant) {
        if self.slots.len() <= input {
            self.slots.resize(input + 1, Slot::Absent);
        }
        self.slots[input] = Slot::Constant(constant);
    }

    /// Moves the inputs in `constants` into the operator; the others remain tract inputs, in the same order.
    pub(crate) fn with_constants(&self, constants: &[Option<Arc<Tensor>>]) -> TractResult<MohOp> {
        let mut others = 0;
        let slot = |slot: &Slot| -> TractResult<Slot> {
            let Slot::Given(given) = *slot else { return Ok(slot.clone()) };
            match constants.get(given) {
                Some(Some(tensor)) => Ok(Slot::Constant(Constant::new(tensor.clone(), tensor.shape())?)),
                _ => {
                    others += 1;
                    Ok(Slot::Given(others - 1))
                }
            }
        };
        Ok(MohOp {
            attributes: self.attributes.clone(),
            slots: self.slots.iter().map(slot).collect::<TractResult<_>>()?,
        })
    }

    /// Packs the constants that the kernel supports in packed form.
    pub(crate) fn pack(&mut self, made: &mut Made) -> TractResult<()> {
        for (input, slot) in self.slots.iter_mut().enumerate() {
            if let Slot::Constant(constant) = slot {
                constant.pack(&self.attributes, input, made)?;
            }
        }
        Ok(())
    }

    fn label(&self) -> StaticName {
        self.attributes.operator().name.into()
    }

    fn check_count(&self, found: usize) -> TractResult<()> {
        let expected = self.slots.iter().filter(|slot| matches!(slot, Slot::Given(_))).count();
        ensure!(found == expected, "{}: expected {expected} inputs, found {found}", self.label());
        Ok(())
    }

    fn output(&self, given: &[Known<'_>]) -> TractResult<(DatumType, TVec<TDim>)> {
        self.check_count(given.len())?;
        let shape = |slot: &Slot| match slot {
            Slot::Constant(constant) => constant.shape().iter().map(|dim| dim.to_dim()).collect(),
            _ => TVec::new(),
        };
        let shapes: Vec<TVec<TDim>> = self.slots.iter().map(shape).collect();
        let mut constants = Vec::new();
        for (slot, shape) in self.slots.iter().zip(&shapes) {
            constants.push(match slot {
                Slot::Constant(constant) => Some(Known { datum_type: constant.datum_type()?, shape }),
                _ => None,
            });
        }
        let inputs: Vec<Option<&Known<'_>>> = self
            .slots
            .iter()
            .zip(&constants)
            .map(|(slot, constant)| match slot {
                Slot::Given(given_at) => given.get(*given_at),
                _ => constant.as_ref(),
            })
            .collect();
        facts::output(&self.attributes, &inputs)
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
        // tract computes with symbols where numbers follow from dimensions; kernels read numbers.
        let mut numbers = TVec::new();
        for (i, &input) in inputs.iter().enumerate() {
            numbers.push(match model.outlet_fact(input)?.datum_type == TDim::datum_type() {
                true => model.wire_node(format!("{prefix}.number_{i}"), cast(i64::datum_type()), &[input])?[0],
                false => input,
            });
        }
        model.wire_node(prefix, self.clone(), &numbers)
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

    fn eval(&self, _: &EvalContext, mut inputs: TVec<TValue>) -> TractResult<TVec<TValue>> {
        self.check_count(inputs.len())?;
        if let Some((index, mut tensor)) = self.take_in_place(&mut inputs)? {
            let shape: TVec<usize> = tensor.shape().into();
            let mut tensors = self.borrow(&inputs)?;
            let dtype = facts::dtype(tensor.datum_type()).context("an element type that no operator has")?;
            tensors[index] = Some(Input::InPlace(&shape, dtype));
            kernel::run_in_place(&self.attributes, &tensors, dtype, &mut tensor)?;
            return Ok(tvec!(tensor.into_tvalue()));
        }
        Ok(tvec!(kernel::run(&self.attributes, &self.borrow(&inputs)?, None)?.into_tvalue()))
    }
}

impl MohOp {
    /// The kernel's inputs in schema order.
    fn borrow<'a>(&'a self, inputs: &'a [TValue]) -> TractResult<Vec<Option<Input<'a>>>> {
        let mut tensors: Vec<Option<Input<'a>>> = Vec::with_capacity(self.slots.len());
        for slot in &self.slots {
            tensors.push(match slot {
                Slot::Absent => None,
                Slot::Given(given) => {
                    inputs.get(*given).map(|tensor| constant::borrow(tensor).map(Input::from)).transpose()?
                }
                Slot::Constant(constant) => Some(constant.borrow()?),
            });
        }
        Ok(tensors)
    }

    /// Takes the input whose memory may be the output's, with its number in schema order, if nobody else holds it and the output
    /// has its shape.
    fn take_in_place(&self, inputs: &mut [TValue]) -> TractResult<Option<(usize, Tensor)>> {
        let operator = self.attributes.operator();
        let Some((index, Slot::Given(given))) = operator.in_place.and_then(|i| Some((i, self.slots.get(i)?))) else {
            return Ok(None);
        };
        let tensors = self.borrow(inputs)?;
        let described: Vec<_> = tensors.iter().map(|tensor| tensor.map(|t| (t.shape(), t.dtype()))).collect();
        let (_, shape) = operator.validate(&self.attributes, &described)?;
        let Some(input) = inputs.get_mut(*given).filter(|input| *input.shape() == *shape) else { return Ok(None) };
        let taken = std::mem::replace(input, Tensor::default().into_tvalue());
        match Arc::try_unwrap(taken.into_arc_tensor()) {
            Ok(tensor) => Ok(Some((index, tensor))),
            Err(shared) => {
                *input = shared.into_tvalue();
                Ok(None)
            }
        }
    }
}
