//! Launcher of `attention_sm80.cu`: f16 and bf16 on tensor cores, with a plan.

use super::Attention;
use crate::kernel::Kernel;
use crate::modules;
use crate::params::AttentionParams;
use crate::plan::{Plan, Request, plan};
use moh_operators::Error;
use std::ffi::CString;

/// Maximum head width.
pub(super) const MAX_WIDTH: usize = 256;
const WIDTHS: [usize; 6] = [32, 64, 72, 96, 128, MAX_WIDTH];
const THREADS: u32 = 128;
/// Row stride in shared memory in bytes: `HeadLayout<D>::row_bytes`.
pub(super) fn row_bytes(width: usize) -> usize {
    width.div_ceil(16) * 32 + 16
}

/// The width D of the instance for heads of this width.
pub(super) fn instance(width: usize) -> usize {
    WIDTHS.into_iter().find(|&d| width <= d).unwrap_or(MAX_WIDTH)
}

/// An instance of the kernel; its numbers equal those of `Instance` in attention_sm80.cu.
#[derive(Debug, Clone, Copy)]
struct Instance {
    /// Maximum head width.
    width: usize,
    biased: bool,
}

impl Instance {
    /// Rows per tile.
    fn rows(self) -> usize {
        if self.width <= 128 { 128 } else { 64 }
    }

    /// Keys per block.
    fn keys(self) -> usize {
        match self.biased {
            false if self.width <= 80 => 64,
            true if self.width > 96 => 16,
            _ => 32,
        }
    }

    /// The tile's rows, queries, and two blocks of keys and values.
    fn shared_bytes(self) -> usize {
        32 + 12 * self.rows() + (self.rows() + 2 * 2 * self.keys()) * row_bytes(self.width)
    }
}

impl Attention<'_> {
    /// Whether scores are scaled and biased before taking the maximum. Needed for scales <= 0, which reverse the
    /// order.
    pub(super) fn is_biased(&self) -> bool {
        self.params.bias != 0 || self.params.scale <= 0.0
    }

    /// Makes the plan for tiles of `tile_rows` rows on the stream. Query heads of one KV head share tiles.
    ///
    /// # Safety
    /// As [`CudaOperator::launch`](crate::CudaOperator::launch).
    pub(super) unsafe fn plan(&self, tile_rows: usize) -> Result<Plan, Error> {
        let p = &self.problem;
        let size = if self.dtype == moh_operators::DType::F32 { 4 } else { 2 };
        let request = Request {
            gates: self.params.gates,
            batch: p.batch,
            q_len: p.q_len,
            lists_per_batch: p.kv_num_heads,
            group: p.group_size(),
            tile_rows,
            kv_len: p.kv_len,
            is_causal: p.is_causal,
            list_bytes: p.kv_len * (p.head_dim + p.value_dim) * size,
        };
        // SAFETY: the gates belong to the call.
        unsafe { plan(&request, self.stream, self.workspace) }
    }
}

/// # Safety
/// As [`CudaOperator::launch`](crate::CudaOperator::launch) and [`Attention::fits_mma`].
pub(super) unsafe fn launch(attention: &Attention<'_>) -> Result<(), Error> {
    let p = &attention.problem;
    let width = instance(p.head_dim.max(p.value_dim));
    let stream = attention.stream;
    // The instances with a bias take smaller blocks of keys, and need none.
    let biased = attention.is_biased()
        || Instance { width, biased: false }.shared_bytes() > stream.properties().shared_bytes as usize;
    let instance = Instance { width, biased };
    let (rows, shared) = (instance.rows(), instance.shared_bytes());
    // SAFETY: the caller's contract.
    let plan = unsafe { attention.plan(rows) }?;
    let params = AttentionParams { tiles: plan.tiles, ..attention.params };
    let suffix = if biased { "_bias" } else { "" };
    let name =
        CString::new(format!("moh_attention_sm80_{}_d{width}{suffix}", attention.type_name())).unwrap_or_default();
    let kernel = Kernel { module: modules::ATTENTION_SM80, name: &name };
    let blocks = plan.max_tiles.min(2 * stream.properties().multiprocessors.max(1) as usize);
    // SAFETY: tensors and plan have the sizes that the kernel expects; widths and pointers are multiples of 16 bytes.
    unsafe { stream.launch(kernel, [blocks as u32, 1, 1], THREADS, shared as u32, &params) }
}

#[cfg(test)]
mod tests {
    use super::{Instance, WIDTHS};

    /// Only on GPUs with 99 KB, heads wider than 128 use the instance with a bias.
    #[test]
    fn instances_fit_all_gpus() {
        for width in WIDTHS {
            for (biased, available) in [(true, 99 << 10), (width > 128, 99 << 10), (false, 163 << 10)] {
                assert!(Instance { width, biased }.shared_bytes() <= available, "{width} {biased}");
            }
        }
    }
}
