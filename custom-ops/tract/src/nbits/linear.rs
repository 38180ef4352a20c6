//! Products with a matrix in blocks.

use super::blocks::Blocks;
use crate::bytes::Bytes;
use crate::linear::{is_row, keeping_last_axis};
use moh_cpu::nbits::{Level, Linear};
use tract_onnx::tract_hir::internal::*;
use zerocopy::{FromBytes, Immutable};

/// `x W^T + bias` along the last axis for a constant W (rows, width) in blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BlockLinear {
    pub(crate) weight: Blocks,
    /// (rows) elements of the scales' type.
    pub(crate) bias: Option<Bytes>,
    /// Whether the activations are quantised to 8 bits, too.
    pub(crate) level: Level,
}

impl BlockLinear {
    /// The same with a bias; only if there is none yet.
    pub(crate) fn with_bias(&self, bias: &Tensor) -> TractResult<BlockLinear> {
        ensure!(self.bias.is_none() && bias.datum_type() == self.weight.datum_type && bias.len() == self.columns());
        Ok(BlockLinear { bias: Some(bias.try_as_plain_ram()?.as_bytes().into()), ..self.clone() })
    }

    /// Length of the output's last axis.
    pub(crate) fn columns(&self) -> usize {
        self.weight.sizes.rows
    }

    fn output<D: DimLike>(&self, datum_type: DatumType, x: &[D]) -> TractResult<TVec<D>> {
        let (expected, width) = (self.weight.datum_type, self.weight.sizes.width);
        ensure!(
            datum_type == expected && is_row(x, width),
            "expected {width} elements of type {expected:?} in the last axis, found {datum_type:?} of {x:?}"
        );
        let mut shape: TVec<D> = x.into();
        shape.pop();
        shape.push(self.columns().into());
        Ok(shape)
    }
}

impl Expansion for BlockLinear {
    fn name(&self) -> StaticName {
        "BlockLinear".into()
    }

    fn rules<'r, 'p: 'r, 's: 'r>(
        &'s self,
        solver: &mut Solver<'r>,
        inputs: &'p [TensorProxy],
        outputs: &'p [TensorProxy],
    ) -> InferenceResult {
        check_output_arity(outputs, 1)?;
        // Where `prepare` moved no constants, as in the body of a loop, they are further inputs, which `parse` has read.
        ensure!(!inputs.is_empty(), "input 0 is missing");
        solver.equals(&inputs[0].datum_type, &outputs[0].datum_type)?;
        solver.given_2(&inputs[0].datum_type, &inputs[0].shape, move |solver, datum_type, shape| {
            solver.equals(&outputs[0].shape, self.output(datum_type, &shape)?)
        })
    }

    fn wire(&self, prefix: &str, model: &mut TypedModel, inputs: &[OutletId]) -> TractResult<TVec<OutletId>> {
        model.wire_node(prefix, self.clone(), &inputs[..1])
    }
}

impl Op for BlockLinear {
    fn name(&self) -> StaticName {
        "BlockLinear".into()
    }

    fn info(&self) -> TractResult<Vec<String>> {
        let sizes = self.weight.sizes;
        Ok(vec![format!("{} -> {}, {} bits, blocks of {}", sizes.width, sizes.rows, sizes.bits, sizes.block)])
    }

    fn validation(&self) -> Validation {
        Validation::Rounding
    }

    op_as_typed_op!();
}

impl TypedOp for BlockLinear {
    fn output_facts(&self, inputs: &[&TypedFact]) -> TractResult<TVec<TypedFact>> {
        let &[x] = inputs else { bail!("expected 1 input, found {}", inputs.len()) };
        Ok(tvec!(x.datum_type.fact(self.output(x.datum_type, x.shape.dims())?)))
    }

    fn change_axes(
        &self,
        model: &TypedModel,
        node: &TypedNode,
        _: InOut,
        change: &AxisOp,
    ) -> TractResult<Option<AxisChangeConsequence>> {
        keeping_last_axis(model, node, change)
    }

    as_op!();
}

impl EvalOp for BlockLinear {
    op_out_of_plan!();

    fn eval(&self, _: &EvalContext, inputs: TVec<TValue>) -> TractResult<TVec<TValue>> {
        let x = args_1!(inputs);
        let shape = self.output(x.datum_type(), x.shape())?;
        // SAFETY: every bit pattern is a float. The product writes every element, or fails, and then the tensor is dropped.
        let mut y = unsafe { Tensor::uninitialized_dt(x.datum_type(), &shape)? };
        match x.datum_type() {
            DatumType::F16 => self.multiply::<f16>(&x, &mut y)?,
            _ => self.multiply::<f32>(&x, &mut y)?,
        }
        Ok(tvec!(y.into_tvalue()))
    }
}

impl BlockLinear {
    fn multiply<T: Linear + Datum + FromBytes + Immutable>(&self, x: &Tensor, y: &mut Tensor) -> TractResult<()> {
        let (x, mut y) = (x.try_as_plain_ram()?, y.try_as_plain_ram_mut()?);
        let bias = self.bias.as_ref().map(Bytes::cast::<T>).transpose()?;
        self.weight.multiply(x.as_slice()?, bias, y.as_slice_mut()?, self.level)
    }
}
