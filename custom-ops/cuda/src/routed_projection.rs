//! RoutedProjection on CUDA.

use crate::call::{Call, CudaOperator};
use crate::params::LinearParams;
use crate::plan::int;
use crate::product::{Product, projection};
use moh_operators::routed_projection::Inputs;
use moh_operators::{Error, RoutedProjection};

impl CudaOperator for RoutedProjection {
    unsafe fn launch(call: &Call<'_, Self>) -> Result<(), Error> {
        let p = &call.problem;
        let Inputs { x, weight, head_gates, bias } = call.inputs;
        let (depth, columns) = (p.width as i64, p.block as i64);
        int(p.num_heads * p.block)?;
        let params = LinearParams {
            x,
            weight,
            gates: head_gates,
            bias: bias.unwrap_or(0),
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
}
