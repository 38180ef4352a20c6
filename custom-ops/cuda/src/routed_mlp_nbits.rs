//! RoutedMLPNBits on CUDA: two products of few tokens; for more, RoutedMLP, after its matrices have been dequantised.

use crate::call::{Call, CudaOperator};
use crate::nbits::{Few, Heads, Operation, Weight};
use crate::routed_mlp::Mlp;
use moh_operators::routed_mlp;
use moh_operators::{Error, RoutedMlpNBits};

impl CudaOperator for RoutedMlpNBits {
    unsafe fn launch(call: &Call<'_, Self>) -> Result<(), Error> {
        let (p, inputs) = (call.problem.mlp, &call.inputs);
        let (matrices, format) = (p.num_experts, Some(call.problem.format));
        let first = Weight {
            weight: inputs.fc1_weight,
            scales: inputs.fc1_scales,
            zero_points: inputs.fc1_zero_points,
            matrices,
            rows: p.hidden * p.activation.columns(),
            depth: p.width,
            format,
        };
        let second = Weight {
            weight: inputs.fc2_weight,
            scales: inputs.fc2_scales,
            zero_points: inputs.fc2_zero_points,
            matrices,
            rows: p.out_width,
            depth: p.hidden,
            format,
        };
        // SAFETY: the call's tensors.
        unsafe {
            if let Some([first, second]) = few(call, first, second)? {
                first.launch(call.stream)?;
                return second.launch(call.stream);
            }
            let heads = |rows| Heads { gates: inputs.expert_gates, tokens: p.tokens, heads: matrices, rows };
            // RoutedMLP's matrices are (in, out).
            let dense = |weight: Weight| {
                weight.dequantize(Some(heads(weight.rows)), true, call.dtype, call.stream, call.workspace)
            };
            let inputs = routed_mlp::Inputs {
                x: inputs.x,
                fc1_weight: dense(first)?,
                fc2_weight: dense(second)?,
                expert_gates: inputs.expert_gates,
                fc1_bias: inputs.fc1_bias,
                fc2_bias: inputs.fc2_bias,
            };
            let &Call { output, dtype, stream, workspace, .. } = call;
            Mlp { problem: p, inputs, output, dtype, stream, workspace }.launch()
        }
    }
}

/// The two products, if the kernels for few tokens take both; the hidden activations are in the workspace.
fn few(call: &Call<'_, RoutedMlpNBits>, first: Weight, second: Weight) -> Result<Option<[Few; 2]>, Error> {
    let (p, inputs) = (call.problem.mlp, &call.inputs);
    let common = Few {
        operation: Operation::Projection,
        weight: first,
        x: inputs.x,
        gates: inputs.expert_gates,
        bias: inputs.fc1_bias.unwrap_or(0),
        output: 0,
        tokens: p.tokens,
        heads: p.num_experts,
        head_width: p.hidden,
        activation: Some(p.activation),
        dtype: call.dtype,
    };
    let bias = inputs.fc2_bias.unwrap_or(0);
    let combination =
        Few { operation: Operation::Experts, weight: second, bias, output: call.output, activation: None, ..common };
    if !common.fits() || !combination.fits() {
        return Ok(None);
    }
    let hidden = call.workspace.allocate(p.tokens * p.num_experts * p.hidden * 2)?;
    Ok(Some([Few { output: hidden, ..common }, Few { x: hidden, ..combination }]))
}
