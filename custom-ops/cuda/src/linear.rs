//! Linear on CUDA: a product by cuBLASLt where the process has it, else a projection with one head, which every token uses; and
//! `kernels/linear_epilogue.cu` for what neither does with the sums.
//!
//! A session on a GPU would otherwise run it on the CPU wherever the library has a kernel for that processor.

use crate::call::{Call, CudaOperator};
use crate::cublaslt::{self, Epilogue};
use crate::driver::RawPtr;
use crate::kernel::Kernel;
use crate::modules;
use crate::params::{LinearEpilogueParams, LinearParams};
use crate::plan::int;
use crate::product::{Product, dense};
use crate::stream::Stream;
use crate::workspace::Workspace;
use moh_operators::linear::{Inputs, Problem};
use moh_operators::routed_mlp::Activation;
use moh_operators::{DType, Error, Linear, List};

const THREADS: usize = 256;

/// What a product leaves to do with its sums: an activation function, and a residual to add.
type Left = (Option<Activation>, Option<RawPtr>);

/// A dense layer.
pub(crate) struct Layer<'p, 'c> {
    pub(crate) problem: &'p Problem,
    pub(crate) inputs: Inputs<List<'c, RawPtr>>,
    pub(crate) activation: Option<Activation>,
    pub(crate) output: RawPtr,
    pub(crate) dtype: DType,
    pub(crate) stream: &'c Stream<'c>,
    pub(crate) workspace: &'c dyn Workspace,
}

/// What is done with sums in the output's place: `kernels/linear_epilogue.cu`. Tensors may be null.
pub(crate) struct Then<'p> {
    pub(crate) problem: &'p Problem,
    /// One number.
    pub(crate) bias: RawPtr,
    pub(crate) gate: RawPtr,
    pub(crate) residual: RawPtr,
    pub(crate) activation: Option<Activation>,
    pub(crate) output: RawPtr,
    pub(crate) dtype: DType,
}

impl Then<'_> {
    /// Launches the kernel on the stream.
    ///
    /// # Safety
    /// As [`CudaOperator::launch`], with these tensors.
    pub(crate) unsafe fn launch(&self, stream: &Stream<'_>) -> Result<(), Error> {
        let &Then { problem: p, bias, gate, residual, activation, output, dtype } = self;
        let params = LinearEpilogueParams {
            bias,
            gate,
            residual,
            output,
            rows: int(p.rows)?,
            columns: int(p.out_width)?,
            rows_per_gate: int(p.rows_per_gate)?,
            activation: activation.map_or(-1, |activation| activation as i32),
            gate_is_number: p.gate_is_number.into(),
            residual_is_number: p.residual_is_number.into(),
        };
        let (wide, narrow, width) = match dtype {
            DType::F16 => (c"moh_linear_epilogue_f16_8", c"moh_linear_epilogue_f16_1", 8),
            DType::BF16 => (c"moh_linear_epilogue_bf16_8", c"moh_linear_epilogue_bf16_1", 8),
            _ => (c"moh_linear_epilogue_float_4", c"moh_linear_epilogue_float_1", 4),
        };
        let rows = [p.gate_is_number, p.residual_is_number].into_iter().zip([gate, residual]);
        let aligned =
            rows.filter(|(is_number, _)| !is_number).chain([(false, output)]).all(|(_, at)| at.is_multiple_of(16));
        let (name, width) = if aligned && p.out_width.is_multiple_of(width) { (wide, width) } else { (narrow, 1) };
        let kernel = Kernel { module: modules::LINEAR_EPILOGUE, name };
        let blocks = int((p.rows * p.out_width).div_ceil(THREADS * width))?.unsigned_abs();
        // SAFETY: the caller's contract.
        unsafe { stream.launch(kernel, [blocks, 1, 1], THREADS as u32, 0, &params) }
    }
}

impl CudaOperator for Linear {
    unsafe fn launch(call: &Call<'_, Self>) -> Result<(), Error> {
        let &Call { ref problem, inputs, output, dtype, stream, workspace } = call;
        // SAFETY: the call's tensors.
        unsafe { Layer { problem, inputs, activation: None, output, dtype, stream, workspace }.launch() }
    }
}

impl Layer<'_, '_> {
    /// Launches the kernels on the stream.
    ///
    /// # Safety
    /// As [`CudaOperator::launch`], with these tensors.
    pub(crate) unsafe fn launch(&self) -> Result<(), Error> {
        let &Layer { problem: p, inputs, activation, output, dtype, stream, .. } = self;
        let Inputs { bias, gate, residual, .. } = inputs;
        let number = bias.filter(|_| p.bias_is_number).unwrap_or(0);
        // SAFETY: the caller's contract.
        let (activation, residual) = match unsafe { self.by_cublaslt()? } {
            Some(left) => left,
            None => {
                // SAFETY: as above.
                unsafe { self.by_our_kernels()? };
                (activation, residual)
            }
        };
        let (bias, gate, residual) = (number, gate.unwrap_or(0), residual.unwrap_or(0));
        if activation.is_none() && [bias, gate, residual] == [0; 3] {
            return Ok(());
        }
        // SAFETY: the call's tensors, of the sizes of its problem.
        unsafe { Then { problem: p, bias, gate, residual, activation, output, dtype }.launch(stream) }
    }

    /// The product with the bias, by our own kernels.
    ///
    /// # Safety
    /// As [`Layer::launch`].
    unsafe fn by_our_kernels(&self) -> Result<(), Error> {
        let &Layer { problem: p, inputs: Inputs { x, weight, bias, .. }, output, dtype, stream, .. } = self;
        let (depth, columns) = (p.width as i64, p.out_width as i64);
        let params = LinearParams {
            x,
            weight,
            bias: bias.filter(|_| !p.bias_is_number).unwrap_or(0),
            output,
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
        unsafe { dense(&Product { params, dtype, per_head: true }, stream) }
    }

    /// The product with what cuBLASLt does with its sums; the activation function and the residual that are left. `None` where it cannot
    /// multiply.
    ///
    /// # Safety
    /// As [`Layer::launch`].
    unsafe fn by_cublaslt(&self) -> Result<Option<Left>, Error> {
        let &Layer { problem: p, inputs, activation, output, dtype, stream, workspace } = self;
        let Inputs { x, weight, bias, gate, residual } = inputs;
        let epilogue = match activation {
            Some(Activation::Relu) if !p.bias_is_number => Epilogue::Relu,
            Some(Activation::GeluTanh) if !p.bias_is_number => Epilogue::Gelu,
            _ => Epilogue::Nothing,
        };
        let added = residual.filter(|_| gate.is_none() && !p.residual_is_number);
        let product = cublaslt::Product {
            x,
            weight,
            bias: bias.filter(|_| !p.bias_is_number).unwrap_or(0),
            residual: added.unwrap_or(0),
            output,
            rows: p.rows,
            depth: p.width,
            columns: p.out_width,
            dtype,
            epilogue,
        };
        // SAFETY: the call's tensors, of the sizes of its problem.
        let multiplied = unsafe { cublaslt::multiply(&product, stream, workspace)? };
        let left = (activation.filter(|_| epilogue == Epilogue::Nothing), residual.filter(|_| added.is_none()));
        Ok(multiplied.then_some(left))
    }
}
