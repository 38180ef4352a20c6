//! The plan of selected rows, made on a GPU or on the emulator, against lists computed here; and the tiles that kernels
//! find in it.

use crate::device::Device;
use crate::memory::Memory;
use moh_conformance::Random;
use moh_cuda::kernel::Kernel;
use moh_cuda::params::{Params, TileParams};
use moh_cuda::plan::{Plan, Request, plan};
use moh_cuda::{Arena, RawPtr, modules};

#[derive(Debug, Clone, Copy)]
struct Case {
    batch: usize,
    q_len: usize,
    lists_per_batch: usize,
    group: usize,
    tile_rows: usize,
    kv_len: usize,
    is_causal: bool,
    /// Bytes of a list's keys and values.
    list_bytes: usize,
    /// Fraction of rows that are selected.
    share: f64,
}

const CASE: Case = Case {
    batch: 2,
    q_len: 100,
    lists_per_batch: 3,
    group: 1,
    tile_rows: 64,
    kv_len: 77,
    is_causal: false,
    list_bytes: 1,
    share: 0.6,
};

/// A tile: list, first entry, number of entries, number of keys.
type Tile = [usize; 4];

fn ints(memory: &Memory, at: RawPtr, count: usize) -> Vec<usize> {
    let start = (at - memory.ptr()) as usize;
    let mut bytes = vec![0; start + count * 4];
    memory.read(&mut bytes);
    bytes[start..].chunks_exact(4).map(|x| i32::from_ne_bytes(x.try_into().unwrap()) as usize).collect()
}

fn check(device: &Device, case: Case) {
    let Case { batch, q_len, lists_per_batch, group, tile_rows, kv_len, is_causal, list_bytes, share } = case;
    let heads = lists_per_batch * group;
    let mut random = Random(7);
    let gates: Vec<f32> = (0..batch * q_len * heads)
        .map(|_| {
            let sign = if random.bits() & 1 == 0 { 1.0 } else { -1.0 };
            if random.unit() < share { sign } else { 0.0 * sign }
        })
        .collect();
    let bytes: Vec<u8> = gates.iter().flat_map(|gate| gate.to_ne_bytes()).collect();
    let memory = device.memory(bytes.len());
    memory.write(&bytes);
    let room = 8 << 20;
    let workspace = device.memory(room);
    let stream = device.stream();
    let request =
        Request { gates: memory.ptr(), batch, q_len, lists_per_batch, group, tile_rows, kv_len, is_causal, list_bytes };
    // Twice in the same memory: the second kernel may start while the first runs, as in the later parts of RoutedMLP.
    let [Plan { tiles: params, max_tiles }, _] = [(); 2].map(|()| {
        // SAFETY: the memory has these sizes and lives until the stream is synchronised.
        unsafe { plan(&request, &stream, &Arena::new(workspace.ptr(), room)) }.unwrap()
    });
    stream.synchronize().unwrap();

    let (lists, entries) = (batch * lists_per_batch, q_len * group);
    let counts = ints(&workspace, params.counts, lists);
    let all_entries = ints(&workspace, params.entries, lists * entries);
    let mut tiles: Vec<Vec<Tile>> = Vec::new();
    for list in 0..lists {
        let (b, n) = (list / lists_per_batch, list % lists_per_batch);
        let gate = |e: usize| gates[(b * q_len + e / group) * heads + n * group + e % group];
        let selected: Vec<usize> = (0..entries).filter(|&e| gate(e) != 0.0).collect();
        assert_eq!(counts[list], selected.len(), "{case:?}: list {list}");
        assert_eq!(all_entries[list * entries..][..selected.len()], selected, "{case:?}: list {list}");
        let tile = |first: usize| {
            let rows = tile_rows.min(selected.len() - first);
            let visible = (selected[first + rows - 1] / group + 1 + kv_len).saturating_sub(q_len).min(kv_len);
            [list, first, rows, if is_causal { visible } else { kv_len }]
        };
        tiles.push((0..selected.len()).step_by(tile_rows).map(tile).collect());
    }
    assert_eq!(ints(&workspace, params.next, 1), [0], "{case:?}");
    assert!(tiles.iter().map(Vec::len).sum::<usize>() <= max_tiles && params.lists as usize == lists, "{case:?}");

    let l2_bytes = stream.properties().l2_bytes as usize;
    let section = params.lists_per_section as usize;
    assert!(section == 1 || (section <= 32 && section * list_bytes <= l2_bytes / 2), "{case:?}: section of {section}");
    // In order: sections, then levels from the end, then lists.
    let mut expected = Vec::new();
    for lists in tiles.chunks(section) {
        for level in 1..=lists.iter().map(Vec::len).max().unwrap_or(0) {
            expected.extend(lists.iter().filter_map(|list| Some(list[list.len().checked_sub(level)?])));
        }
    }
    if device.emulated {
        for blocks in [1, 3, 132] {
            assert_eq!(found(device, params, expected.len(), blocks), expected, "{case:?}: {blocks} blocks");
        }
    }
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct ListTiles {
    tiles: TileParams,
    out: RawPtr,
}
// SAFETY: has the layout of `ListTiles` in `kernels/emulator/tests.cpp`.
unsafe impl Params for ListTiles {}

/// The tiles that `blocks` blocks find if they take turns. A tile that nobody finds is full of -1; one too many is an
/// access out of bounds.
fn found(device: &Device, tiles: TileParams, count: usize, blocks: u32) -> Vec<Tile> {
    let memory = device.memory(count * 16);
    let params = ListTiles { tiles, out: memory.ptr() };
    let stream = device.stream();
    let kernel = Kernel { module: modules::PLAN, name: c"moh_test_tiles" };
    // SAFETY: the plan lives as long as the caller's workspace, and the memory until the stream is synchronised.
    unsafe { stream.launch(kernel, [blocks, 1, 1], 32, 0, &params) }.unwrap();
    stream.synchronize().unwrap();
    ints(&memory, memory.ptr(), 4 * count).chunks_exact(4).map(|x| x.try_into().unwrap()).collect()
}

#[test]
fn device_plans_equal_host_plans() {
    let Some(device) = Device::get() else { return };
    for q_len in [1, 31, 33, 64, 500, 1024, 1025, 2100] {
        for share in [0.0, 0.05, 0.6, 1.0] {
            check(device, Case { q_len, share, ..CASE });
            check(device, Case { q_len, share, lists_per_batch: 11, batch: 1, tile_rows: 128, ..CASE });
            check(device, Case { q_len, share, is_causal: true, kv_len: q_len, ..CASE });
        }
    }
    // Lists that are scanned in several rounds, and lists with their own block.
    check(device, Case { q_len: 40_000, batch: 1, lists_per_batch: 2, ..CASE });
    check(device, Case { q_len: 5000, group: 3, ..CASE });
    // More lists than threads, and many sections: of 32 lists, of fewer, and the last one shorter.
    let many = Case { batch: 50, lists_per_batch: 30, ..CASE };
    check(device, Case { q_len: 3, tile_rows: 2, ..many });
    check(device, Case { q_len: 30, tile_rows: 8, is_causal: true, kv_len: 50, list_bytes: 1 << 20, ..many });
    check(device, Case { q_len: 30, tile_rows: 8, batch: 1, lists_per_batch: 37, share: 0.3, ..CASE });
    for (kv_len, list_bytes) in [(100, 1 << 18), (1000, 1 << 30), (20, 1 << 19), (0, 0)] {
        for group in [1, 4, 5] {
            check(device, Case { group, is_causal: true, kv_len, list_bytes, tile_rows: 16, ..CASE });
        }
    }
}
