//! Launcher of `decode.cu`: few query rows per KV head.

use super::{Attention, mma};
use crate::kernel::Kernel;
use crate::modules;
use crate::params::AttentionParams;
use crate::plan::int;
use moh_operators::Error;
use std::ffi::CString;

/// Maximum entries per list: the width of a ballot.
const MAX_ROWS: usize = 32;
/// Maximum head width of the kernels without tensor cores.
const MAX_WIDTH: usize = 1024;
const THREADS: u32 = 128;
const WARPS: usize = 4;
/// Shared memory per block that every GPU of compute capability 8.0 and later provides.
const SHARED_BYTES: usize = 96 << 10;

impl Attention<'_, '_> {
    /// Whether a KV head has so few rows that the time is dominated by reading keys and values.
    pub(super) fn is_decoding(&self) -> bool {
        let p = &self.problem;
        let rows = p.q_len * p.group_size();
        let simt = WARPS * rows * (p.value_dim + 2) * 4 <= SHARED_BYTES && p.head_dim.max(p.value_dim) <= MAX_WIDTH;
        // With more than 16 rows, the accumulators of wider heads exceed the registers.
        let mma = self.fits_mma() && (rows <= 16 || p.head_dim.max(p.value_dim) <= 128);
        rows <= MAX_ROWS && if self.fits_mma() { mma } else { simt }
    }

    /// The number of parts of the keys, and keys per part: enough blocks for all multiprocessors even if many heads
    /// are off, but no part so short that its launch dominates. `unit` divides the keys per part.
    fn splits(&self, unit: usize) -> (usize, usize) {
        const BLOCKS: usize = 2; // resident per multiprocessor
        const WAVES: usize = 8;
        let p = &self.problem;
        let lists = p.batch * p.kv_num_heads;
        let slots = BLOCKS * self.call.stream.properties().multiprocessors as usize;
        let balanced = (WAVES * slots).div_ceil(lists).min(p.kv_len.div_ceil(512));
        let filled = slots.div_ceil(lists).min(p.kv_len.div_ceil(128));
        let parts = balanced.max(filled).max(1);
        let keys = p.kv_len.div_ceil(parts).next_multiple_of(unit).max(unit);
        (p.kv_len.div_ceil(keys).max(1), keys)
    }
}

/// # Safety
/// As [`CudaOperator::launch`](crate::CudaOperator::launch) and [`Attention::is_decoding`].
pub(super) unsafe fn launch(attention: &Attention<'_, '_>) -> Result<(), Error> {
    let (p, call) = (&attention.problem, attention.call);
    let (lists, rows) = (p.batch * p.kv_num_heads, p.q_len * p.group_size());
    let width = p.head_dim.max(p.value_dim);
    let type_name = attention.type_name();
    let (name, unit, shared) = if attention.fits_mma() {
        // Equals `Instance` in decode.cu.
        let width = mma::instance(width);
        let (keys, stages) = (if width <= 96 { 32 } else { 16 }, if width <= 128 { 3 } else { 2 });
        let row_count = if rows <= 16 { 16 } else { 32 };
        let results = WARPS * row_count * (2 + width.next_multiple_of(8) + 4) * 4;
        let shared = (row_count + WARPS * stages * 2 * keys) * mma::row_bytes(width);
        (format!("moh_decode_{type_name}_d{width}_m{row_count}"), WARPS * keys, shared.max(results))
    } else {
        let widest = [128, 256, MAX_WIDTH].into_iter().find(|&widest| width <= widest).unwrap_or(MAX_WIDTH);
        (format!("moh_decode_simt_{type_name}_d{widest}"), WARPS * 8, WARPS * rows * (p.value_dim + 2) * 4)
    };
    let (splits, keys_per_split) = attention.splits(unit);
    let mut params = AttentionParams { splits: int(splits)?, keys_per_split: int(keys_per_split)?, ..attention.params };
    if splits > 1 {
        params.partial = call.workspace.allocate(splits * lists * rows * p.value_dim * 4)?;
        params.partial_lse = call.workspace.allocate(splits * lists * rows * 4)?;
    }
    let kernel = |name| Kernel { module: modules::DECODE, name };
    let name = CString::new(name).unwrap_or_default();
    // SAFETY: tensors and workspace have the sizes that the kernels expect.
    unsafe {
        call.stream.launch(kernel(&name), [lists as u32, splits as u32, 1], THREADS, shared as u32, &params)?;
        if splits > 1 {
            let name = CString::new(format!("moh_decode_combine_{type_name}")).unwrap_or_default();
            let blocks = (lists * rows).div_ceil(WARPS);
            call.stream.launch(kernel(&name), [int(blocks)? as u32, 1, 1], THREADS, 0, &params)?;
        }
    }
    Ok(())
}
