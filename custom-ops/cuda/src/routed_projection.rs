//! RoutedProjection on CUDA.

use crate::call::{Call, CudaOperator};
use crate::nbits::{Few, Operation};
use crate::params::LinearParams;
use crate::plan::int;
use crate::product::{Linear, Product, projection};
use moh_operators::routed_projection::Inputs;
use moh_operators::{Error, RoutedProjection};

impl CudaOperator for RoutedProjection {
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

/// Launches a projection with a weight of type T.
///
/// # Safety
/// As [`CudaOperator::launch`], with these tensors.
pub(crate) unsafe fn launch(call: &Linear<'_>) -> Result<(), Error> {
    if let Some(few) = Few::plain(Operation::Projection, call) {
        // SAFETY: the call's tensors.
        return unsafe { few.launch(call.stream) };
    }
    let p = &call.problem;
    let (depth, columns) = (p.width as i64, p.block as i64);
    int(p.num_heads * p.block)?;
    let params = LinearParams {
        x: call.x,
        weight: call.weight,
        gates: call.gates,
        bias: call.bias,
        output: call.output,
        x_row: depth,
        weight_row: if p.per_head() { columns } else { depth },
        weight_head: columns * depth,
        output_row: columns * p.num_heads as i64,
        output_head: columns,
        bias_head: columns,
        tokens: int(p.tokens)?,
        heads: int(p.num_heads)?,
        depth: int(p.width)?,
        columns: int(p.block)?,
        write_zeros: 1,
        ..LinearParams::NONE
    };
    // SAFETY: the call's tensors.
    unsafe {
        projection(&Product { params, dtype: call.dtype, per_head: p.per_head() }, call.stream, call.workspace)?;
    }
    Ok(())
}
