//! Launcher of `attention_sm90.cu`: f16 and bf16 on Hopper's tensor cores, with a plan.

use super::Attention;
use crate::driver::RawPtr;
use crate::kernel::Kernel;
use crate::modules;
use crate::params::{AttentionSm90Params, TensorMap};
use crate::tensor_map::Boxed;
use moh_operators::Error;
use moh_operators::routed_attention::Problem;
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
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Without a bias.
    Plain,
    /// Without a bias, with longer blocks of keys.
    Long,
    /// With a bias.
    Bias,
}

impl Kind {
    /// The suffix of the kernel's name.
    fn suffix(self) -> &'static str {
        match self {
            Kind::Plain => "",
            Kind::Long => "_long",
            Kind::Bias => "_bias",
        }
    }
}

const UNIT_ROWS: usize = 64;
/// Columns of a panel in shared memory, except for the tail.
const PANEL: usize = 64;
#[rustfmt::skip]
const INSTANCES: [Instance; 10] = [
    Instance { width: 64, warpgroups: 3, keys: 128, slots: 10, query_slots: 2, kind: Kind::Plain },
    Instance { width: 80, warpgroups: 2, keys: 128, slots: 9, query_slots: 2, kind: Kind::Plain },
    Instance { width: 96, warpgroups: 2, keys: 128, slots: 7, query_slots: 2, kind: Kind::Plain },
    Instance { width: 128, warpgroups: 2, keys: 128, slots: 5, query_slots: 2, kind: Kind::Plain },
    Instance { width: 128, warpgroups: 2, keys: 160, slots: 4, query_slots: 2, kind: Kind::Long },
    Instance { width: 256, warpgroups: 2, keys: 64, slots: 5, query_slots: 1, kind: Kind::Plain },
    Instance { width: 64, warpgroups: 2, keys: 128, slots: 9, query_slots: 2, kind: Kind::Bias },
    Instance { width: 80, warpgroups: 2, keys: 128, slots: 7, query_slots: 2, kind: Kind::Bias },
    Instance { width: 96, warpgroups: 2, keys: 128, slots: 5, query_slots: 2, kind: Kind::Bias },
    Instance { width: 128, warpgroups: 2, keys: 96, slots: 5, query_slots: 2, kind: Kind::Bias },
];

impl Instance {
    /// The narrowest instance for a problem.
    ///
    /// Longer blocks take fewer instructions a key, but compute keys beyond `kv_len`: they are used if they add at
    /// most 2 % of the keys, and not with a causal mask, whose blocks on the diagonal they would lengthen too.
    fn of(p: &Problem, biased: bool, is_causal: bool) -> Option<Instance> {
        let width = p.head_dim.max(p.value_dim);
        let kind = if biased { Kind::Bias } else { Kind::Plain };
        let found = INSTANCES.into_iter().find(|instance| width <= instance.width && instance.kind == kind)?;
        let computed = |instance: &Instance| p.kv_len.next_multiple_of(instance.keys);
        let is_better = |long: &Instance| {
            long.width == found.width
                && long.kind == Kind::Long
                && kind == Kind::Plain
                && !is_causal
                && 50 * computed(long) <= 51 * computed(&found)
        };
        Some(INSTANCES.into_iter().find(is_better).unwrap_or(found))
    }

    /// Columns after the last full panel of 64; they have a narrower panel.
    fn tail(&self) -> usize {
        self.width % PANEL
    }

    fn threads(&self) -> u32 {
        128 * (self.warpgroups as u32 + 1)
    }

    /// `sizeof(Shared)`: ring, queries, rows, tiles, barriers; the bias of a block per warpgroup, and its barriers.
    fn shared_bytes(&self) -> usize {
        const QUEUE: usize = 4;
        let units = self.warpgroups * self.query_slots;
        let data = 2 * self.width * (self.slots * self.keys + units * UNIT_ROWS);
        let plain = data + units * UNIT_ROWS * 8 + QUEUE * 32 + 8 * 2 * (QUEUE + self.slots + units);
        let bias =
            if self.kind == Kind::Bias { self.warpgroups * (UNIT_ROWS * (2 * self.keys + 16) + 8 * 2) } else { 0 };
        plain.next_multiple_of(16) + bias
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

impl Attention<'_> {
    /// The instance for this call. Queries of a cache see the keys up to their own.
    fn instance(&self) -> Option<Instance> {
        Instance::of(&self.problem, self.is_biased(), self.is_causal())
    }

    fn is_causal(&self) -> bool {
        self.problem.is_causal || self.is_cached()
    }

    /// Whether the Hopper kernels support this call; assumes [`Attention::fits_mma`].
    pub(super) fn fits_hopper(&self) -> bool {
        let p = &self.problem;
        // Rows have 31-bit indices.
        let rows = p.batch.checked_mul(p.q_len).and_then(|n| n.checked_mul(p.num_heads));
        self.stream.properties().capability.0 == 9
            && p.kv_len > 0
            && self.params.bias.is_multiple_of(16)
            && rows.is_some_and(|rows| i32::try_from(rows).is_ok())
            && self
                .instance()
                .is_some_and(|instance| instance.shared_bytes() <= self.stream.properties().shared_bytes as usize)
    }

    /// The TMA descriptors of keys or values of head width `dim`: a box is 64 columns, or the tail, of one block.
    /// Without a tail, its descriptor is empty.
    fn tensor_maps(&self, tensor: RawPtr, dim: usize, instance: &Instance) -> Result<[TensorMap; 2], Error> {
        let tail = match instance.tail() {
            0 => TensorMap([0; 16]),
            columns => self.tensor_map(tensor, dim, instance, columns)?,
        };
        Ok([self.tensor_map(tensor, dim, instance, PANEL)?, tail])
    }

    /// The TMA descriptor for boxes of `columns` columns of one block.
    ///
    /// Dimensions from the innermost: element, then head and token in the order of their strides, then batch.
    fn tensor_map(&self, tensor: RawPtr, dim: usize, instance: &Instance, columns: usize) -> Result<TensorMap, Error> {
        let p = &self.problem;
        let (inner, outer, box_inner, box_outer) = match p.cache_layout {
            true => (p.kv_len, p.kv_num_heads, instance.keys, 1),
            false => (p.kv_num_heads, p.kv_len, 1, instance.keys),
        };
        let boxed = Boxed {
            ptr: tensor,
            dtype: self.dtype,
            sizes: [dim, inner, outer, p.batch],
            strides: [dim, dim * inner, dim * inner * outer],
            boxes: [columns, box_inner, box_outer, 1],
        };
        boxed.encode("keys and values of RoutedAttention", self.stream)
    }
}

/// # Safety
/// As [`CudaOperator::launch`](crate::CudaOperator::launch), [`Attention::fits_mma`] and [`Attention::fits_hopper`].
pub(super) unsafe fn launch(attention: &Attention<'_>) -> Result<(), Error> {
    let (p, stream) = (&attention.problem, attention.stream);
    let instance = attention.instance().ok_or(Error::OutOfMemory { bytes: 0 })?;
    let multiprocessors = stream.properties().multiprocessors.max(1) as usize;
    let (rows, resident) =
        instance.tiling(p.batch * p.kv_num_heads, p.q_len * p.group_size(), p.kv_len, multiprocessors);
    // SAFETY: the caller's contract.
    let plan = unsafe { attention.plan(rows) }?;
    let common = &attention.params;
    let [key_map, key_tail_map] = attention.tensor_maps(common.key, p.head_dim, &instance)?;
    let [value_map, value_tail_map] = attention.tensor_maps(common.value, p.value_dim, &instance)?;
    let params = AttentionSm90Params {
        key_map,
        value_map,
        key_tail_map,
        value_tail_map,
        query: common.query,
        gates: common.gates,
        bias: common.bias,
        output: common.output,
        value: common.value,
        first: common.first,
        start: common.start,
        tiles: plan.tiles,
        bias_strides: common.bias_strides,
        batch: common.batch,
        q_len: common.q_len,
        kv_len: common.kv_len,
        num_heads: common.num_heads,
        kv_num_heads: common.kv_num_heads,
        head_dim: common.head_dim,
        value_dim: common.value_dim,
        is_causal: attention.is_causal().into(),
        cache_layout: i32::from(p.cache_layout),
        resident: i32::from(resident),
        scale_log2: common.scale * std::f32::consts::LOG2_E,
    };
    let name = format!("moh_attention_sm90_{}_d{}{}", attention.type_name(), instance.width, instance.kind.suffix());
    let name = CString::new(name).unwrap_or_default();
    let kernel = Kernel { module: modules::ATTENTION_SM90, name: &name };
    let blocks = plan.max_tiles.min(multiprocessors) as u32;
    // SAFETY: tensors and plan have the sizes that the kernel expects; widths and pointers are multiples of 16 bytes.
    unsafe { stream.launch(kernel, [blocks, 1, 1], instance.threads(), instance.shared_bytes() as u32, &params) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    /// The instances of attention_sm90.cu, from its macros.
    fn instances_of_the_kernel() -> Vec<[usize; 6]> {
        let source = include_str!("../../kernels/attention_sm90.cu");
        let numbers = |line: &str, macro_name: &str| -> Option<Vec<usize>> {
            let (inside, _) = line.strip_prefix(macro_name)?.strip_prefix('(')?.split_once(')')?;
            inside.split(", ").map(|number| number.parse().ok()).collect()
        };
        let of = |line: &str| {
            let kinds = [("MOH_ATTENTION_PLAIN", 0), ("MOH_ATTENTION_LONG", 1), ("MOH_ATTENTION_BIAS", 2)];
            let (numbers, kind) = kinds.into_iter().find_map(|(name, kind)| Some((numbers(line, name)?, kind)))?;
            <[usize; 6]>::try_from([numbers, vec![kind]].concat()).ok()
        };
        source.lines().filter_map(of).collect()
    }

    #[test]
    fn instances_are_those_of_the_kernel() {
        let fields = |i: Instance| [i.width, i.warpgroups, i.keys, i.slots, i.query_slots, i.kind as usize];
        let (mut here, mut there) = (INSTANCES.map(fields).to_vec(), instances_of_the_kernel());
        here.sort_unstable();
        there.sort_unstable();
        assert_eq!(here, there);
    }

    /// A C++ compiler compares the sizes.
    #[test]
    fn shared_bytes_is_the_size_of_shared() {
        let mut source = String::from("#include \"attention_sm90.cu\"\n");
        for instance in INSTANCES {
            let Instance { width, warpgroups, keys, slots, query_slots, kind } = instance;
            let biased = kind == Kind::Bias;
            let config = format!("Config<f16, {width}, {warpgroups}, {keys}, {slots}, {query_slots}, {biased}>");
            source += &format!("static_assert(sizeof(Shared<{config}>) == {});\n", instance.shared_bytes());
        }
        let arguments = ["-std=c++17", "-fsyntax-only", "-w", "-DMOH_EMULATE", "-x", "c++", "-"];
        let started = Command::new("g++")
            .args(arguments)
            .arg(concat!("-I", env!("CARGO_MANIFEST_DIR"), "/kernels"))
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let Ok(mut compiler) = started else {
            println!("SKIPPED: no g++");
            return;
        };
        compiler.stdin.take().unwrap().write_all(source.as_bytes()).unwrap();
        let output = compiler.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    #[test]
    fn instances_fit_shared_memory() {
        for instance in INSTANCES {
            assert!(instance.shared_bytes() <= 227 << 10, "{instance:?}: {}", instance.shared_bytes());
        }
    }

    #[test]
    fn long_blocks_are_used_where_few_keys_are_added() {
        let keys = |kv_len, is_causal, biased| {
            let problem = Problem {
                batch: 1,
                q_len: 64,
                kv_len,
                num_heads: 1,
                kv_num_heads: 1,
                head_dim: 128,
                value_dim: 128,
                cache_layout: false,
                scale: 1.0,
                is_causal,
                bias_strides: None,
            };
            Instance::of(&problem, biased, is_causal).unwrap().keys
        };
        // (4096, 4160), (1024, 1120), (384, 320) and (512, 480) keys in blocks of 128 and 160.
        assert_eq!([4096, 1024, 300, 460].map(|kv_len| keys(kv_len, false, false)), [160, 128, 160, 160]);
        assert_eq!(keys(4096, true, false), 128);
        assert_eq!(keys(4096, false, true), 96);
    }

    #[test]
    fn tiles_have_more_rows_when_there_are_many() {
        let instance = INSTANCES[0];
        assert_eq!(instance.tiling(2048, 256, 256, 132), (256, true));
        assert_eq!(instance.tiling(32, 256, 256, 132), (64, true));
        assert_eq!(instance.tiling(512, 1024, 1024, 132), (192, false));
        assert_eq!(instance.tiling(16, 1024, 1024, 132), (64, false));
        assert_eq!(instance.tiling(17, 1024, 1024, 132), (128, false));
    }
}
