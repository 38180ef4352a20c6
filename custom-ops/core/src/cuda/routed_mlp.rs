//! RoutedMLP on CUDA: a projection with an activation, and a combination that multiplies by the gates.

use super::params::LinearParams;
use super::plan::int;
use super::routed_linear::{Product, combination, projection};
use super::{Call, DeviceTensor};
use crate::error::Error;
use crate::shape::routed_mlp::{Activation, Problem};
use crate::tensor::DType;

/// Most bytes of hidden activations at a time. They have room for every expert of every token, as only the GPU knows the gates.
const HIDDEN_BYTES: usize = 256 << 20;
/// Fewer tokens at a time would not fill a tile.
const FEWEST_TOKENS: usize = 256;

/// See [`super::Launch`].
pub(super) unsafe fn launch(call: &Call<'_>) -> Result<(), Error> {
    let shapes: Vec<Option<&[usize]>> = call.inputs.iter().map(|input| input.map(|input| input.shape)).collect();
    let p = Problem::new(call.attributes, &shapes)?;
    let size = if call.dtype == DType::F32 { 4 } else { 2 };
    let row = p.num_experts * p.hidden;
    let fit = HIDDEN_BYTES / (row * size) / FEWEST_TOKENS * FEWEST_TOKENS;
    let chunk = fit.max(FEWEST_TOKENS).min(p.tokens);
    let hidden = call.workspace.allocate(chunk * row * size)?;
    let activation = Activation::ALL.iter().position(|&activation| activation == p.activation).unwrap_or(0);
    let columns = p.hidden * p.activation.columns();
    int(row)?;
    for first in (0..p.tokens).step_by(chunk) {
        let at = |tensor: DeviceTensor<'_>, width: usize, size: usize| tensor.ptr + (first * width * size) as u64;
        let input = |i: usize| call.inputs.get(i).copied().flatten();
        let (Some(x), Some(gates)) = (input(0), input(3)) else { break };
        let common = LinearParams {
            gates: at(gates, p.num_experts, 4),
            tokens: int(chunk.min(p.tokens - first))?,
            heads: int(p.num_experts)?,
            ..LinearParams::NONE
        };
        let first_half = LinearParams {
            x: at(x, p.width, size),
            weight: call.input(1),
            bias: call.input(4),
            output: hidden,
            x_row: p.width as i64,
            weight_row: columns as i64,
            weight_head: (p.width * columns) as i64,
            output_row: row as i64,
            output_head: p.hidden as i64,
            bias_head: columns as i64,
            depth: int(p.width)?,
            columns: int(p.hidden)?,
            activation: activation as i32,
            ..common
        };
        let second_half = LinearParams {
            x: hidden,
            weight: call.input(2),
            bias: call.input(5),
            output: at(call.output, p.out_width, size),
            x_row: row as i64,
            x_head: p.hidden as i64,
            weight_row: p.out_width as i64,
            weight_head: (p.hidden * p.out_width) as i64,
            output_row: p.out_width as i64,
            bias_head: p.out_width as i64,
            depth: int(p.hidden)?,
            columns: int(p.out_width)?,
            only: 1,
            scale_by_gates: 1,
            ..common
        };
        let product = |params| Product { params, dtype: call.dtype, per_head: true };
        // SAFETY: the validated tensors of the call, from token `first` on; the hidden activations are the workspace's, and
        // free for the next tokens once the second half has run.
        unsafe {
            projection(&product(first_half), call.stream, call.workspace)?;
            combination(&product(second_half), call.stream, call.workspace)?;
        }
    }
    Ok(())
}
