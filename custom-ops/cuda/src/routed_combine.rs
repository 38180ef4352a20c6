//! RoutedCombine on CUDA.

use crate::call::{Call, CudaOperator};
use crate::nbits::{Few, Operation};
use crate::params::LinearParams;
use crate::plan::int;
use crate::product::{Linear, Product, combination};
use moh_operators::routed_combine::Inputs;
use moh_operators::{Error, RoutedCombine};

impl CudaOperator for RoutedCombine {
    unsafe fn launch(call: &Call<'_, Self>) -> Result<(), Error> {
        let Inputs { x, weight, head_gates, bias } = call.inputs;
        // SAFETY: the call's tensors.
        unsafe {
            launch(&Linear {
                problem: call.problem,
                x,
                weight,
                gates: head_gates,
                bias: bias.unwrap_or(0),
                output: call.output,
                dtype: call.dtype,
                stream: call.stream,
                workspace: call.workspace,
            })
        }
    }
}

/// Launches a combination with a weight of type T.
///
/// # Safety
/// As [`CudaOperator::launch`], with these tensors.
pub(crate) unsafe fn launch(call: &Linear<'_>) -> Result<(), Error> {
    if let Some(few) = Few::plain(Operation::Combination, call) {
        // SAFETY: the call's tensors.
        return unsafe { few.launch(call.stream) };
    }
    let p = &call.problem;
    let (depth, columns) = (p.block as i64, p.width as i64);
    let inner = depth * p.num_heads as i64;
    int(p.num_heads * p.block)?;
    let params = LinearParams {
        x: call.x,
        weight: call.weight,
        gates: call.gates,
        bias: call.bias,
        output: call.output,
        x_row: inner,
        x_head: depth,
        weight_row: if p.per_head() { columns } else { inner },
        weight_head: if p.per_head() { depth * columns } else { depth },
        output_row: columns,
        tokens: int(p.tokens)?,
        heads: int(p.num_heads)?,
        depth: int(p.block)?,
        columns: int(p.width)?,
        ..LinearParams::NONE
    };
    // SAFETY: the call's tensors.
    unsafe { combination(&Product { params, dtype: call.dtype, per_head: p.per_head() }, call.stream, call.workspace) }
}
