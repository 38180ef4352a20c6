//! Calls of the kernels.

use crate::facts;
use crate::host::TractHost;
use moh_kernels::{Attributes, DType, DataMut, Tensor as Borrowed, cpu};
use tract_onnx::tract_hir::internal::*;

/// Runs an operator's kernel on inputs in schema order; `shape`, or that which the operator gives, is the output's.
pub(crate) fn run(
    attributes: &Attributes,
    inputs: &[Option<Borrowed<'_>>],
    shape: Option<&[usize]>,
) -> TractResult<Tensor> {
    let (dtype, computed) = attributes.operator().validate(attributes, inputs)?;
    let dtype = attributes.operator().output_dtype(dtype);
    let shape = shape.unwrap_or(&computed);
    // SAFETY: every bit pattern is a float, and a kernel writes every element or fails, when the tensor is dropped.
    let mut output = unsafe { Tensor::uninitialized_dt(facts::datum_type(dtype)?, shape)? };
    let mut view = output.try_as_plain_ram_mut()?;
    let data = match dtype {
        DType::F16 => DataMut::F16(view.as_slice_mut()?),
        _ => DataMut::F32(view.as_slice_mut()?),
    };
    cpu::run(attributes, inputs, data, &TractHost::current())?;
    Ok(output)
}
