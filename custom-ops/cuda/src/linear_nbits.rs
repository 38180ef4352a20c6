//! LinearNBits on CUDA: a projection with one head, which every token uses; and `kernels/linear_epilogue.cu` for what follows the sums.

use crate::call::{Call, CudaOperator};
use crate::driver::RawPtr;
use crate::linear::Then;
use crate::nbits::{Few, Operation, Weight};
use crate::params::LinearParams;
use crate::plan::int;
use crate::product::{Product, dense};
use crate::stream::Stream;
use crate::workspace::{Reused, Workspace};
use moh_operators::linear_nbits::{Inputs, Problem};
use moh_operators::routed_mlp::Activation;
use moh_operators::{DType, Error, LinearNBits, linear};

/// Maximum bytes of dequantised weights, of which an output head has many.
const WEIGHT_BYTES: usize = 256 << 20;

/// A product of rows with a quantised matrix.
pub(crate) struct Layer<'p, 'c> {
    pub(crate) problem: &'p Problem,
    pub(crate) x: RawPtr,
    pub(crate) weight: RawPtr,
    pub(crate) scales: RawPtr,
    pub(crate) zero_points: Option<RawPtr>,
    pub(crate) bias: Option<RawPtr>,
    pub(crate) activation: Option<Activation>,
    pub(crate) output: RawPtr,
    pub(crate) dtype: DType,
    pub(crate) stream: &'c Stream<'c>,
    pub(crate) workspace: &'c dyn Workspace,
}

impl CudaOperator for LinearNBits {
    unsafe fn launch(call: &Call<'_, Self>) -> Result<(), Error> {
        let &Call { ref problem, inputs, output, dtype, stream, workspace } = call;
        let Inputs { x, weight, scales, bias, gate, residual, zero_points } = inputs;
        // SAFETY: the call's tensors, of the sizes of its problem.
        unsafe {
            let activation = None;
            Layer { problem, x, weight, scales, zero_points, bias, activation, output, dtype, stream, workspace }
                .launch()?;
            after(&problem.linear, gate, residual, output, dtype, stream)
        }
    }
}

/// Multiplies sums by the gate and adds the residual, in the output.
///
/// # Safety
/// As [`CudaOperator::launch`], with these tensors.
pub(crate) unsafe fn after(
    problem: &linear::Problem,
    gate: Option<RawPtr>,
    residual: Option<RawPtr>,
    output: RawPtr,
    dtype: DType,
    stream: &Stream<'_>,
) -> Result<(), Error> {
    let (gate, residual) = (gate.unwrap_or(0), residual.unwrap_or(0));
    if [gate, residual] == [0; 2] {
        return Ok(());
    }
    // SAFETY: the caller's contract.
    unsafe { Then { problem, bias: 0, gate, residual, activation: None, output, dtype }.launch(stream) }
}

impl Layer<'_, '_> {
    /// Launches the kernels on the stream.
    ///
    /// # Safety
    /// As [`CudaOperator::launch`], with these tensors.
    pub(crate) unsafe fn launch(&self) -> Result<(), Error> {
        let &Layer { problem, x, weight, scales, zero_points, bias, activation, output, dtype, stream, workspace } =
            self;
        let (p, format) = (&problem.linear, Some(problem.format));
        let (rows, depth) = (p.out_width, p.width);
        let quantised = Weight { weight, scales, zero_points, matrices: 1, rows, depth, format };
        let few = Few {
            operation: Operation::Projection,
            weight: quantised,
            x,
            gates: 0,
            bias: bias.unwrap_or(0),
            output,
            tokens: p.rows,
            heads: 1,
            head_width: rows,
            activation,
            dtype,
        };
        if few.fits() {
            // SAFETY: the call's tensors.
            return unsafe { few.launch(stream) };
        }
        int(rows)?;
        let size = if dtype == DType::F32 { 4 } else { 2 };
        let reused = Reused::new(workspace);
        for (first, part) in quantised.parts(size, WEIGHT_BYTES) {
            reused.start_round();
            let at = |tensor: u64| tensor + (first * size) as u64;
            // SAFETY: the call's tensors, of the weight the rows of this part; its values are in the workspace until the next
            // part's are.
            unsafe {
                let params = LinearParams {
                    x,
                    weight: part.dequantize(None, false, dtype, stream, &reused)?,
                    bias: bias.map_or(0, at),
                    output: at(output),
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
                dense(&Product { params, dtype, per_head: false }, stream)?;
            }
        }
        if activation.is_none() {
            return Ok(());
        }
        // SAFETY: the call's tensors.
        unsafe { Then { problem: p, bias: 0, gate: 0, residual: 0, activation, output, dtype }.launch(stream) }
    }
}
