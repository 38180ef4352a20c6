//! Quantised weights, and for few tokens weights of T: `kernels/nbits.cu` multiplies few tokens with them as they are; for more, `kernels/dequantize.cu` converts
//! them to T, in the workspace, for the kernels of the operators without quantisation.

use crate::driver::RawPtr;
use crate::kernel::Kernel;
use crate::modules;
use crate::params::{DequantizeParams, NbitsParams, QuantizedParams};
use crate::plan::int;
use crate::product::Linear;
use crate::stream::Stream;
use crate::workspace::Workspace;
use moh_operators::nbits::Format;
use moh_operators::routed_mlp::Activation;
use moh_operators::{DType, Error};
use std::ffi::CString;

/// Tokens that `nbits.cu` takes. With so few, reading the weights dominates.
const FEW: [usize; 3] = [8, 16, 32];
/// Rows of a tile, warps and threads of a block.
const TILE_ROWS: usize = 16;
const WARPS: usize = 8;
const THREADS: u32 = 256;
/// Shared memory that kernels have without asking.
const SHARED_BYTES: usize = 48 << 10;
/// Up to this many tokens, dequantising leaves out the matrices that no token uses: of more, some token uses each.
const FEWEST_TOKENS: usize = 64;
/// Rows of a part of a weight are a multiple of it: no tile of the kernels has more columns.
const PART_ROWS: usize = 128;
/// Rows and columns of a tile that is transposed.
const TILE: usize = 64;

/// A quantised weight in device memory, or one of T: matrices (rows, depth), one after the other.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Weight {
    pub(crate) weight: RawPtr,
    pub(crate) scales: RawPtr,
    pub(crate) zero_points: Option<RawPtr>,
    pub(crate) matrices: usize,
    pub(crate) rows: usize,
    pub(crate) depth: usize,
    /// `None` for values of T, which have no scales.
    pub(crate) format: Option<Format>,
}

/// The heads that rows of a weight belong to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    /// float32 (tokens, heads); 0 = off.
    pub(crate) gates: RawPtr,
    pub(crate) tokens: usize,
    pub(crate) heads: usize,
    /// Consecutive rows of a head.
    pub(crate) rows: usize,
}

impl Weight {
    /// Bits of a value.
    fn bits(&self) -> usize {
        self.format.map_or(16, |format| format.bits)
    }

    fn params(&self) -> Result<QuantizedParams, Error> {
        Ok(QuantizedParams {
            weight: self.weight,
            scales: self.scales,
            zero_points: self.zero_points.unwrap_or(0),
            matrices: int(self.matrices)?,
            rows: int(self.rows)?,
            depth: int(self.depth)?,
            block_log2: self.format.map_or(Ok(0), |format| int(format.block.ilog2() as usize))?,
            bits: int(self.bits())?,
        })
    }

    /// The weight of a dense layer in parts of rows, each of which has up to `bytes` bytes as values of `size` bytes; with the
    /// first row of each part.
    pub(crate) fn parts(self, size: usize, bytes: usize) -> impl Iterator<Item = (usize, Weight)> {
        let fit = bytes / (self.depth * size) / PART_ROWS * PART_ROWS;
        let (row_scales, row_points) = self.format.map_or((0, 0), |format| {
            let blocks = self.depth / format.block;
            (blocks * size, format.zero_point_bytes(blocks))
        });
        let part = move |first: usize| {
            let at = |tensor: RawPtr, row_bytes: usize| tensor + (first * row_bytes) as u64;
            let part = Weight {
                weight: at(self.weight, self.depth * self.bits() / 8),
                scales: at(self.scales, row_scales),
                zero_points: self.zero_points.map(|tensor| at(tensor, row_points)),
                rows: fit.max(PART_ROWS).min(self.rows - first),
                ..self
            };
            (first, part)
        };
        (0..self.rows).step_by(fit.max(PART_ROWS)).map(part)
    }

    /// Dequantises the weight into the workspace; transposed, to (matrices, depth, rows). Rows of heads that no token uses may
    /// be left out.
    ///
    /// # Safety
    /// The tensors have these sizes until the kernel has run. Transposed, the rows of a matrix are one head.
    pub(crate) unsafe fn dequantize(
        &self,
        heads: Option<Heads>,
        transposed: bool,
        dtype: DType,
        stream: &Stream<'_>,
        workspace: &dyn Workspace,
    ) -> Result<RawPtr, Error> {
        let size = if dtype == DType::F32 { 4 } else { 2 };
        let output = workspace.allocate((self.matrices * self.rows * self.depth).max(1) * size)?;
        let heads = heads.filter(|heads| heads.tokens <= FEWEST_TOKENS);
        let params = DequantizeParams {
            weight: self.params()?,
            output,
            gates: heads.map_or(0, |heads| heads.gates),
            tokens: int(heads.map_or(0, |heads| heads.tokens))?,
            heads: int(heads.map_or(0, |heads| heads.heads))?,
            head_rows: int(heads.map_or(1, |heads| heads.rows))?,
        };
        let (grid, shared) = match transposed {
            true => ([self.rows.div_ceil(TILE), self.depth.div_ceil(TILE), self.matrices], TILE * (TILE + 1) * size),
            false => ([(self.matrices * self.rows).div_ceil(WARPS), 1, 1], 0),
        };
        let grid = [int(grid[0])?.unsigned_abs(), int(grid[1])?.unsigned_abs(), int(grid[2])?.unsigned_abs()];
        let name = format!("moh_dequantize_{}{}", if transposed { "transposed_" } else { "" }, type_name(dtype));
        let name = CString::new(name).unwrap_or_default();
        let kernel = Kernel { module: modules::DEQUANTIZE, name: &name };
        // SAFETY: the caller's contract; the workspace block has room for all values.
        unsafe { stream.launch(kernel, grid, THREADS, shared as u32, &params)? };
        Ok(output)
    }
}

fn type_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        _ => "bf16",
    }
}

/// What `nbits.cu` computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Rows of heads, which are those of all matrices.
    Projection,
    /// The sum over the heads, to which columns of the matrix belong.
    Combination,
    /// The sum over the experts, each with a matrix, times their gates.
    Experts,
}

/// A product of few tokens with a weight as it is in memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Few {
    pub(crate) operation: Operation,
    pub(crate) weight: Weight,
    pub(crate) x: RawPtr,
    /// float32 (tokens, heads); null in a projection whose heads are all on.
    pub(crate) gates: RawPtr,
    /// Null if there is none.
    pub(crate) bias: RawPtr,
    pub(crate) output: RawPtr,
    pub(crate) tokens: usize,
    pub(crate) heads: usize,
    /// Outputs of a head in a projection, its part of x in a combination.
    pub(crate) head_width: usize,
    /// Of a projection; with SwiGLU a matrix has two rows for each output.
    pub(crate) activation: Option<Activation>,
    pub(crate) dtype: DType,
}

impl Few {
    /// The product of a linear operator.
    pub(crate) fn linear(operation: Operation, weight: Weight, call: &Linear<'_>) -> Few {
        let &Linear { x, gates, bias, output, dtype, .. } = call;
        let (tokens, heads, head_width) = (call.problem.tokens, call.problem.num_heads, call.problem.block);
        Few { operation, weight, x, gates, bias, output, tokens, heads, head_width, activation: None, dtype }
    }

    /// The product of a linear operator whose weight is a matrix of T; `None` if the kernels do not support it.
    pub(crate) fn plain(operation: Operation, call: &Linear<'_>) -> Option<Few> {
        let p = &call.problem;
        let (heads, width) = (p.num_heads * p.block, p.width);
        let (rows, depth) = if operation == Operation::Projection { (heads, width) } else { (width, heads) };
        let weight =
            Weight { weight: call.weight, scales: 0, zero_points: None, matrices: 1, rows, depth, format: None };
        let few = Few::linear(operation, weight, call);
        let aligned = [call.x, call.weight].iter().all(|tensor| tensor.is_multiple_of(16));
        (!p.per_head() && aligned && few.fits()).then_some(few)
    }

    /// The columns of the kernel's tile; `None` if there are more tokens.
    fn columns(&self) -> Option<usize> {
        FEW.into_iter().find(|&columns| self.tokens <= columns)
    }

    fn shared_bytes(&self, columns: usize) -> usize {
        let matrices = if self.operation == Operation::Experts { self.weight.matrices } else { 1 };
        let steps = matrices * self.weight.depth.div_ceil(4 * self.lane_depth());
        (WARPS * columns * TILE_ROWS + steps + 1 + self.heads) * 4
    }

    /// Weights that a lane reads at a time: 16 bytes.
    fn lane_depth(&self) -> usize {
        128 / self.weight.bits()
    }

    /// Whether the kernels support this product.
    pub(crate) fn fits(&self) -> bool {
        // 16 bytes of weights at a time, and of x, which in a combination belong to one head.
        self.dtype != DType::F32
            && self.weight.depth.is_multiple_of(self.lane_depth())
            && (self.operation != Operation::Combination || self.head_width.is_multiple_of(8))
            && self.columns().is_some_and(|columns| self.shared_bytes(columns) <= SHARED_BYTES)
    }

    /// Launches the kernel on the stream.
    ///
    /// # Safety
    /// The tensors have the sizes that the fields state until the kernel has run; [`Few::fits`].
    pub(crate) unsafe fn launch(&self, stream: &Stream<'_>) -> Result<(), Error> {
        let columns = self.columns().unwrap_or(FEW[FEW.len() - 1]);
        let params = NbitsParams {
            weight: self.weight.params()?,
            x: self.x,
            bias: self.bias,
            gates: self.gates,
            output: self.output,
            tokens: int(self.tokens)?,
            heads: int(self.heads)?,
            head_width: int(self.head_width)?,
            activation: self.activation.map_or(-1, |activation| activation as i32),
        };
        let (operation, outputs) = match self.operation {
            Operation::Projection => ("projection", self.heads * self.head_width),
            Operation::Combination => ("combine", self.weight.rows),
            Operation::Experts => ("experts", self.weight.rows),
        };
        let name = format!("moh_nbits_{operation}_{}_{}_{columns}", type_name(self.dtype), self.weight.bits());
        let name = CString::new(name).unwrap_or_default();
        let kernel = Kernel { module: modules::NBITS, name: &name };
        let blocks = outputs.div_ceil(TILE_ROWS / self.activation.map_or(1, Activation::columns));
        let shared = self.shared_bytes(columns) as u32;
        // SAFETY: the caller's contract; addresses and strides are multiples of 16 bytes.
        unsafe { stream.launch(kernel, [int(blocks)?.unsigned_abs(), 1, 1], THREADS, shared, &params) }
    }
}

#[cfg(test)]
mod tests {
    use super::{Format, Weight};

    #[test]
    fn parts_of_a_weight_follow_one_another() {
        let format = Some(Format { bits: 4, block: 32 });
        let (weight, scales) = (1 << 20, 1 << 30);
        let whole = Weight { weight, scales, zero_points: Some(7), matrices: 1, rows: 600, depth: 96, format };
        let found: Vec<_> = whole
            .parts(2, 300 * 96 * 2)
            .map(|(first, part)| (first, part.rows, part.weight, part.scales, part.zero_points))
            .collect();
        let part =
            |first: u64, rows| (first as usize, rows, weight + first * 48, scales + first * 6, Some(7 + first * 2));
        assert_eq!(found, [part(0, 256), part(256, 256), part(512, 88)]);
        // At least one tile at a time.
        assert_eq!(whole.parts(4, 1).map(|(first, part)| (first, part.rows)).last(), Some((512, 88)));
    }
}
