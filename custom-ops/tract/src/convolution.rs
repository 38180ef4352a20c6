//! Depthwise convolution of images.

use crate::host::TractHost;
use moh_cpu::layers::Depthwise;
use tract_onnx::tract_core::ops::cnn::{Conv, KernelFormat, PaddingSpec};
use tract_onnx::tract_core::ops::nn::DataFormat;
use tract_onnx::tract_hir::internal::*;

/// A depthwise convolution, channels last, of (batch, height, width, channels); the batch size may be symbolic.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DepthwiseLayer {
    layer: Depthwise,
    /// Zero-padding below and right of the image.
    after: [usize; 2],
}

// Not reflexive if a weight is NaN; tract then treats equal convolutions as different.
impl Eq for DepthwiseLayer {}

/// Replaces tract's depthwise convolutions, whose fast kernel requires fully known shapes.
pub(crate) fn convolution(
    _: &(),
    model: &TypedModel,
    node: &TypedNode,
    _: &str,
    op: &Conv,
) -> TractResult<Option<TypedModelPatch>> {
    let spec = &op.pool_spec;
    let depthwise = op.group == spec.input_channels && op.group == spec.output_channels && op.group > 1;
    rule_if!(depthwise && op.q_params.is_none() && op.kernel_fmt == KernelFormat::OIHW && spec.rank() == 2);
    rule_if!(spec.data_format == DataFormat::NHWC && node.inputs.len() == 3);
    let x = model.outlet_fact(node.inputs[0])?;
    rule_if!(crate::facts::is_float(x.datum_type));
    let [before, after] = match &spec.padding {
        PaddingSpec::Valid => [[0; 2]; 2],
        PaddingSpec::Explicit(before, after) => [[before[0], before[1]], [after[0], after[1]]],
        _ => return Ok(None),
    };
    rule_if_some!(weight = &model.outlet_fact(node.inputs[1])?.konst);
    rule_if_some!(bias = &model.outlet_fact(node.inputs[2])?.konst);
    let channels = op.group;
    let kernel = [spec.kernel_shape[0], spec.kernel_shape[1]];
    let taps = kernel[0] * kernel[1];
    rule_if!(weight.len() == channels * taps && (bias.len() == 1 || bias.len() == channels));
    let (weight, bias) = (weight.cast_to::<f32>()?, bias.cast_to::<f32>()?);
    let (weight, bias) = (weight.try_as_plain_ram()?, bias.try_as_plain_ram()?);
    let (weight, bias) = (weight.as_slice::<f32>()?, bias.as_slice::<f32>()?);
    let layer = Depthwise {
        kernel,
        strides: [spec.stride(0), spec.stride(1)],
        dilations: [spec.dilation(0), spec.dilation(1)],
        pads: before,
        weight: (0..taps * channels).map(|i| weight[i % channels * taps + i / channels]).collect(),
        bias: (0..channels).map(|channel| bias[channel % bias.len()]).collect(),
        activation: None,
    };
    TypedModelPatch::replace_single_op(model, node, &node.inputs[..1], DepthwiseLayer { layer, after }).map(Some)
}

impl DepthwiseLayer {
    /// Output length along `axis` (height or width) for an input of length `input`. A symbol's value is checked in `eval`.
    fn length<D: DimLike>(&self, axis: usize, input: &D) -> TractResult<D> {
        let reach = (self.layer.kernel[axis] - 1) * self.layer.dilations[axis] + 1;
        let padded = input.clone() + self.layer.pads[axis] + self.after[axis];
        ensure!(
            padded.as_usize().is_none_or(|padded| padded >= reach),
            "Depthwise: expected a zero-padded {} of at least {reach}, found {padded}",
            ["height", "width"][axis]
        );
        Ok((padded - reach) / self.layer.strides[axis] + 1)
    }
}

impl Op for DepthwiseLayer {
    fn name(&self) -> StaticName {
        "Depthwise".into()
    }

    fn info(&self) -> TractResult<Vec<String>> {
        let Depthwise { kernel, strides, dilations, pads, .. } = &self.layer;
        Ok(vec![format!(
            "kernel {kernel:?}, strides {strides:?}, dilations {dilations:?}, pads {pads:?} {:?}",
            self.after
        )])
    }

    fn validation(&self) -> Validation {
        Validation::Rounding
    }

    op_as_typed_op!();
}

impl TypedOp for DepthwiseLayer {
    fn output_facts(&self, inputs: &[&TypedFact]) -> TractResult<TVec<TypedFact>> {
        let &[x] = inputs else { bail!("Depthwise: expected 1 input, found {}", inputs.len()) };
        let [batch, height, width, channels] = x.shape.dims() else {
            bail!("Depthwise: expected (batch, height, width, channels), found {x:?}")
        };
        let shape = [batch.clone(), self.length(0, height)?, self.length(1, width)?, channels.clone()];
        Ok(tvec!(x.datum_type.fact(shape)))
    }

    as_op!();
}

impl EvalOp for DepthwiseLayer {
    op_out_of_plan!();

    fn eval(&self, _: &EvalContext, inputs: TVec<TValue>) -> TractResult<TVec<TValue>> {
        let x = args_1!(inputs);
        let &[batch, height, width, channels] = x.shape() else {
            bail!("Depthwise: expected (batch, height, width, channels), found {x:?}")
        };
        let size = [self.length(0, &height)?, self.length(1, &width)?];
        let (image, shape) = ([batch, height, width], [batch, size[0], size[1], channels]);
        // SAFETY: every bit pattern is a float. The layer writes every element, or fails, and then the tensor is
        // dropped.
        let mut output = unsafe { Tensor::uninitialized_dt(x.datum_type(), &shape)? };
        let (from, mut to) = (x.try_as_plain_ram()?, output.try_as_plain_ram_mut()?);
        let host = TractHost::current();
        match x.datum_type() {
            DatumType::F16 => self.layer.run::<f16>(from.as_slice()?, image, to.as_slice_mut()?, size, &host)?,
            _ => self.layer.run::<f32>(from.as_slice()?, image, to.as_slice_mut()?, size, &host)?,
        }
        Ok(tvec!(output.into_tvalue()))
    }
}
