//! Launcher of `attention_sm90.cu`: f16 and bf16 on Hopper's tensor cores, with a plan.

use super::Attention;
use crate::driver::RawPtr;
use crate::kernel::Kernel;
use crate::modules;
use crate::params::{AttentionSm90Params, TensorMap};
use crate::tensor_map::Boxed;
use moh_operators::Error;
use std::ffi::CString;

/// An instance of the kernel; repeats the numbers of `MOH_ATTENTION` in attention_sm90.cu.
#[derive(Debug, Clone, Copy)]
struct Instance {
    /// Maximum head width.
    width: usize,
    /// Consumer warpgroups, each of which processes 64 rows.
    warpgroups: usize,
    /// Keys per block.
    keys: usize,
    /// Key or value blocks in shared memory.
    slots: usize,
    /// Units of query rows in shared memory, per warpgroup.
    query_slots: usize,
}

const UNIT_ROWS: usize = 64;
const INSTANCES: [Instance; 5] = [
    Instance { width: 64, warpgroups: 3, keys: 128, slots: 10, query_slots: 2 },
    Instance { width: 80, warpgroups: 2, keys: 128, slots: 9, query_slots: 2 },
    Instance { width: 96, warpgroups: 2, keys: 128, slots: 7, query_slots: 2 },
    Instance { width: 128, warpgroups: 2, keys: 128, slots: 5, query_slots: 2 },
    Instance { width: 256, warpgroups: 2, keys: 64, slots: 5, query_slots: 1 },
];
/// Maximum head width of the instances with a bias.
const MAX_BIASED_WIDTH: usize = 128;

impl Instance {
    fn of(width: usize, biased: bool) -> Option<Instance> {
        let found = INSTANCES.into_iter().find(|instance| width <= instance.width)?;
        match biased {
            true if found.width > MAX_BIASED_WIDTH => None,
            true => Some(Instance { warpgroups: 2, ..found }),
            false => Some(found),
        }
    }

    /// Elements per row of a panel in shared memory: the widest swizzle that divides the width.
    fn panel(&self) -> usize {
        [64, 32, 16].into_iter().find(|panel| self.width.is_multiple_of(*panel)).unwrap_or(16)
    }

    fn threads(&self) -> u32 {
        128 * (self.warpgroups as u32 + 1)
    }

    /// `sizeof(Shared)`: ring, queries, rows, tiles, barriers.
    fn shared_bytes(&self) -> usize {
        const QUEUE: usize = 4;
        let units = self.warpgroups * self.query_slots;
        let data = 2 * self.width * (self.slots * self.keys + units * UNIT_ROWS);
        (data + units * UNIT_ROWS * 8 + QUEUE * 16 + 8 * 2 * (QUEUE + self.slots + units)).next_multiple_of(16)
    }

    /// Rows per tile, and whether a tile's keys and values stay in shared memory while a warpgroup processes several
    /// units.
    ///
    /// Tiles with many rows load keys and values less often, but there must be enough tiles for all multiprocessors.
    fn tiling(&self, lists: usize, entries: usize, kv_len: usize, multiprocessors: usize) -> (usize, bool) {
        let resident = 2 * kv_len.div_ceil(self.keys) <= self.slots;
        if resident {
            let tiles = (4 * multiprocessors).div_ceil(lists);
            return (entries.div_ceil(tiles).next_multiple_of(UNIT_ROWS), true);
        }
        let heights = (1..=self.warpgroups).rev().map(|units| units * UNIT_ROWS);
        let enough = |rows: &usize| lists * entries.div_ceil(*rows) >= multiprocessors;
        (heights.into_iter().find(enough).unwrap_or(UNIT_ROWS), false)
    }
}

impl Attention<'_, '_> {
    /// Whether the Hopper kernels support this call; assumes [`Attention::fits_mma`].
    pub(super) fn fits_hopper(&self) -> bool {
        let p = &self.problem;
        // Rows have 31-bit indices.
        let rows = p.batch.checked_mul(p.q_len).and_then(|n| n.checked_mul(p.num_heads));
        self.call.stream.properties().capability.0 == 9
            && p.kv_len > 0
            && rows.is_some_and(|rows| i32::try_from(rows).is_ok())
            && Instance::of(p.head_dim.max(p.value_dim), self.is_biased())
                .is_some_and(|instance| instance.shared_bytes() <= self.call.stream.properties().shared_bytes as usize)
    }

    /// The TMA descriptor of keys or values of head width `dim`: a box is one panel of one block.
    ///
    /// Dimensions from the innermost: element, then head and token in the order of their strides, then batch.
    fn tensor_map(&self, tensor: RawPtr, dim: usize, instance: &Instance) -> Result<TensorMap, Error> {
        let p = &self.problem;
        let (inner, outer, box_inner, box_outer) = match p.cache_layout {
            true => (p.kv_len, p.kv_num_heads, instance.keys, 1),
            false => (p.kv_num_heads, p.kv_len, 1, instance.keys),
        };
        let boxed = Boxed {
            ptr: tensor,
            dtype: self.call.dtype,
            sizes: [dim, inner, outer, p.batch],
            strides: [dim, dim * inner, dim * inner * outer],
            boxes: [instance.panel(), box_inner, box_outer, 1],
        };
        boxed.encode("keys and values of RoutedAttention")
    }
}

/// # Safety
/// As [`CudaOperator::launch`](crate::CudaOperator::launch), [`Attention::fits_mma`] and [`Attention::fits_hopper`].
pub(super) unsafe fn launch(attention: &Attention<'_, '_>) -> Result<(), Error> {
    let (p, stream) = (&attention.problem, attention.call.stream);
    let biased = attention.is_biased();
    let instance = Instance::of(p.head_dim.max(p.value_dim), biased).ok_or(Error::OutOfMemory { bytes: 0 })?;
    let multiprocessors = stream.properties().multiprocessors.max(1) as usize;
    let (rows, resident) =
        instance.tiling(p.batch * p.kv_num_heads, p.q_len * p.group_size(), p.kv_len, multiprocessors);
    // SAFETY: the caller's contract.
    let plan = unsafe { attention.plan(rows) }?;
    let common = &attention.params;
    let params = AttentionSm90Params {
        key_map: attention.tensor_map(common.key, p.head_dim, &instance)?,
        value_map: attention.tensor_map(common.value, p.value_dim, &instance)?,
        query: common.query,
        gates: common.gates,
        bias: common.bias,
        output: common.output,
        tiles: plan.tiles,
        bias_strides: common.bias_strides,
        batch: common.batch,
        q_len: common.q_len,
        kv_len: common.kv_len,
        num_heads: common.num_heads,
        kv_num_heads: common.kv_num_heads,
        head_dim: common.head_dim,
        value_dim: common.value_dim,
        is_causal: common.is_causal,
        cache_layout: i32::from(p.cache_layout),
        resident: i32::from(resident),
        scale_log2: common.scale * std::f32::consts::LOG2_E,
    };
    let suffix = if biased { "_bias" } else { "" };
    let name = format!("moh_attention_sm90_{}_d{}{suffix}", attention.type_name(), instance.width);
    let name = CString::new(name).unwrap_or_default();
    let kernel = Kernel { module: modules::ATTENTION_SM90, name: &name };
    let blocks = plan.max_tiles.min(multiprocessors) as u32;
    // SAFETY: tensors and plan have the sizes that the kernel expects; widths and pointers are multiples of 16 bytes.
    unsafe { stream.launch(kernel, [blocks, 1, 1], instance.threads(), instance.shared_bytes() as u32, &params) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_fit_shared_memory() {
        for instance in INSTANCES {
            assert!(instance.shared_bytes() <= 227 << 10, "{instance:?}: {}", instance.shared_bytes());
        }
    }

    #[test]
    fn tiles_have_more_rows_when_there_are_many() {
        let instance = Instance::of(64, false).unwrap_or(INSTANCES[0]);
        assert_eq!(instance.tiling(2048, 256, 256, 132), (256, true));
        assert_eq!(instance.tiling(32, 256, 256, 132), (64, true));
        assert_eq!(instance.tiling(512, 1024, 1024, 132), (192, false));
        assert_eq!(instance.tiling(16, 1024, 1024, 132), (64, false));
        assert_eq!(instance.tiling(17, 1024, 1024, 132), (128, false));
    }
}
