//! The plan of selected rows and tiles, made on a GPU or on the emulator, against a plan computed here.

use crate::device::{Device, Memory};
use moh_conformance::Random;
use moh_cuda::plan::{Keys, Plan, Request, plan};
use moh_cuda::{Arena, RawPtr};

#[derive(Debug, Clone, Copy)]
struct Case {
    batch: usize,
    q_len: usize,
    lists_per_batch: usize,
    group: usize,
    tile_rows: usize,
    /// For causal attention: kv_len, and the bytes of a list's keys and values.
    causal: Option<(usize, usize)>,
    /// Fraction of rows that are selected.
    share: f64,
}

const CASE: Case = Case { batch: 2, q_len: 100, lists_per_batch: 3, group: 1, tile_rows: 64, causal: None, share: 0.6 };
const KV_LEN: usize = 77;

fn ints(memory: &Memory, base: RawPtr, at: RawPtr, count: usize) -> Vec<usize> {
    let start = (at - base) as usize;
    let mut bytes = vec![0; start + count * 4];
    memory.read(&mut bytes);
    bytes[start..].chunks_exact(4).map(|x| i32::from_ne_bytes(x.try_into().unwrap()) as usize).collect()
}

fn check(device: &Device, case: Case) {
    let Case { batch, q_len, lists_per_batch, group, tile_rows, causal, share } = case;
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
    let request = Request {
        gates: memory.ptr(),
        batch,
        q_len,
        lists_per_batch,
        group,
        tile_rows,
        causal: causal.map(|(kv_len, list_bytes)| Keys { kv_len, list_bytes }),
        kv_len: KV_LEN,
    };
    // SAFETY: the memory has these sizes and lives until the stream is synchronised.
    let found: Plan = unsafe {
        let arena = Arena::new(workspace.ptr(), room);
        plan(&request, &stream, &arena).unwrap()
    };
    stream.synchronize().unwrap();
    let read = |at, count| ints(&workspace, workspace.ptr(), at, count);

    let (lists, entries) = (batch * lists_per_batch, q_len * group);
    let counts = read(found.counts, lists);
    let all_entries = read(found.entries, lists * entries);
    let mut tiles = Vec::new();
    for list in 0..lists {
        let (b, n) = (list / lists_per_batch, list % lists_per_batch);
        let gate = |e: usize| gates[(b * q_len + e / group) * heads + n * group + e % group];
        let selected: Vec<usize> = (0..entries).filter(|&e| gate(e) != 0.0).collect();
        assert_eq!(counts[list], selected.len(), "{case:?}: list {list}");
        assert_eq!(all_entries[list * entries..][..selected.len()], selected, "{case:?}: list {list}");
        for first in (0..selected.len()).step_by(tile_rows) {
            let rows = tile_rows.min(selected.len() - first);
            let keys = match causal {
                Some((kv_len, _)) => {
                    (selected[first + rows - 1] / group + 1 + kv_len).saturating_sub(q_len).min(kv_len)
                }
                None => KV_LEN,
            };
            tiles.push([list, first, rows, keys]);
        }
    }
    assert!(tiles.len() <= found.max_tiles && lists == found.lists, "{case:?}");
    assert_eq!(read(found.tile_count, 2), [tiles.len(), 0], "{case:?}");
    let planned: Vec<[usize; 4]> =
        read(found.tiles, 4 * tiles.len()).chunks_exact(4).map(|x| x.try_into().unwrap()).collect();
    let mut sorted = planned.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, tiles, "{case:?}");
    match causal {
        None => assert_eq!(planned, tiles, "{case:?}: in order"),
        Some((kv_len, list_bytes)) => {
            let section = (stream.properties().l2_bytes as usize / 2 / list_bytes).max(1).max(lists.div_ceil(64));
            let place = |tile: &[usize; 4]| (tile[0] / section, 63 - tile[3] * 64 / (kv_len + 1));
            assert!(planned.is_sorted_by_key(place), "{case:?}: sections, longest first");
        }
    }
}

#[test]
fn device_plans_equal_host_plans() {
    let Some(device) = Device::get() else { return };
    for q_len in [1, 31, 33, 64, 500, 1024, 1025, 2100] {
        for share in [0.0, 0.05, 0.6, 1.0] {
            check(device, Case { q_len, share, ..CASE });
            check(device, Case { q_len, share, lists_per_batch: 11, batch: 1, tile_rows: 128, ..CASE });
            check(device, Case { q_len, share, causal: Some((q_len, 1)), ..CASE });
        }
    }
    // Lists that are scanned in several rounds, and lists with their own block.
    check(device, Case { q_len: 40_000, batch: 1, lists_per_batch: 2, ..CASE });
    check(device, Case { q_len: 5000, group: 3, ..CASE });
    // More lists than threads, and many sections.
    check(device, Case { q_len: 3, batch: 50, lists_per_batch: 30, tile_rows: 2, ..CASE });
    check(
        device,
        Case { q_len: 30, batch: 50, lists_per_batch: 30, tile_rows: 8, causal: Some((50, 1 << 20)), ..CASE },
    );
    for (kv_len, list_bytes) in [(100, 1 << 18), (1000, 1 << 30), (20, 1 << 19), (0, 1)] {
        for group in [1, 4, 5] {
            check(device, Case { group, causal: Some((kv_len, list_bytes)), tile_rows: 16, ..CASE });
        }
    }
}
