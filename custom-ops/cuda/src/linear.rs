//! Linear on CUDA: a projection with one head, which every token uses.
//!
//! A session on a GPU would otherwise run it on the CPU wherever the library has a kernel for that processor.

use crate::call::{Call, CudaOperator};
use crate::params::LinearParams;
use crate::plan::int;
use crate::product::{Product, dense};
use moh_operators::linear::Inputs;
use moh_operators::{Error, Linear};

impl CudaOperator for Linear {
    unsafe fn launch(call: &Call<'_, Self>) -> Result<(), Error> {
        let p = &call.problem;
        let Inputs { x, weight, bias } = call.inputs;
        let (depth, columns) = (p.width as i64, p.out_width as i64);
        let params = LinearParams {
            x,
            weight,
            bias: bias.unwrap_or(0),
            output: call.output,
            x_row: depth,
            weight_row: columns,
            weight_head: columns * depth,
            output_row: columns,
            tokens: int(p.rows)?,
            heads: 1,
            depth: int(p.width)?,
            columns: int(p.out_width)?,
            ..LinearParams::NONE
        };
        // SAFETY: the call's tensors. A weight of (width, out_width) is layout 1 of one head.
        unsafe { dense(&Product { params, dtype: call.dtype, per_head: true }, call.stream) }
    }
}
