//! Type and shape inference.

use moh_operators::shape::OutputDim;
use moh_operators::{Attributes, DType, ElementType};
use tract_onnx::tract_hir::internal::*;

/// The known type and shape of one input.
pub(crate) struct Known<'a> {
    pub(crate) datum_type: DatumType,
    pub(crate) shape: &'a [TDim],
}

/// Infers the output's type and shape from the operator's inputs in schema order; symbolic dimensions stay symbolic.
pub(crate) fn output(attributes: &Attributes, inputs: &[Option<&Known<'_>>]) -> TractResult<(DatumType, TVec<TDim>)> {
    let operator = attributes.operator();
    let dims: Vec<Option<Vec<Option<usize>>>> =
        inputs.iter().map(|input| input.map(|input| input.shape.iter().map(|d| d.to_usize().ok()).collect())).collect();
    let dims: Vec<Option<&[Option<usize>]>> = dims.iter().map(Option::as_deref).collect();
    let output = operator.infer(attributes, &dims)?;

    let mut shape = tvec!();
    for (axis, dim) in output.into_iter().enumerate() {
        shape.push(match dim {
            OutputDim::Size(n) => n.to_dim(),
            OutputDim::SameAs { input, axis } => {
                let same = inputs.get(input).copied().flatten().and_then(|input| input.shape.get(axis));
                same.cloned().with_context(|| format!("{}: no axis {axis} of input {input}", operator.name))?
            }
            OutputDim::Unknown => bail!(
                "{}: dimension {axis} of {} does not follow from the inputs: widths must be numbers, not symbols",
                operator.name,
                operator.output.name
            ),
        });
    }
    Ok((element_type(attributes, inputs)?, shape))
}

/// The output's element type. Inputs of type T must agree.
fn element_type(attributes: &Attributes, inputs: &[Option<&Known<'_>>]) -> TractResult<DatumType> {
    let operator = attributes.operator();
    let mut t: Option<DatumType> = None;
    for (operand, input) in operator.inputs.iter().zip(inputs) {
        let Some(&Known { datum_type: found, .. }) = *input else { continue };
        let expected = match operand.ty {
            ElementType::Float32 => f32::datum_type(),
            ElementType::T => *t.get_or_insert(found),
        };
        ensure!(
            found == expected && dtype(found).is_some(),
            "{}: input {}: expected element type {}, found {found:?}",
            operator.name,
            operand.name,
            dtype(expected).map_or("float32 or float16".to_owned(), |t| t.to_string()),
        );
    }
    match operator.output.ty {
        ElementType::T => Ok(t.unwrap_or(f32::datum_type())),
        ElementType::Float32 => Ok(f32::datum_type()),
    }
}

/// The kernels' element type; `None` for other types. tract has no bfloat16.
pub(crate) fn dtype(datum_type: DatumType) -> Option<DType> {
    match datum_type {
        DatumType::F32 => Some(DType::F32),
        DatumType::F16 => Some(DType::F16),
        _ => None,
    }
}

/// The reverse of [`dtype`].
pub(crate) fn datum_type(dtype: DType) -> TractResult<DatumType> {
    match dtype {
        DType::F32 => Ok(DatumType::F32),
        DType::F16 => Ok(DatumType::F16),
        DType::BF16 => bail!("tract has no bfloat16"),
    }
}
