//! LinearNBits on CUDA: a projection with one head, which every token uses.

use crate::call::{Call, CudaOperator};
use crate::nbits::{Few, Operation, Weight};
use crate::params::LinearParams;
use crate::plan::int;
use crate::product::{Product, dense};
use crate::workspace::Reused;
use moh_operators::linear_nbits::Inputs;
use moh_operators::{DType, Error, LinearNBits};

/// Maximum bytes of dequantised weights, of which an output head has many.
const WEIGHT_BYTES: usize = 256 << 20;

impl CudaOperator for LinearNBits {
    unsafe fn launch(call: &Call<'_, Self>) -> Result<(), Error> {
        let p = &call.problem;
        let Inputs { x, weight, scales, bias, zero_points } = call.inputs;
        let (rows, depth, format) = (p.out_width, p.width, Some(p.format));
        let quantised = Weight { weight, scales, zero_points, matrices: 1, rows, depth, format };
        let few = Few {
            operation: Operation::Projection,
            weight: quantised,
            x,
            gates: 0,
            bias: bias.unwrap_or(0),
            output: call.output,
            tokens: p.rows,
            heads: 1,
            head_width: rows,
            activation: None,
            dtype: call.dtype,
        };
        if few.fits() {
            // SAFETY: the call's tensors.
            return unsafe { few.launch(call.stream) };
        }
        int(rows)?;
        let size = if call.dtype == DType::F32 { 4 } else { 2 };
        let workspace = Reused::new(call.workspace);
        for (first, part) in quantised.parts(size, WEIGHT_BYTES) {
            workspace.start_round();
            let at = |tensor: u64| tensor + (first * size) as u64;
            // SAFETY: the call's tensors, of the weight the rows of this part; its values are in the workspace until the next
            // part's are.
            unsafe {
                let params = LinearParams {
                    x,
                    weight: part.dequantize(None, false, call.dtype, call.stream, &workspace)?,
                    bias: bias.map_or(0, at),
                    output: at(call.output),
                    x_row: depth as i64,
                    weight_row: depth as i64,
                    weight_head: (part.rows * depth) as i64,
                    output_row: rows as i64,
                    tokens: int(p.rows)?,
                    heads: 1,
                    depth: int(depth)?,
                    columns: int(part.rows)?,
                    ..LinearParams::NONE
                };
                dense(&Product { params, dtype: call.dtype, per_head: false }, call.stream)?;
            }
        }
        Ok(())
    }
}
