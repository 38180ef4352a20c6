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

/// An instance of the kernels for tensor cores; its numbers equal those of `Instance` in decode.cu.
#[derive(Debug, Clone, Copy)]
struct Instance {
    /// Maximum head width.
    width: usize,
    /// Maximum entries per list.
    rows: usize,
}

impl Instance {
    fn of(width: usize, rows: usize) -> Instance {
        Instance { width: mma::instance(width), rows: if rows <= 16 { 16 } else { 32 } }
    }

    /// Keys per block.
    fn keys(self) -> usize {
        if self.width <= 96 { 32 } else { 16 }
    }

    /// The larger of the queries with all warps' stages, and all warps' results.
    fn shared_bytes(self, stages: usize) -> usize {
        let results = WARPS * self.rows * (2 + self.width.next_multiple_of(8) + 4) * 4;
        let data = (self.rows + WARPS * stages * 2 * self.keys()) * mma::row_bytes(self.width);
        data.max(results)
    }

    /// Blocks of keys that each warp loads ahead: as many as fit, but no more than hide the latency of memory.
    fn stages(self, available: usize) -> usize {
        let most = if self.width <= 128 { 3 } else { 2 };
        (1..=most).rev().find(|&stages| self.shared_bytes(stages) <= available).unwrap_or(1)
    }
}

impl Attention<'_> {
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
        // Of a cache, blocks remain without keys where a sequence is shorter; they take time, too.
        let waves = if self.is_cached() { 4 } else { 8 };
        let p = &self.problem;
        let lists = p.batch * p.kv_num_heads;
        let slots = BLOCKS * self.stream.properties().multiprocessors as usize;
        let balanced = (waves * slots).div_ceil(lists).min(p.kv_len.div_ceil(512));
        let filled = slots.div_ceil(lists).min(p.kv_len.div_ceil(128));
        let parts = balanced.max(filled).max(1);
        let keys = p.kv_len.div_ceil(parts).next_multiple_of(unit).max(unit);
        (p.kv_len.div_ceil(keys).max(1), keys)
    }
}

/// # Safety
/// As [`CudaOperator::launch`](crate::CudaOperator::launch) and [`Attention::is_decoding`].
pub(super) unsafe fn launch(attention: &Attention<'_>) -> Result<(), Error> {
    let p = &attention.problem;
    let (lists, rows) = (p.batch * p.kv_num_heads, p.q_len * p.group_size());
    let width = p.head_dim.max(p.value_dim);
    let type_name = attention.type_name();
    let available = attention.stream.properties().shared_bytes as usize;
    let mut stages = 0;
    let (name, unit, shared) = if attention.fits_mma() {
        let instance = Instance::of(width, rows);
        stages = instance.stages(available);
        let name = format!("moh_decode_{type_name}_d{}_m{}", instance.width, instance.rows);
        (name, WARPS * instance.keys(), instance.shared_bytes(stages))
    } else {
        let widest = [128, 256, MAX_WIDTH].into_iter().find(|&widest| width <= widest).unwrap_or(MAX_WIDTH);
        (format!("moh_decode_simt_{type_name}_d{widest}"), WARPS * 8, WARPS * rows * (p.value_dim + 2) * 4)
    };
    let (splits, keys_per_split) = attention.splits(unit);
    let mut params = AttentionParams {
        splits: int(splits)?,
        // Of a cache, only the GPU knows how many keys the parts share.
        keys_per_split: int(if attention.is_cached() { unit } else { keys_per_split })?,
        stages: int(stages)?,
        ..attention.params
    };
    if splits > 1 {
        params.partial = attention.workspace.allocate(splits * lists * rows * p.value_dim * 4)?;
        params.partial_weight = attention.workspace.allocate(splits * lists * rows * 8)?;
    }
    let kernel = |name| Kernel { module: modules::DECODE, name };
    let name = CString::new(name).unwrap_or_default();
    // SAFETY: tensors and workspace have the sizes that the kernels expect.
    unsafe {
        attention.stream.launch(kernel(&name), [lists as u32, splits as u32, 1], THREADS, shared as u32, &params)?;
        if splits > 1 {
            let name = CString::new(format!("moh_decode_combine_{type_name}")).unwrap_or_default();
            let blocks = (lists * rows).div_ceil(WARPS);
            attention.stream.launch(kernel(&name), [int(blocks)? as u32, 1, 1], THREADS, 0, &params)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::Instance;

    /// Bytes per block on GPUs of compute capability 8.6, 8.9 and 12.0, the least of all supported ones.
    const LEAST: usize = 99 << 10;

    #[test]
    fn all_instances_fit_all_gpus() {
        for (width, rows) in [(32, 32), (64, 32), (72, 32), (96, 32), (128, 32), (256, 16)] {
            let instance = Instance::of(width, rows);
            assert!(instance.shared_bytes(instance.stages(LEAST)) <= LEAST, "{instance:?}");
        }
        assert_eq!([64, 96, 256].map(|width| Instance::of(width, 1).stages(LEAST)), [2, 1, 1]);
        assert_eq!([64, 96, 256].map(|width| Instance::of(width, 1).stages(227 << 10)), [3, 3, 2]);
    }
}
