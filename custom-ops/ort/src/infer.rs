//! Shape inference while a model is loaded, with symbolic dimensions and unknown ranks.

use crate::context::{Dimension, InferredInput, ShapeContext};
use crate::element::onnx_type;
use crate::failure::Failure;
use moh_operators::shape::OutputDim;
use moh_operators::{Attributes, ElementType, Error, Operand, Operator};

/// Infers the type and shape of a node's output for the host.
pub(crate) fn infer(operator: &'static Operator, context: &ShapeContext<'_>) -> Result<(), Failure> {
    let attributes = Attributes::read(operator, |def| context.attribute(def))?;
    let inputs = context.inputs()?;
    let sizes = |input: &InferredInput<'_>| Some(input.dimensions.iter().map(|d| d.size).collect());
    let Some(output) = check(&attributes, &inputs.iter().map(sizes).collect::<Vec<_>>())? else { return Ok(()) };
    // Hosts call the first registration of an operator for all element types, so T is read from the node's inputs.
    let t = operator.inputs.iter().zip(&inputs).find(|(operand, _)| operand.ty == ElementType::T);
    let dtype = operator.output.ty.fixed().or_else(|| t.and_then(|(_, input)| input.element_type.dtype()));
    let dimension = |dim: &OutputDim| match *dim {
        OutputDim::Size(size) => i64::try_from(size).ok().map(|size| Dimension { size, name: c"" }),
        OutputDim::SameAs { input, axis } => inputs.get(input)?.dimensions.get(axis).copied(),
        OutputDim::Max(_) | OutputDim::Unknown => None,
    };
    // The API cannot express an unknown dimension: the host would read -1 as a size. In that case no shape is set.
    let expressible = |d: &Dimension<'_>| d.size >= 0 || !d.name.is_empty();
    let output: Option<Vec<Dimension<'_>>> = output.iter().map(|dim| dimension(dim).filter(expressible)).collect();
    match (dtype, output) {
        (Some(dtype), Some(output)) => context.set_output(onnx_type(dtype), &output),
        _ => Ok(()),
    }
}

/// Checks attributes, and shapes as far as they are known: an absent input is `None`, a symbolic size -1. Returns
/// `None` if the output's rank does not follow.
///
/// # Errors
/// Errors of the operator's validation.
pub(crate) fn check(attributes: &Attributes, inputs: &[Option<Vec<i64>>]) -> Result<Option<Vec<OutputDim>>, Error> {
    let operator = attributes.operator();
    // Hosts represent a tensor of unknown rank like a scalar. An optional one may be a scalar; where that is not valid, the node is checked
    // without it.
    let is_unknown = |sizes: &Option<Vec<i64>>| sizes.as_ref().is_some_and(Vec::is_empty);
    let unknown = |(operand, sizes): (&Operand, &Option<Vec<i64>>)| !operand.optional && is_unknown(sizes);
    let unknown_rank = operator.inputs.iter().zip(inputs).any(unknown);
    let known = known(inputs);
    let mut known: Vec<Option<&[Option<usize>]>> = known.iter().map(Option::as_deref).collect();
    let mut result = operator.infer(attributes, &known);
    if let Err(Error::Shape { .. }) = result {
        for (operand, sizes) in operator.inputs.iter().zip(&mut known) {
            *sizes = sizes.filter(|sizes| !(operand.optional && sizes.is_empty()));
        }
        result = operator.infer(attributes, &known);
    }
    match result {
        Ok(_) | Err(Error::Shape { .. }) if unknown_rank => Ok(None),
        result => result.map(Some),
    }
}

/// The shape, and the number of all elements, of the tensor that stands in for an absent input; `None` if there is none.
#[cfg(feature = "cuda")]
pub(crate) fn filler(attributes: &Attributes, inputs: &[Option<Vec<i64>>], input: usize) -> Option<(Vec<usize>, u8)> {
    let operator = attributes.operator();
    let known = known(inputs);
    let known: Vec<Option<&[Option<usize>]>> = known.iter().map(Option::as_deref).collect();
    Some((operator.zeros(attributes, &known, input)?, operator.filler(attributes, input)))
}

/// Sizes as far as they are known.
fn known(inputs: &[Option<Vec<i64>>]) -> Vec<Option<Vec<Option<usize>>>> {
    let sizes = |sizes: &Vec<i64>| sizes.iter().map(|&size| usize::try_from(size).ok()).collect();
    inputs.iter().map(|input| input.as_ref().map(sizes)).collect()
}
