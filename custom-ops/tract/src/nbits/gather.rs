//! Rows of a table in blocks.

use super::blocks::Blocks;
use tract_onnx::tract_hir::internal::*;

/// Row `indices[i]` of a constant table (rows, width) in blocks, dequantised: (dims of the indices, width).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BlockGather {
    pub(crate) table: Blocks,
}

impl BlockGather {
    fn output<D: Clone + From<usize>>(&self, indices: &[D]) -> TVec<D> {
        indices.iter().cloned().chain([self.table.sizes.width.into()]).collect()
    }
}

impl Expansion for BlockGather {
    fn name(&self) -> StaticName {
        "BlockGather".into()
    }

    fn rules<'r, 'p: 'r, 's: 'r>(
        &'s self,
        solver: &mut Solver<'r>,
        inputs: &'p [TensorProxy],
        outputs: &'p [TensorProxy],
    ) -> InferenceResult {
        check_output_arity(outputs, 1)?;
        check_input_arity(inputs, 1)?;
        solver.equals(&outputs[0].datum_type, self.table.datum_type)?;
        solver.given(&inputs[0].shape, move |solver, shape| solver.equals(&outputs[0].shape, self.output(&shape)))
    }

    fn wire(&self, prefix: &str, model: &mut TypedModel, inputs: &[OutletId]) -> TractResult<TVec<OutletId>> {
        model.wire_node(prefix, self.clone(), inputs)
    }
}

impl Op for BlockGather {
    fn name(&self) -> StaticName {
        "BlockGather".into()
    }

    op_as_typed_op!();
}

impl TypedOp for BlockGather {
    fn output_facts(&self, inputs: &[&TypedFact]) -> TractResult<TVec<TypedFact>> {
        let &[indices] = inputs else { bail!("expected 1 input, found {}", inputs.len()) };
        Ok(tvec!(self.table.datum_type.fact(self.output(indices.shape.dims()))))
    }

    as_op!();
}

impl EvalOp for BlockGather {
    op_out_of_plan!();

    fn eval(&self, _: &EvalContext, inputs: TVec<TValue>) -> TractResult<TVec<TValue>> {
        let indices = args_1!(inputs);
        let rows = self.table.sizes.rows as i64;
        let mut out = Tensor::zero::<f32>(&self.output(indices.shape()))?;
        let numbers = indices.cast_to::<i64>()?;
        let numbers = numbers.try_as_plain_ram()?;
        let mut view = out.try_as_plain_ram_mut()?;
        let lines = view.as_slice_mut::<f32>()?.chunks_exact_mut(self.table.sizes.width);
        for (line, &index) in lines.zip(numbers.as_slice::<i64>()?) {
            ensure!((-rows..rows).contains(&index), "expected an index below {rows}, found {index}");
            self.table.dequantize(index.rem_euclid(rows) as usize, line)?;
        }
        Ok(tvec!(out.cast_to_dt(self.table.datum_type)?.into_owned().into_tvalue()))
    }
}
