// The tiles of attention kernels: up to tile_rows consecutive entries of one list of the plan.
//
// Tiles are numbered section by section; the keys and values of a section's lists fit the L2 cache together. A section's
// levels follow one another: the last tile of every list, then every second last one, and so on. Under a causal mask
// later entries see more keys, so long tiles come first, up to differences between lists.
//
// No list of tiles exists in memory: each block looks for its own in the lists' lengths. The numbers that a block takes
// grow, so it continues where it found its last tile, and in its whole life passes over the lists once.
#pragma once

#include "device.cuh"
#include "params.h"

namespace {

// Where a search has arrived: `before` tiles precede level `level` of the section that starts at list `section`.
struct TileSearch {
    int section = 0, level = 0, before = 0;
};

// The tile with number `index`: list, first entry, number of entries, number of keys visible to the last entry. The
// number of entries is 0 if there are not so many tiles. All lanes of a warp call with the same arguments; `index` is
// at least that of the search's previous call.
MOH_DEVICE int4 find_tile(const TileParams& p, TileSearch& search, int index, int lane = int(threadIdx.x) % 32) {
    constexpr unsigned full = 0xffffffffu;
    // The lengths of a section's lists, one per lane.
    auto lengths = [&](int section) {
        return lane < p.lists_per_section && section + lane < p.lists ? p.counts[section + lane] : 0;
    };
    int ahead = lengths(search.section);
    while (search.section < p.lists) {
        const int length = ahead;
        ahead = lengths(search.section + p.lists_per_section); // in flight while this section is searched
        while (const unsigned longer = __ballot_sync(full, length > search.level * p.tile_rows)) {
            // Levels have the same lists, down to the first tile of the shortest one: as many as precede the tile are skipped.
            const int count = __popc(longer);
            int levels = longer >> lane & 1 ? (length - 1) / p.tile_rows + 1 - search.level : 0x7fffffff;
            for (int step = 16; step > 0; step /= 2) levels = min(levels, __shfl_xor_sync(full, levels, step));
            const int skipped = min((index - search.before) / count, levels);
            search.before += skipped * count;
            search.level += skipped;
            if (skipped == levels) continue;
            const bool wanted = (longer >> lane & 1) && __popc(longer & ((1u << lane) - 1)) == index - search.before;
            const int place = __ffs(int(__ballot_sync(full, wanted))) - 1;
            const int list = search.section + place, entries = __shfl_sync(full, length, place);
            const int first = ((entries - 1) / p.tile_rows - search.level) * p.tile_rows;
            const int rows = min(p.tile_rows, entries - first);
            int keys = p.kv_len;
            if (p.is_causal) {
                const int last = p.entries[int64_t(list) * p.q_len * p.group + first + rows - 1];
                keys = max(0, min(keys, last / p.group + 1 + p.kv_len - p.q_len));
            }
            return make_int4(list, first, rows, keys);
        }
        search.section += p.lists_per_section;
        search.level = 0;
    }
    return make_int4(0, 0, 0, 0);
}

// The number of a block's next tile, in all lanes of the calling warp. Its first tile has number blockIdx.x.
MOH_DEVICE int take_number(const TileParams& p) {
    int taken = 0;
    if (threadIdx.x % 32 == 0) taken = atomicAdd(p.next, 1);
    return int(gridDim.x) + __shfl_sync(0xffffffffu, taken, 0);
}

// A block's next tile and its search, in shared memory, for kernels whose warps do all the same.
struct NextTile {
    int4 tile;
    int section, level, before, padding;

    // Finds tile `index`; called by one warp. A barrier must follow before other warps read the tile.
    MOH_DEVICE void find(const TileParams& p, int index) {
        TileSearch search{section, level, before};
        const int4 found = find_tile(p, search, index);
        __syncwarp(); // all lanes have read the search
        if (threadIdx.x % 32 != 0) return;
        tile = found;
        section = search.section, level = search.level, before = search.before;
    }
    // Finds the block's first tile.
    MOH_DEVICE void start(const TileParams& p) {
        if (threadIdx.x % 32 == 0) section = 0, level = 0, before = 0;
        __syncwarp();
        find(p, int(blockIdx.x));
    }
};
static_assert(sizeof(NextTile) == 32, "src/routed_attention/mma.rs and simt.rs repeat this");

} // namespace
