//! RoutedMLP on CUDA: a projection with an activation, then a combination that multiplies by the gates.

use crate::call::{Call, CudaOperator};
use crate::driver::RawPtr;
use crate::params::LinearParams;
use crate::plan::int;
use crate::product::{Product, combination, projection};
use crate::stream::Stream;
use crate::workspace::{Reused, Workspace};
use moh_operators::routed_mlp::{Inputs, Problem};
use moh_operators::{DType, Error, List, RoutedMlp};

/// Maximum bytes of hidden activations. There is room for every expert of every token, since only the GPU knows the
/// gates.
const HIDDEN_BYTES: usize = 256 << 20;
/// Minimum tokens at a time; fewer would not fill a tile.
const FEWEST_TOKENS: usize = 256;

/// A call of RoutedMLP, or of one whose matrices have been dequantised.
pub(crate) struct Mlp<'c> {
    pub(crate) problem: Problem,
    pub(crate) inputs: Inputs<List<'c, RawPtr>>,
    pub(crate) output: RawPtr,
    pub(crate) dtype: DType,
    pub(crate) stream: &'c Stream<'c>,
    pub(crate) workspace: &'c dyn Workspace,
}

impl CudaOperator for RoutedMlp {
    unsafe fn launch(call: &Call<'_, Self>) -> Result<(), Error> {
        let &Call { problem, inputs, output, dtype, stream, workspace } = call;
        // SAFETY: the call's tensors.
        unsafe { Mlp { problem, inputs, output, dtype, stream, workspace }.launch() }
    }
}

impl Mlp<'_> {
    /// Launches the kernels on the stream.
    ///
    /// # Safety
    /// As [`CudaOperator::launch`], with these tensors.
    pub(crate) unsafe fn launch(&self) -> Result<(), Error> {
        let (call, p) = (self, &self.problem);
        let Inputs { x, fc1_weight, fc2_weight, expert_gates, fc1_bias, fc2_bias } = call.inputs;
        let size = if call.dtype == DType::F32 { 4 } else { 2 };
        let row = p.num_experts * p.hidden;
        let fit = HIDDEN_BYTES / (row * size) / FEWEST_TOKENS * FEWEST_TOKENS;
        let chunk = fit.max(FEWEST_TOKENS).min(p.tokens);
        let hidden = call.workspace.allocate(chunk * row * size)?;
        let columns = p.hidden * p.activation.columns();
        int(row)?;
        let workspace = Reused::new(call.workspace);
        for first in (0..p.tokens).step_by(chunk) {
            workspace.start_round();
            let at = |tensor: RawPtr, width: usize, size: usize| tensor + (first * width * size) as u64;
            let common = LinearParams {
                gates: at(expert_gates, p.num_experts, 4),
                tokens: int(chunk.min(p.tokens - first))?,
                heads: int(p.num_experts)?,
                ..LinearParams::NONE
            };
            let first_half = LinearParams {
                x: at(x, p.width, size),
                weight: fc1_weight,
                bias: fc1_bias.unwrap_or(0),
                output: hidden,
                x_row: p.width as i64,
                weight_row: columns as i64,
                weight_head: (p.width * columns) as i64,
                output_row: row as i64,
                output_head: p.hidden as i64,
                bias_head: columns as i64,
                depth: int(p.width)?,
                columns: int(p.hidden)?,
                activation: p.activation as i32,
                ..common
            };
            let second_half = LinearParams {
                x: hidden,
                weight: fc2_weight,
                bias: fc2_bias.unwrap_or(0),
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
            // SAFETY: the validated tensors of the call, from token `first` on. The hidden activations are in the
            // workspace; they, the lists and the products can be reused once the second half has run.
            unsafe {
                let lists = projection(&product(first_half), call.stream, &workspace)?;
                let second_half = LinearParams { counts: lists.counts, entries: lists.entries, ..second_half };
                combination(&product(second_half), call.stream, &workspace)?;
            }
        }
        Ok(())
    }
}
