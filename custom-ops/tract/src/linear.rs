//! Matrix products with constant matrices.

use crate::constant::{self, Constant, Made};
use crate::kernel;
use crate::prepare::hold;
use moh_operators::routed_projection::{self, WeightLayout};
use moh_operators::{Attributes, Data, RoutedProjection, Tensor as Borrowed, linear};
use std::sync::Arc;
use tract_onnx::model::ParsingContext;
use tract_onnx::pb::NodeProto;
use tract_onnx::tract_hir::internal::*;

/// Memory layout of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// (out, in), as in `nn.Linear`.
    OutIn,
    /// (in, out), as in MatMul.
    InOut,
}

/// `x W + bias` along the last axis for a constant W: an `ai.moh.Linear`, or for a transposed W a RoutedProjection with one head that is
/// on for every row.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Linear {
    attributes: Attributes,
    layout: Layout,
    weight: Constant,
    bias: Option<Constant>,
    width: usize,
    columns: usize,
}

// The derived PartialEq is reflexive, because the attributes are integers.
impl Eq for Linear {}

impl Linear {
    /// A product with a matrix of rank 2.
    pub(crate) fn new(weight: Constant, layout: Layout) -> TractResult<Linear> {
        let &[rows, columns] = weight.shape() else { bail!("expected a matrix of rank 2, found {:?}", weight.shape()) };
        let one = routed_projection::Attributes { num_heads: 1, weight_layout: WeightLayout::OutIn };
        let (attributes, [width, columns]) = match layout {
            Layout::OutIn => (Attributes::new::<RoutedProjection>(one)?, [columns, rows]),
            Layout::InOut => (Attributes::new::<moh_operators::Linear>(linear::Attributes {})?, [rows, columns]),
        };
        Ok(Linear { attributes, layout, weight, bias: None, width, columns })
    }

    /// The same with a bias; only if there is none yet.
    pub(crate) fn with_bias(&self, bias: Arc<Tensor>) -> TractResult<Linear> {
        ensure!(self.bias.is_none() && bias.datum_type() == self.weight.datum_type()?);
        Ok(Linear { bias: Some(Constant::new(bias, &[self.columns])?), ..self.clone() })
    }

    /// Packs the matrix.
    pub(crate) fn pack(&mut self, made: &mut Made) -> TractResult<()> {
        self.weight.pack(&self.attributes, 1, made)
    }

    /// Whether a bias is set.
    pub(crate) fn has_bias(&self) -> bool {
        self.bias.is_some()
    }

    /// Whether the matrix may be multiplied by rows of a tensor of this shape.
    pub(crate) fn fits(&self, shape: &[TDim]) -> bool {
        is_row(shape, self.width)
    }

    /// Length of the output's last axis.
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }
}

/// Parses a MatMul that holds its matrix.
pub(crate) fn parse(context: &ParsingContext, node: &NodeProto) -> TractResult<(Box<dyn InferenceOp>, Vec<String>)> {
    let weight = hold::held(node, 1).context("the product holds no matrix")?;
    Ok((expand(Linear::new(Constant::held(context, weight)?, Layout::InOut)?), vec![]))
}

impl Expansion for Linear {
    fn name(&self) -> StaticName {
        "Linear".into()
    }

    fn rules<'r, 'p: 'r, 's: 'r>(
        &'s self,
        solver: &mut Solver<'r>,
        inputs: &'p [TensorProxy],
        outputs: &'p [TensorProxy],
    ) -> InferenceResult {
        check_input_arity(inputs, 1)?;
        check_output_arity(outputs, 1)?;
        solver.equals(&inputs[0].datum_type, self.weight.datum_type()?)?;
        solver.equals(&outputs[0].datum_type, self.weight.datum_type()?)?;
        solver.given(&inputs[0].shape, move |solver, mut shape| {
            ensure!(self.fits(&shape), "expected rows of {}, found {shape:?}", self.width);
            shape.pop();
            shape.push(self.columns.to_dim());
            solver.equals(&outputs[0].shape, shape)
        })
    }

    fn wire(&self, prefix: &str, model: &mut TypedModel, inputs: &[OutletId]) -> TractResult<TVec<OutletId>> {
        model.wire_node(prefix, self.clone(), inputs)
    }
}

impl Op for Linear {
    fn name(&self) -> StaticName {
        "Linear".into()
    }

    fn info(&self) -> TractResult<Vec<String>> {
        Ok(vec![format!("{} -> {}", self.width, self.columns)])
    }

    fn validation(&self) -> Validation {
        Validation::Rounding
    }

    op_as_typed_op!();
}

impl TypedOp for Linear {
    fn output_facts(&self, inputs: &[&TypedFact]) -> TractResult<TVec<TypedFact>> {
        let &[x] = inputs else { bail!("Linear: expected 1 input, found {}", inputs.len()) };
        let mut shape: TVec<TDim> = x.shape.dims().into();
        let datum_type = self.weight.datum_type()?;
        ensure!(
            x.datum_type == datum_type && self.fits(&shape),
            "Linear: expected {} elements of type {datum_type:?} in the last axis, found {x:?}",
            self.width
        );
        shape.pop();
        shape.push(self.columns.to_dim());
        Ok(tvec!(x.datum_type.fact(shape)))
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

/// Whether the last axis has, or may have, this length: a symbol's value is known, and checked, in `eval`.
pub(crate) fn is_row<D: DimLike>(shape: &[D], width: usize) -> bool {
    shape.last().is_some_and(|length| length.compatible_with(&width.into()))
}

/// An operator on rows permits every change of the axes before the last one.
pub(crate) fn keeping_last_axis(
    model: &TypedModel,
    node: &TypedNode,
    change: &AxisOp,
) -> TractResult<Option<AxisChangeConsequence>> {
    let last = model.outlet_fact(node.inputs[0])?.rank() - 1;
    let kept = match change {
        AxisOp::Add(axis) => *axis <= last,
        AxisOp::Rm(axis) => *axis < last,
        AxisOp::Move(from, to) => *from < last && *to < last,
        AxisOp::Reshape(at, from, _) => at + from.len() <= last,
    };
    Ok(kept.then(|| AxisChangeConsequence::new(model, node, None, change)))
}

impl EvalOp for Linear {
    op_out_of_plan!();

    fn eval(&self, _: &EvalContext, inputs: TVec<TValue>) -> TractResult<TVec<TValue>> {
        let x = args_1!(inputs);
        let mut shape: TVec<usize> = x.shape().into();
        ensure!(shape.pop() == Some(self.width), "Linear: expected rows of {}, found {:?}", self.width, x.shape());
        let rows: usize = shape.iter().product();
        shape.push(self.columns);
        if rows == 0 {
            return Ok(tvec!(Tensor::zero_dt(x.datum_type(), &shape)?.into_tvalue()));
        }
        let (x_shape, gates_shape) = ([1, rows, self.width], [1, rows, 1]);
        let x = Some(Borrowed { shape: &x_shape, data: constant::borrow(&x)?.data }.into());
        let (weight, bias) = (Some(self.weight.borrow()?), self.bias.as_ref().map(Constant::borrow).transpose()?);
        let output = match self.layout {
            Layout::InOut => kernel::run(&self.attributes, &[x, weight, bias], Some(&shape)),
            Layout::OutIn => {
                let gates = vec![1.0; rows];
                let gates = Some(Borrowed { shape: &gates_shape, data: Data::F32(&gates) }.into());
                kernel::run(&self.attributes, &[x, weight, gates, bias], Some(&shape))
            }
        };
        Ok(tvec!(output?.into_tvalue()))
    }
}
