//! Type and shape inference.

use moh_operators::shape::OutputDim;
use moh_operators::{Attributes, DType};
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
    let found = |(input, axis): (usize, usize)| {
        let dim = inputs.get(input).copied().flatten().and_then(|input| input.shape.get(axis));
        dim.cloned().with_context(|| format!("{}: no axis {axis} of input {input}", operator.name))
    };
    for (axis, dim) in output.into_iter().enumerate() {
        shape.push(match dim {
            OutputDim::Size(n) => n.to_dim(),
            OutputDim::SameAs { input, axis } => found((input, axis))?,
            OutputDim::Max([a, b]) => TDim::Max(vec![found(a)?, found(b)?]).simplify(),
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
        let (expected, fits) = match operand.ty.fixed() {
            // Numbers that follow from dimensions are symbols until they are cast.
            Some(DType::I64) if found == TDim::datum_type() => continue,
            Some(fixed) => (datum_type(fixed)?, true),
            None => (*t.get_or_insert(found), is_float(found)),
        };
        ensure!(
            found == expected && fits,
            "{}: input {}: expected element type {}, found {found:?}",
            operator.name,
            operand.name,
            dtype(expected).filter(|_| fits).map_or("float32 or float16".to_owned(), |t| t.to_string()),
        );
    }
    operator.output.ty.fixed().map_or(Ok(t.unwrap_or(f32::datum_type())), datum_type)
}

/// The kernels' element type; `None` for other types. tract has no bfloat16.
pub(crate) fn dtype(datum_type: DatumType) -> Option<DType> {
    match datum_type {
        DatumType::F32 => Some(DType::F32),
        DatumType::F16 => Some(DType::F16),
        DatumType::U8 => Some(DType::U8),
        DatumType::I64 => Some(DType::I64),
        _ => None,
    }
}

/// Whether the operators' type parameter T can be this type.
pub(crate) fn is_float(datum_type: DatumType) -> bool {
    dtype(datum_type).is_some_and(DType::is_float)
}

/// The reverse of [`dtype`].
pub(crate) fn datum_type(dtype: DType) -> TractResult<DatumType> {
    match dtype {
        DType::F32 => Ok(DatumType::F32),
        DType::F16 => Ok(DatumType::F16),
        DType::U8 => Ok(DatumType::U8),
        DType::I64 => Ok(DatumType::I64),
        DType::BF16 => bail!("tract has no bfloat16"),
    }
}
