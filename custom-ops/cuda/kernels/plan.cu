// Makes the list of selected rows of every head from the gates, and the tiles that attention and linear kernels
// process.
//
// Two launches; the host reads nothing back. See PlanParams.

#include "device.cuh"
#include "params.h"

namespace {

constexpr int threads = 1024, warps = threads / 32;
constexpr unsigned full = 0xffffffffu;
// Entries that a warp scans between exchanges of counts with the other warps of its list: one ballot per lane.
constexpr int max_span = 32 * 32;
constexpr int loads = 8; // in flight
constexpr int buckets = 64; // per section, by number of keys

// The sum over the threads before this one; `total` is the sum over all. `sums` has room for 32 ints.
MOH_DEVICE int exclusive_sum(int value, int* sums, int& total) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, inclusive = value;
    for (int step = 1; step < 32; step *= 2) {
        int before = __shfl_up_sync(full, inclusive, step);
        if (lane >= step) inclusive += before;
    }
    if (lane == 31) sums[warp] = inclusive;
    __syncthreads();
    int before = 0;
    total = 0;
    for (int w = 0; w < warps; w++) {
        before += w < warp ? sums[w] : 0;
        total += sums[w];
    }
    __syncthreads();
    return before + inclusive - value;
}

// The list of `tile`: the last one with offsets[list] <= tile.
MOH_DEVICE int list_of(const int32_t* offsets, int lists, int tile) {
    int low = 0, high = lists;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (offsets[middle] <= tile)
            low = middle;
        else
            high = middle;
    }
    return low;
}

MOH_DEVICE int4 tile_at(const PlanParams& p, int tile) {
    int list = list_of(p.offsets, p.batch * p.lists_per_batch, tile);
    int first = (tile - p.offsets[list]) * p.tile_rows;
    int rows = min(p.tile_rows, p.counts[list] - first);
    int keys = p.kv_len;
    if (p.is_causal) {
        int last = p.entries[int64_t(list) * p.q_len * p.group + first + rows - 1];
        keys = max(0, min(p.kv_len, last / p.group + 1 + p.kv_len - p.q_len));
    }
    return make_int4(list, first, rows, keys);
}

// Sort key of a tile: by section, then by descending number of keys.
MOH_DEVICE int bucket_of(const PlanParams& p, const int4& tile) {
    int keys = int(int64_t(tile.w) * buckets / (int64_t(p.kv_len) + 1));
    return tile.x / p.lists_per_section * buckets + buckets - 1 - keys;
}

} // namespace

// Lists of selected entries. Grid: (batch, ceil(lists_per_batch / lists_per_block)); shared memory: 32 ints.
MOH_KERNEL(moh_plan_lists, PlanParams, 1024, 1) {
    int* warp_counts = reinterpret_cast<int*>(shared_memory());
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int warps_of_list = warps / p.lists_per_block, part = warp % warps_of_list;
    int n = blockIdx.y * p.lists_per_block + warp / warps_of_list;
    bool exists = n < p.lists_per_batch;
    int total = p.q_len * p.group, heads = p.lists_per_batch * p.group;
    int span = min(max_span, (total + 32 * warps_of_list - 1) / (32 * warps_of_list) * 32);

    int64_t list = int64_t(blockIdx.x) * p.lists_per_batch + n;
    const float* gates = p.gates + int64_t(blockIdx.x) * p.q_len * heads + n * p.group;
    int32_t* entries = p.entries + list * total;
    int count = 0;
    for (int start = 0; start < total; start += span * warps_of_list) {
        int first = start + part * span;
        unsigned ballots = 0; // lane s keeps the ballot of step s
        int selected = 0;
        for (int step = 0; step < span / 32; step += loads) {
            float gate[loads];
#pragma unroll
            for (int s = 0; s < loads; s++) {
                int i = first + (step + s) * 32 + lane;
                bool inside = exists && step + s < span / 32 && i < total;
                gate[s] = inside ? __ldg(gates + int64_t(i / p.group) * heads + i % p.group) : 0.0f;
            }
#pragma unroll
            for (int s = 0; s < loads; s++) {
                unsigned ballot = __ballot_sync(full, gate[s] != 0.0f);
                if (lane == step + s) ballots = ballot;
                selected += __popc(ballot);
            }
        }
        if (lane == 0) warp_counts[warp] = selected;
        __syncthreads();
        int position = count;
        for (int w = 0; w < warps_of_list; w++) {
            int there = warp_counts[warp - part + w];
            position += w < part ? there : 0;
            count += there;
        }
        __syncthreads();
        for (int step = 0; step < span / 32; step++) {
            unsigned ballot = __shfl_sync(full, ballots, step);
            if (ballot >> lane & 1) entries[position + __popc(ballot & ((1u << lane) - 1))] = first + step * 32 + lane;
            position += __popc(ballot);
        }
    }
    if (exists && part == 0 && lane == 0) p.counts[list] = count;
}

// Tiles of all lists. Grid: 1; shared memory: 32 ints, plus MOH_PLAN_SECTIONS * 64 if is_causal.
MOH_KERNEL(moh_plan_tiles, PlanParams, 1024, 1) {
    int* sums = reinterpret_cast<int*>(shared_memory());
    int* places = sums + 32;
    int thread = threadIdx.x, lists = p.batch * p.lists_per_batch;
    int tiles = 0;
    for (int start = 0; start < lists; start += threads) {
        int list = start + thread, total;
        int own = list < lists ? (p.counts[list] + p.tile_rows - 1) / p.tile_rows : 0;
        int before = exclusive_sum(own, sums, total);
        if (list < lists) p.offsets[list] = tiles + before;
        tiles += total;
    }
    if (thread == 0) {
        p.offsets[lists] = tiles;
        p.tile_count[0] = tiles;
        p.next[0] = 0;
    }
    int4* out = reinterpret_cast<int4*>(p.tiles);
    int used = ((lists - 1) / p.lists_per_section + 1) * buckets;
    if (p.is_causal)
        for (int i = thread; i < used; i += threads) places[i] = 0;
    __syncthreads();

    if (!p.is_causal) {
        for (int tile = thread; tile < tiles; tile += threads) out[tile] = tile_at(p, tile);
        return;
    }
    // A counting sort. The order within a bucket varies from run to run; no result depends on it.
    for (int tile = thread; tile < tiles; tile += threads) atomicAdd(&places[bucket_of(p, tile_at(p, tile))], 1);
    __syncthreads();
    int running = 0;
    for (int start = 0; start < used; start += threads) {
        int i = start + thread, total;
        int own = i < used ? places[i] : 0;
        int before = exclusive_sum(own, sums, total);
        if (i < used) places[i] = running + before;
        running += total;
    }
    __syncthreads();
    for (int tile = thread; tile < tiles; tile += threads) {
        int4 found = tile_at(p, tile);
        out[atomicAdd(&places[bucket_of(p, found)], 1)] = found;
    }
}
