//! Output shapes while a model is loaded, when some dimensions are symbols and some ranks are not known.

use crate::context::{Dimension, InferredInput, ShapeContext};
use crate::element::onnx_type;
use crate::failure::Failure;
use moh_operators::shape::OutputDim;
use moh_operators::{Attributes, DType, ElementType, Error, Operand, Operator};

/// Infers the shape of a node's output for the host.
pub(crate) fn infer(operator: &'static Operator, context: &ShapeContext<'_>) -> Result<(), Failure> {
    let attributes = Attributes::read(operator, |def| context.attribute(def))?;
    let inputs = context.inputs()?;
    let sizes = |input: &InferredInput<'_>| Some(input.dimensions.iter().map(|d| d.size).collect());
    let Some(output) = check(&attributes, &inputs.iter().map(sizes).collect::<Vec<_>>())? else { return Ok(()) };
    // Hosts call the first registration of a name for all of them: T is what the node's inputs are.
    let t = operator.inputs.iter().zip(&inputs).find(|(operand, _)| operand.ty == ElementType::T);
    let dtype = match operator.output.ty {
        ElementType::Float32 => Some(DType::F32),
        ElementType::T => t.and_then(|(_, input)| input.element_type.dtype()),
    };
    let dimension = |dim: &OutputDim| match *dim {
        OutputDim::Size(size) => i64::try_from(size).ok().map(|size| Dimension { size, name: c"" }),
        OutputDim::SameAs { input, axis } => inputs.get(input)?.dimensions.get(axis).copied(),
        OutputDim::Unknown => None,
    };
    // The API has no word for an unknown dimension: the host would take -1 for a size. Then nothing is said of the shape.
    let expressible = |d: &Dimension<'_>| d.size >= 0 || !d.name.is_empty();
    let output: Option<Vec<Dimension<'_>>> = output.iter().map(|dim| dimension(dim).filter(expressible)).collect();
    match (dtype, output) {
        (Some(dtype), Some(output)) => context.set_output(onnx_type(dtype), &output),
        _ => Ok(()),
    }
}

/// Judges attributes, and shapes as far as they are known: an input is `None` where it is absent, a size -1 where it is a symbol.
/// `None` where the output's rank does not follow.
///
/// # Errors
/// What the operator refuses.
pub(crate) fn check(attributes: &Attributes, inputs: &[Option<Vec<i64>>]) -> Result<Option<Vec<OutputDim>>, Error> {
    let operator = attributes.operator();
    // Hosts show a tensor of unknown rank like a scalar. Where a scalar is allowed the operator sees one, which fits everything.
    let unknown = |(operand, sizes): (&Operand, &Option<Vec<i64>>)| {
        !operand.optional && sizes.as_ref().is_some_and(Vec::is_empty)
    };
    let unknown_rank = operator.inputs.iter().zip(inputs).any(unknown);
    let sizes = |sizes: &Vec<i64>| sizes.iter().map(|&size| usize::try_from(size).ok()).collect();
    let known: Vec<Option<Vec<Option<usize>>>> = inputs.iter().map(|input| input.as_ref().map(sizes)).collect();
    let known: Vec<Option<&[Option<usize>]>> = known.iter().map(Option::as_deref).collect();
    match operator.infer(attributes, &known) {
        Ok(_) | Err(Error::Shape { .. }) if unknown_rank => Ok(None),
        result => result.map(Some),
    }
}
