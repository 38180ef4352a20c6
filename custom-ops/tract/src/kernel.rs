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
        let elements = elements.insert(tensor.insert(made).try_as_plain_ram_mut()?);
        Ok(match dtype {
            DType::F16 => DataMut::F16(elements.as_slice_mut()?),
            _ => DataMut::F32(elements.as_slice_mut()?),
        })
    })?;
    output.with_context(|| format!("{}: no output was made", attributes.operator().name))
}
