//! Runs kernels on tract tensors.

use crate::facts;
use crate::host::TractHost;
use moh_cpu::Input;
use moh_operators::{Attributes, DType, DataMut};
use tract_onnx::tract_hir::internal::*;

/// Runs an operator's kernel on inputs in schema order. The output has shape `shape`, or else the shape that the
/// operator infers.
pub(crate) fn run(
    attributes: &Attributes,
    inputs: &[Option<Input<'_>>],
    shape: Option<&[usize]>,
) -> TractResult<Tensor> {
    let (mut output, mut view) = (None, None);
    let (tensor, elements) = (&mut output, &mut view);
    moh_cpu::run_into(attributes, inputs, &TractHost::current(), |dtype, computed| -> TractResult<DataMut<'_>> {
        // SAFETY: every bit pattern is a float. A kernel writes every element, or fails, and then the tensor is
        // dropped.
        let made = unsafe { Tensor::uninitialized_dt(facts::datum_type(dtype)?, shape.unwrap_or(computed))? };
        self::elements(elements.insert(tensor.insert(made).try_as_plain_ram_mut()?), dtype)
    })?;
    output.with_context(|| format!("{}: no output was made", attributes.operator().name))
}

/// The elements of an output of type `dtype`.
fn elements<'a>(view: &'a mut PlainViewMut<'_>, dtype: DType) -> TractResult<DataMut<'a>> {
    Ok(match dtype {
        DType::F16 => DataMut::F16(view.as_slice_mut()?),
        DType::U8 => DataMut::U8(view.as_slice_mut()?),
        DType::I64 => DataMut::I64(view.as_slice_mut()?),
        DType::F32 | DType::BF16 => DataMut::F32(view.as_slice_mut()?),
    })
}

/// Runs an operator's kernel on an output that already holds the input of [`moh_operators::Operator::in_place`].
pub(crate) fn run_in_place(
    attributes: &Attributes,
    inputs: &[Option<Input<'_>>],
    dtype: DType,
    tensor: &mut Tensor,
) -> TractResult<()> {
    let mut view = tensor.try_as_plain_ram_mut()?;
    moh_cpu::run(attributes, inputs, elements(&mut view, dtype)?, &TractHost::current())?;
    Ok(())
}
